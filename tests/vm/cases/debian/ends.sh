# Jobs that are requeued or have detached processes, and daemons that restart while jobs run. No job is moved, no process is left.
. /cases/functions

# The pattern matches no shell that will start this program.
detached() { pgrep -u alice -f '^[^ ]*sleep 4321$'; }
detached_runs() { detached >/dev/null; }
none_runs() { ! pgrep -u alice sleep >/dev/null; }
restart_count_is() { [ "$(scontrol show job "$1" -o | sed -n 's/.* Restarts=\([0-9]*\).*/\1/p')" = "$2" ]; }
runs_again() {
    # A requeued job waits for its start time. It is set to now.
    scontrol update jobid="$1" StartTime=now 2>/dev/null
    is_state "$1" RUNNING
}

start_pjw
a=$(submit alice --requeue -n1 -c4 <<'END'
setsid sh -c 'setsid sleep 4321 &' </dev/null >/dev/null 2>&1
sleep 1000
END
)
b=$(sbatch_busy bob 2 -n1 -c6)
eventually "alice's job holds cores" holds "slurm:$a"
eventually "bob's job holds cores" holds "slurm:$b"
eventually "a process of alice's job has left its session" detached_runs
a_cpus=$(cpus "slurm:$a") b_cpus=$(cpus "slurm:$b")
check "a job of six CPUs holds three whole cores" [ "$(each_cpu "$b_cpus" | wc -l)" = 6 ]
eventually "alice's job is on its cores" job_is_confined "$a"
check "the process that left its session is on the cores of the job" confined "$a_cpus" $(detached)

# The daemons of this node restart while the jobs run.
was=$(slurmd_start)
systemctl restart slurmd
eventually "slurmd answers after its restart" slurmd_is_back "$was"
check "bob's job still runs after the restart of slurmd" is_state "$b" RUNNING
systemctl daemon-reload
kill -9 "$(main_pid)"
eventually "pjwd answers again after it was killed" answers
for job in "$a:$a_cpus" "$b:$b_cpus"; do
    check "job ${job%%:*} holds the same cores after the restarts" [ "$(cpus "slurm:${job%%:*}")" = "${job#*:}" ]
    eventually "job ${job%%:*} is on its cores after the restarts" job_is_confined "${job%%:*}"
done

scontrol requeue "$a"
eventually "alice's job was requeued" restart_count_is "$a" 1
eventually "the requeued job runs again" runs_again "$a"
eventually "the requeued job holds cores" holds "slurm:$a"
eventually "the requeued job is on its cores" job_is_confined "$a"
check "the cores of the requeued job belong to no other job" disjoint "$(cpus "slurm:$a")" "$(cpus "slurm:$b")"
check "bob's job holds the same cores" [ "$(cpus "slurm:$b")" = "$b_cpus" ]

scancel "$a" "$b"
eventually "the process that left its session ends with the job" none_runs
eventually "alice's cancelled job is no longer in the status" has_no_job "slurm:$a"
eventually "bob's cancelled job is no longer in the status" has_no_job "slurm:$b"
eventually "all cores are free" is_free 0-15
eventually "the node is idle" is_idle
check "the node was never drained" never_drained
