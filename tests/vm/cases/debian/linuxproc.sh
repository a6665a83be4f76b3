# Slurm without cgroups: jobs are known by what started them and by their environment. What leaves its session and
# outlives scancel, as it does in this mode, is still the job's.
. /cases/functions

has_left() { pgrep -u alice -f 'sleep 4321' >/dev/null; }
of_job() { for pid in $(pgrep -u "$1" 'sleep|python3'); do echo "$pid"; done; }
users_are_on() { local pids; pids=$(of_job "$1"); [ -n "$pids" ] && confined "$2" $pids; }

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
eventually "alice's job left a daemon behind" has_left
a_cpus=$(cpus "slurm:$a") b_cpus=$(cpus "slurm:$b")
check "four CPUs are two whole cores for alice" [ "$(each_cpu "$a_cpus" | wc -l)" = 4 ]
check "four CPUs are two whole cores for bob" [ "$(each_cpu "$b_cpus" | wc -l)" = 4 ]
check "no CPU belongs to both" disjoint "$a_cpus" "$b_cpus"
check "alice's are in one NUMA node" in_one_node "$a_cpus"
eventually "all that alice's job started is on its cores" users_are_on alice "$a_cpus"
eventually "all that bob's job started is on its cores" users_are_on bob "$b_cpus"
check "its tasks are known as Slurm's children" sh -c "pjwctl show slurm:$b --json | grep -Eq '\"evidence\": ?\"(parent|environment)\"'"
check "slurmd is not bound" [ "$(masks "$(main_pid slurmd.service)")" = 0-15 ]

scancel "$a"
eventually "Slurm has ended alice's job" is_over "$a"
check "the daemon that left is alive" has_left
eventually "and still on the job's cores" users_are_on alice "$a_cpus"
check "which are not given to others" disjoint "$a_cpus" "$(pjwctl status --json | tr -d ' \n' | grep -o '"free":"[^"]*"' | sed 's/.*:"//; s/"$//')"
pkill -u alice -f 'sleep 4321'
eventually "with its end the job is forgotten" has_no_job "slurm:$a"
scancel "$b"
eventually "bob's cancelled job is forgotten" has_no_job "slurm:$b"
eventually "every core is free" is_free 0-15
