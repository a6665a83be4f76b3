# Jobs that end in other ways, and daemons that are restarted while jobs run: nobody moves, nothing leaks.
. /cases/functions

has_left() { pgrep -u alice -f 'sleep 4321' >/dev/null; }
all_gone() { ! pgrep -u alice sleep >/dev/null; }
restarts() { [ "$(scontrol show job "$1" -o | sed -n 's/.* Restarts=\([0-9]*\).*/\1/p')" = "$2" ]; }
runs_again() {
    # Slurm lets a job that was put back wait for its time; no need to.
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
eventually "a daemon has left alice's session" has_left
a_cpus=$(cpus "slurm:$a") b_cpus=$(cpus "slurm:$b")
check "six CPUs are three whole cores" [ "$(each_cpu "$b_cpus" | wc -l)" = 6 ]
eventually "alice's job is on its cores, with what has left" job_is_confined "$a"
check "what has left is on them too" confined "$a_cpus" $(pgrep -u alice -f 'sleep 4321')

# The daemons of this node restart under running jobs.
systemctl restart slurmd
eventually "slurmd is back" is_state "$b" RUNNING
systemctl daemon-reload
kill -9 "$(main_pid)"
eventually "the killed warden is back" answers
for job in "$a:$a_cpus" "$b:$b_cpus"; do
    check "job ${job%%:*} kept its cores" [ "$(cpus "slurm:${job%%:*}")" = "${job#*:}" ]
    eventually "job ${job%%:*} is on them" job_is_confined "${job%%:*}"
done

scontrol requeue "$a"
eventually "the job was put back into the queue" restarts "$a" 1
eventually "and runs again" runs_again "$a"
eventually "it holds cores again" holds "slurm:$a"
eventually "and is on them" job_is_confined "$a"
check "they are nobody else's" disjoint "$(cpus "slurm:$a")" "$(cpus "slurm:$b")"
check "bob's are the same" [ "$(cpus "slurm:$b")" = "$b_cpus" ]

scancel "$a" "$b"
eventually "what left the session ended with the job" all_gone
eventually "alice's job is forgotten" has_no_job "slurm:$a"
eventually "bob's job is forgotten" has_no_job "slurm:$b"
eventually "every core is free" is_free 0-15
eventually "the node is idle" is_idle
check "the node was never drained" never_drained
