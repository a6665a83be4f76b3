# Slurm without cgroups. pjwd recognises jobs by their parent processes and their variables. In this mode a process that leaves its
# session is not ended by scancel. It still belongs to the job.
. /cases/functions

# The pattern matches no shell that will start this program.
detached_runs() { pgrep -u alice -f '^[^ ]*sleep 4321$' >/dev/null; }
pids_of_user() { for pid in $(pgrep -u "$1" 'sleep|python3'); do echo "$pid"; done; }
user_is_on() { local pids; pids=$(pids_of_user "$1"); [ -n "$pids" ] && confined "$2" $pids; }

slurm_mode linuxproc
start_pjw
a=$(submit alice -n1 -c4 <<'END'
setsid sh -c 'sleep 4321 & sleep 1' </dev/null >/dev/null 2>&1
sleep 1000
END
)
b=$(echo 'srun -n2 -c2 sleep 1000' | submit bob -n2 -c2)
eventually "alice's job holds cores" holds "slurm:$a"
eventually "bob's job holds cores" holds "slurm:$b"
eventually "a process of alice's job has left its session" detached_runs
a_cpus=$(cpus "slurm:$a") b_cpus=$(cpus "slurm:$b")
check "alice's job of four CPUs holds two whole cores" [ "$(each_cpu "$a_cpus" | wc -l)" = 4 ]
check "bob's job of four CPUs holds two whole cores" [ "$(each_cpu "$b_cpus" | wc -l)" = 4 ]
check "no CPU belongs to both jobs" disjoint "$a_cpus" "$b_cpus"
check "the cores of alice's job are in one NUMA node" in_one_node "$a_cpus"
eventually "every thread of alice's job is on its cores" user_is_on alice "$a_cpus"
eventually "every thread of bob's job is on its cores" user_is_on bob "$b_cpus"
check "the evidence for bob's tasks is the parent process or the environment" sh -c "pjwctl show slurm:$b --json | grep -Eq '\"evidence\": ?\"(parent|environment)\"'"
check "slurmd is not bound" [ "$(masks "$(main_pid slurmd.service)")" = 0-15 ]

scancel "$a"
eventually "alice's job has ended in Slurm" is_over "$a"
check "the process that left its session still runs" detached_runs
eventually "the process that left its session is on the cores of the job" user_is_on alice "$a_cpus"
check "no core of the job is free while this process runs" disjoint "$a_cpus" "$(pjwctl status --json | tr -d ' \n' | grep -o '"free":"[^"]*"' | sed 's/.*:"//; s/"$//')"
pkill -u alice -f 'sleep 4321'
eventually "the job is no longer in the status after the end of this process" has_no_job "slurm:$a"
scancel "$b"
eventually "bob's cancelled job is no longer in the status" has_no_job "slurm:$b"
eventually "all cores are free" is_free 0-15
