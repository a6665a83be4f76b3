# The experiment: on 16 CPUs a job that asked for eight and keeps 16 busy, beside one that asked for eight and keeps to
# it. Without the warden the first slows the second; with it, it slows itself alone. Where two host CPUs play 16, no
# time of a program means anything: compared is what the guest's kernel counts for each thread, how long it ran and
# how long it waited for a CPU (schedstat). A thread that never waits isn't slowed. Slurm makes no cgroups here: those
# of its jobs have equal weights, by which the kernel's scheduler does some of what the warden is for.
# alone
. /cases/functions

# So many processes that compute while they are let: they stop themselves first, for nothing else of the node gets far
# while 24 run.
computing() { echo "for i in \$(seq $1); do (kill -STOP \$BASHPID; while :; do :; done) & done; wait"; }
stopped() { for pid in $(pgrep -u "$1" slurm_script); do grep -q '^State:.T' "/proc/$pid/status" 2>/dev/null && echo "$pid"; done; }
grown() { [ "$(stopped "$1" | wc -l)" = "$2" ]; }
go() { kill -CONT $greedy $modest; }
pause() { kill -STOP $greedy $modest; }
# all_run N PID...: whether N of these run or wait for a CPU now.
all_run() {
    local most=$1
    shift
    [ "$(cat $(printf '/proc/%s/stat ' "$@") | awk '$3 == "R" { n++ } END { print n + 0 }')" -ge "$most" ]
}
# measure: for some seconds of the guest; sets `ran` and `waited` (permille of the wish) of both jobs.
measure() {
    local before after before_small after_small
    before=$(sched_times $greedy) && before_small=$(sched_times $modest)
    sleep 6
    after=$(sched_times $greedy) && after_small=$(sched_times $modest)
    read -r ran_big waits_big <<<"$(sched_difference "$before" "$after")"
    read -r ran_small waits_small <<<"$(sched_difference "$before_small" "$after_small")"
    figure "$1: the job of 16 threads ran $ran_big ms, of what it wanted it waited $waits_big permille"
    figure "$1: the job of 8 threads ran $ran_small ms, of what it wanted it waited $waits_small permille"
}

slurm_mode linuxproc
big=$(submit alice -n8 <<<"$(computing 16)")
small=$(submit bob -n8 <<<"$(computing 8)")
eventually "the first job has its processes" grown alice 16
eventually "the second job has its processes" grown bob 8
greedy=$(stopped alice) modest=$(stopped bob)
go
eventually "16 of the first job run" all_run 16 $greedy
eventually "8 of the second job run" all_run 8 $modest
measure "without the warden"
pause
alone=$waits_small
check "without the warden the second job is slowed by the first" [ "$waits_small" -ge 200 ]

start_pjw
eventually "the first job holds cores" holds "slurm:$big"
eventually "the second job holds cores" holds "slurm:$small"
check "eight CPUs each" [ "$(each_cpu "$(cpus "slurm:$big")" | wc -l):$(each_cpu "$(cpus "slurm:$small")" | wc -l)" = 8:8 ]
check "none of them both" disjoint "$(cpus "slurm:$big")" "$(cpus "slurm:$small")"
eventually "the first is on them" confined "$(cpus "slurm:$big")" $greedy
eventually "the second is on them" confined "$(cpus "slurm:$small")" $modest
go
eventually "16 of the first job run again" all_run 16 $greedy
eventually "8 of the second job run again" all_run 8 $modest
measure "with the warden"
pause
check "with it the second job waits for the node's daemons only" [ "$waits_small" -le $((alone / 2)) ]
check "the first slows itself" [ "$waits_big" -ge 300 ]
check "each has its half of the machine" [ $((ran_small * 10)) -ge $((ran_big * 8)) ]
