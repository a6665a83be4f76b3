# Without a hook, a job runs on all CPUs until the first scan finds it. On a real machine that takes at most 100 ms from the start
# of its first process. The emulated machine needs 6 to 27 times as long for a fork and exec, and its 16 CPUs run on two CPUs of
# the host. So the times are printed and not checked: when pjwd reports that the job is confined, and when the shell of the job
# finds its mask narrowed. The checks count instead: the shell reads its own mask repeatedly from its first command on. One reading
# takes 1 ms on a real machine, so 25 readings are a quarter of the allowed time. Emulation slows down the readings as much as pjwd.
# Except when only the CPU of pjwd stands still: a single job is found late then. So seven of eight jobs must be found within 25 readings,
# and each within 300. A fault that delays every third job delays two or three of them. A job that is found by the scan of every second gets about 80 readings, by that of every ten seconds about 800.
# alone
. /cases/functions

script='
while [ -z "$mask" ] || [ "$mask" = 0-15 ]; do
    while read -r name value; do [ "$name" != Cpus_allowed_list: ] || mask=$value; done </proc/$$/status
    readings=$((readings + 1))
done
read -r now rest </proc/uptime
read -r -a stat </proc/$$/stat
echo "$(( ${now/./}  - ${stat[21]} ))0 $readings ${stat[21]}0 $mask" >/tmp/$SLURM_JOB_ID.inside
sleep 1000'
is_inside() { [ -s "/tmp/$1.inside" ]; }
# The boot time of the guest, in milliseconds since 1970.
read -r up rest </proc/uptime
booted=$(($(date +%s%3N) - 10#${up/./}0))
# confined_at JOB: prints when pjwd reported that it confined the job, in milliseconds since the boot.
confined_at() {
    local time
    time=$(pjwctl events --json | grep '"event":"confined"' | grep -m1 "\"job\":\"$1\"")
    time=$(sed 's/.*"time":"\([^"]*\)".*/\1/' <<<"$time")
    [ -n "$time" ] && echo $(($(date -d "$time" +%s%3N) - booted))
}

start_pjw
check "no prolog or epilog is configured" sh -c '! grep -iE "^(prolog|epilog|taskprolog)" /etc/slurm/slurm.conf'
found_soon=0
for round in 1 2; do
    jobs= held=
    for user in alice bob alice bob; do
        job=$(submit "$user" -n4 <<<"$script")
        jobs="$jobs $job"
        eventually "the mask of the shell of $user's job is narrowed" is_inside "$job" || exit 1
        read -r milliseconds readings began mask <"/tmp/$job.inside"
        eventually "pjwd reports when it confined the job of $user" confined_at "slurm:$job"
        figure "from the first process of the job, without a prolog (on a real machine within 100 ms): pjwd confined the job after" \
            "$(($(confined_at "slurm:$job") - began)) ms, and the mask of its shell was narrowed after $milliseconds ms, at reading $readings"
        [ "$readings" -gt 25 ] || found_soon=$((found_soon + 1))
        check "the shell had read its mask at most 300 times" [ "$readings" -le 300 ]
        check "the mask of the shell is inside the cores of its job" within "$mask" "$(cpus "slurm:$job")"
        check "the mask of the shell is inside one NUMA node" in_one_node "$mask"
        check "no other job has a CPU of this mask" disjoint "$mask" "${held:-99}"
        held=$held${held:+,}$mask
    done
    for job in $jobs; do check "every thread of job $job is on its cores" job_is_confined "$job"; done
    # shellcheck disable=SC2086 # one word for each job
    scancel $jobs
    eventually "all cores are free after round $round" is_free 0-15
done
check "in seven of eight jobs the shell had read its mask at most 25 times" [ "$found_soon" -ge 7 ]
