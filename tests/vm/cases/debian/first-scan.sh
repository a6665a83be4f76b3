# Without a hook a job runs free until the warden has seen it: 100 ms at most from its first process on. That is for a real
# machine. Emulated, a fork and exec takes 6 to 27 times as long, and 16 CPUs share two, so the milliseconds of both clocks,
# the warden's (when it tells that the job is confined) and the job's (when its shell finds itself inside), are told
# beside the target, and what counts is how far the job came: its shell looks at its own mask from its first command
# on, again and again. A look takes a real machine 1 ms, so that 50 of them are half the target; the emulated one is
# as much slower at them as the emulated warden is at its work.
# alone
. /cases/functions

script='
while [ -z "$mask" ] || [ "$mask" = 0-15 ]; do
    while read -r name value; do [ "$name" != Cpus_allowed_list: ] || mask=$value; done </proc/$$/status
    looks=$((looks + 1))
done
read -r now rest </proc/uptime
read -r -a stat </proc/$$/stat
echo "$(( ${now/./}  - ${stat[21]} ))0 $looks ${stat[21]}0 $mask" >/tmp/$SLURM_JOB_ID.inside
sleep 1000'
is_inside() { [ -s "/tmp/$1.inside" ]; }
# When the guest was booted, in milliseconds since 1970.
read -r up rest </proc/uptime
booted=$(($(date +%s%3N) - 10#${up/./}0))
# confined_at JOB: when the warden told that it has walled in or masked it, in milliseconds since the boot.
confined_at() {
    local time
    time=$(pjwctl events --json | grep '"event":"confined"' | grep -m1 "\"job\":\"$1\"")
    time=$(sed 's/.*"time":"\([^"]*\)".*/\1/' <<<"$time")
    [ -n "$time" ] && echo $(($(date -d "$time" +%s%3N) - booted))
}

start_pjw
check "nothing tells the warden of jobs" sh -c '! grep -iE "^(prolog|epilog|taskprolog)" /etc/slurm/slurm.conf'
for user in alice bob alice bob; do
    job=$(submit "$user" -n4 <<<"$script")
    jobs="$jobs $job"
    eventually "the shell of $user's job is inside" is_inside "$job" || exit 1
    read -r milliseconds looks began mask <"/tmp/$job.inside"
    eventually "the warden tells when" confined_at "slurm:$job"
    figure "within 100 ms of the first process without the prolog, on a real machine: here the warden confined it after" \
        "$(($(confined_at "slurm:$job") - began)) ms, and its shell found itself inside after $milliseconds ms, at look $looks"
    check "before its shell had looked 50 times" [ "$looks" -le 50 ]
    check "in cores of its own" within "$mask" "$(cpus "slurm:$job")"
    check "in one NUMA node" in_one_node "$mask"
    check "that are nobody else's" disjoint "$mask" "${held:-99}"
    held=$held${held:+,}$mask
done
for job in $jobs; do check "every thread of job $job is inside" job_is_confined "$job"; done
