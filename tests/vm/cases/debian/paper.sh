# The experiment of the paper on 16 CPUs: the first job requests eight CPUs and has 16 running processes. The second job requests
# eight and has eight. Without pjwd the first job slows down the second. With pjwd it slows down only itself. Wall-clock times mean
# nothing when 16 emulated CPUs run on two CPUs of the host. So the check compares what the kernel of the guest counts for each
# thread: its run time, and its wait time for a CPU (schedstat). Slurm makes no cgroups here: cgroups of its jobs would have equal
# weights, and the kernel's scheduler would then divide the CPUs between the jobs.
# alone
. /cases/functions

# job_script N: prints a script with N processes that compute after SIGCONT. Each stops itself first, because other programs of
# the node are slow while 24 processes compute.
job_script() { echo "for i in \$(seq $1); do (kill -STOP \$BASHPID; while :; do :; done) & done; wait"; }
stopped() { for pid in $(pgrep -u "$1" slurm_script); do ! is_in_state T "$pid" || echo "$pid"; done; }
all_are_stopped() { [ "$(stopped "$1" | wc -l)" = "$2" ]; }
continue_all() { kill -CONT $first_pids $second_pids; }
stop_all() { kill -STOP $first_pids $second_pids; }
# are_running N PID...: whether at least N of these processes run or wait for a CPU now.
are_running() {
    local missing=$1 pid
    shift
    for pid in "$@"; do ! is_in_state R "$pid" || missing=$((missing - 1)); done
    [ "$missing" -le 0 ]
}
# measure SITUATION: measures for 5 s of the guest, and stops all processes. For both jobs, sets the run time in ms, the wait time in
# permille, and the share of a CPU that a process got, in permille. The kernel's scheduler and pjwd have 3 s to distribute the processes before.
measure() {
    local before after before_second after_second
    sleep 3
    before=$(sched_times $first_pids) && before_second=$(sched_times $second_pids)
    sleep 5
    after=$(sched_times $first_pids) && after_second=$(sched_times $second_pids)
    stop_all
    read -r first_ran first_waits first_share <<<"$(sched_difference "$before" "$after")"
    read -r second_ran second_waits second_share <<<"$(sched_difference "$before_second" "$after_second")"
    figure "$1: the job of 16 threads ran $first_ran ms, and waited for $first_waits permille of its run and wait time"
    figure "$1: the job of 8 threads ran $second_ran ms, and waited for $second_waits permille of its run and wait time"
}

slurm_mode linuxproc
first=$(submit alice -n8 <<<"$(job_script 16)")
second=$(submit bob -n8 <<<"$(job_script 8)")
eventually "the first job has 16 stopped processes" all_are_stopped alice 16
eventually "the second job has 8 stopped processes" all_are_stopped bob 8
first_pids=$(stopped alice) second_pids=$(stopped bob)
continue_all
eventually "16 processes of the first job run" are_running 16 $first_pids
eventually "8 processes of the second job run" are_running 8 $second_pids
measure "without pjwd"
waits_without_pjwd=$second_waits
check "without pjwd the first job slows down the second" [ "$second_waits" -ge 200 ]

start_pjw
eventually "the first job holds cores" holds "slurm:$first"
eventually "the second job holds cores" holds "slurm:$second"
check "each job holds eight CPUs" [ "$(each_cpu "$(cpus "slurm:$first")" | wc -l):$(each_cpu "$(cpus "slurm:$second")" | wc -l)" = 8:8 ]
check "no CPU belongs to both jobs" disjoint "$(cpus "slurm:$first")" "$(cpus "slurm:$second")"
eventually "the first job is on its cores" confined "$(cpus "slurm:$first")" $first_pids
eventually "the second job is on its cores" confined "$(cpus "slurm:$second")" $second_pids
continue_all
eventually "16 processes of the first job run again" are_running 16 $first_pids
eventually "8 processes of the second job run again" are_running 8 $second_pids
measure "with pjwd"
check "with pjwd the second job waits at most half as long" [ "$second_waits" -le $((waits_without_pjwd / 2)) ]
check "with pjwd the first job slows down itself" [ "$first_waits" -ge 300 ]
# The run times alone do not tell: one job may be measured for a longer time than the other.
check "with pjwd each job gets about half of the machine" [ $((8 * second_share * 10)) -ge $((16 * first_share * 8)) ]
