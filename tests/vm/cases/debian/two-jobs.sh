# Two jobs of Slurm with four CPUs each. Slurm binds no process. Without a hook, pjwd finds the jobs and assigns cores to them.
. /cases/functions

# A process with 64 threads that sleep.
threads='import threading, time
for _ in range(63): threading.Thread(target=time.sleep, args=(1000,)).start()
time.sleep(1000)'
has_processes() { [ "$(pids_of_job "$1" | wc -l)" -ge "$2" ]; }
has_threads() { [ "$(cat $(pids_of_job "$1" | sed 's|.*|/proc/&/status|') 2>/dev/null | awk '/^Threads:/ { n += $2 } END { print n + 0 }')" -ge "$2" ]; }

start_pjw
check "no prolog or epilog is configured" sh -c '! grep -iE "^(prolog|epilog|taskprolog)" /etc/slurm/slurm.conf'
a=$(sbatch_busy alice 3 -n1 -c4)
b=$(submit bob -n4 <<END
srun -n4 sleep 1000 &
python3 -c '$threads'
END
)
eventually "alice's job holds cores" holds "slurm:$a"
eventually "bob's job holds cores" holds "slurm:$b"
eventually "alice's job has all its processes" has_processes "$a" 4
eventually "bob's job has all its threads" has_threads "$b" 69

a_cpus=$(cpus "slurm:$a") b_cpus=$(cpus "slurm:$b")
check "alice's job of four CPUs holds two whole cores" [ "$(each_cpu "$a_cpus" | wc -l)" = 4 ]
check "bob's job of four CPUs holds two whole cores" [ "$(each_cpu "$b_cpus" | wc -l)" = 4 ]
check "no CPU belongs to both jobs" disjoint "$a_cpus" "$b_cpus"
check "the cores of alice's job are in one NUMA node" in_one_node "$a_cpus"
check "the cores of bob's job are in one NUMA node" in_one_node "$b_cpus"
check "the cores of alice's job were granted by pjwd" [ "$(field "slurm:$a" granted_by)" = warden ]
check "bob's job has requested two cores" [ "$(field "slurm:$b" requested_cores)" = 2 ]
check "the owner of alice's job is alice" [ "$(field "slurm:$a" owner)" = 1001 ]
eventually "every thread of alice's job is on its cores" job_is_confined "$a"
eventually "every thread of bob's job is on its cores" job_is_confined "$b"
eventually "alice's job is confined by a cpuset" is_by_cpuset "slurm:$a"
eventually "bob's job is confined by a cpuset" is_by_cpuset "slurm:$b"
check "the cgroups of both jobs have the CPUs of the grants" [ "$(cpuset_of_job "$a"):$(cpuset_of_job "$b")" = "$a_cpus:$b_cpus" ]
check "slurmd is not bound" [ "$(masks "$(main_pid slurmd.service)")" = 0-15 ]

# A process of the job requests a mask of all CPUs. The cpuset limits it to those of the job.
member=$(pids_of_job "$a" | tail -n 1)
as alice taskset -apc 0-15 "$member" >&2
check "a thread that requests all CPUs stays on the job's cores" confined "$a_cpus" "$member"

scancel "$a" "$b"
eventually "alice's cancelled job is no longer in the status" has_no_job "slurm:$a"
eventually "bob's cancelled job is no longer in the status" has_no_job "slurm:$b"
eventually "the cores of both jobs are free" is_free "$a_cpus,$b_cpus"
eventually "the node is idle" is_idle
check "the node was never drained" never_drained
