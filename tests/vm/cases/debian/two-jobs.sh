# Two jobs of Slurm, four CPUs each, which Slurm binds to nothing: the warden gives them cores, found without a hook.
. /cases/functions

# One process with 64 threads that sleep, and six that compute.
threads='import threading, time
for _ in range(63): threading.Thread(target=time.sleep, args=(1000,)).start()
time.sleep(1000)'
grown() { [ "$(pids_of_job "$1" | wc -l)" -ge "$2" ]; }
has_threads() { [ "$(cat $(pids_of_job "$1" | sed 's|.*|/proc/&/status|') 2>/dev/null | awk '/^Threads:/ { n += $2 } END { print n + 0 }')" -ge "$2" ]; }

start_pjw
check "nothing tells the warden of jobs" sh -c '! grep -iE "^(prolog|epilog|taskprolog)" /etc/slurm/slurm.conf'
a=$(sbatch_busy alice 3 -n1 -c4)
b=$(submit bob -n4 <<END
srun -n4 sleep 1000 &
python3 -c '$threads'
END
)
eventually "alice's job holds cores" holds "slurm:$a"
eventually "bob's job holds cores" holds "slurm:$b"
eventually "alice's job has grown" grown "$a" 4
eventually "bob's job has its threads" has_threads "$b" 69

a_cpus=$(cpus "slurm:$a") b_cpus=$(cpus "slurm:$b")
check "four CPUs are two whole cores for alice" [ "$(each_cpu "$a_cpus" | wc -l)" = 4 ]
check "four CPUs are two whole cores for bob" [ "$(each_cpu "$b_cpus" | wc -l)" = 4 ]
check "no CPU belongs to both" disjoint "$a_cpus" "$b_cpus"
check "alice's are in one NUMA node" in_one_node "$a_cpus"
check "bob's are in one NUMA node" in_one_node "$b_cpus"
check "the warden granted alice's" [ "$(field "slurm:$a" granted_by)" = warden ]
check "they count as two cores" [ "$(field "slurm:$b" requested_cores)" = 2 ]
check "the owner is known" [ "$(field "slurm:$a" owner)" = 1001 ]
eventually "every thread of alice's job is on its cores" job_is_confined "$a"
eventually "every thread of bob's job is on its cores" job_is_confined "$b"
check "a cpuset keeps them there" [ "$(field "slurm:$a" enforcement):$(field "slurm:$b" enforcement)" = cpuset:cpuset ]
check "Slurm's directories have it" [ "$(cpuset_of_job "$a"):$(cpuset_of_job "$b")" = "$a_cpus:$b_cpus" ]
check "Slurm's daemon is not bound" [ "$(masks "$(main_pid slurmd.service)")" = 0-15 ]

# A job's own program asks for all CPUs, and gets its own.
rebel=$(pids_of_job "$a" | tail -n 1)
as alice taskset -apc 0-15 "$rebel" >&2
check "a thread that wants out stays inside" confined "$a_cpus" "$rebel"

scancel "$a" "$b"
eventually "alice's cancelled job is forgotten" has_no_job "slurm:$a"
eventually "bob's cancelled job is forgotten" has_no_job "slurm:$b"
eventually "their cores are free" is_free "$a_cpus,$b_cpus"
eventually "the node is idle" is_idle
check "the node was never drained" never_drained
