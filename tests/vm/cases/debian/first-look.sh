# Without a hook a job runs free until the warden has seen it. How long, by the guest's clock: from the start of the
# batch script's shell, which Slurm makes the job's first process, to the first look of that shell at its own mask that
# finds it inside. That process is forked by slurmstepd, and becomes the shell a good while later. The target is 100 ms on a real machine. Emulated, a fork and exec takes 6 to 27 times as long, and
# 16 CPUs share two: so the bound is 20 times the target, and the figure is told.
# first
. /cases/words

script='
while [ -z "$mask" ] || [ "$mask" = 0-15 ]; do
    while read -r name value; do [ "$name" != Cpus_allowed_list: ] || mask=$value; done </proc/$$/status
    looks=$((looks + 1))
done
read -r now rest </proc/uptime
read -r -a stat </proc/$$/stat
echo "$(( ${now/./}  - ${stat[21]} ))0 $looks $mask" >/tmp/$SLURM_JOB_ID.inside
sleep 1000'
is_inside() { [ -s "/tmp/$1.inside" ]; }

start_pjw
check "nothing tells the warden of jobs" sh -c '! grep -iE "^(prolog|epilog|taskprolog)" /etc/slurm/slurm.conf'
for user in alice bob alice bob; do
    job=$(submit "$user" -n4 <<<"$script")
    jobs="$jobs $job"
    eventually "the shell of $user's job is inside" is_inside "$job" || exit 1
    read -r milliseconds looks mask <"/tmp/$job.inside"
    figure "inside $milliseconds ms after its first process (look $looks)"
    check "within 20 times the target of 100 ms" [ "$milliseconds" -le 2000 ]
    check "in cores of its own" within "$mask" "$(cpus "slurm:$job")"
    check "in one NUMA node" in_one_node "$mask"
    check "that are nobody else's" disjoint "$mask" "${held:-99}"
    held=$held${held:+,}$mask
done
for job in $jobs; do check "every thread of job $job is inside" job_is_jailed "$job"; done
