# Slurm puts jobs into cpusets: those are the grants. The warden gives nothing and widens nothing.
. /cases/functions

only_pins_planned() {
    pjwctl plan --json | tr -d ' \n' >/tmp/planned && ! grep -Eq '"action":"(confine|repair|restore)"' /tmp/planned
}

scheduler_grants() { [ -n "$(cpuset_of_job "$1")" ] && [ "$(cpus "slurm:$1")" = "$(cpuset_of_job "$1")" ] && [ "$(field "slurm:$1" granted_by)" = scheduler ]; }
has_steps() { [ "$(pids_of_job "$1" 0 | wc -l)" -ge "$2" ]; }
core_of() { cat "/sys/devices/system/cpu/cpu$1/topology/thread_siblings_list"; }
# Each thread of a user that runs has a CPU of its own, and none shares a core while another core of the grant is free.
is_balanced() {
    local cpus cores threads=$2
    cpus=$(for pid in $(pgrep -u "$1" -r R); do masks "$pid"; done)
    [ "$(wc -l <<<"$cpus")" = "$threads" ] && ! grep -q '[-,]' <<<"$cpus" || return 1
    [ "$(sort -u <<<"$cpus" | wc -l)" = "$threads" ] || return 1
    cores=$(for cpu in $cpus; do core_of "$cpu"; done | sort -u | wc -l)
    [ "$cores" = "$(for cpu in $(each_cpu "$3"); do core_of "$cpu"; done | sort -u | head -n "$threads" | wc -l)" ]
}
step_masks() { masks $(pids_of_job "$1" 0) | tr '\n' ' '; }

slurm_mode constrain-yes
start_pjw
a=$(sbatch_busy alice 3 -n1 -c4)
b=$(echo 'srun -n2 -c2 sleep 1000' | submit bob -n2 -c2)
eventually "alice's cpuset is alice's grant" scheduler_grants "$a"
eventually "bob's cpuset is bob's grant" scheduler_grants "$b"
eventually "bob's step has its tasks" has_steps "$b" 2
a_cpus=$(cpuset_of_job "$a") b_cpus=$(cpuset_of_job "$b") b_masks=$(step_masks "$b")
check "Slurm gave them different cores" disjoint "$a_cpus" "$b_cpus"
check "the free cores are the others" sh -c "pjwctl status --json | tr -d ' \n' | grep -q '\"allocated\":\"0-7\"'"
check "Slurm bound bob's two tasks apart" [ "$(echo "$b_masks" | wc -w)" = 2 ]
eventually "every thread of alice's job is on its cores" job_is_confined "$a"
eventually "every thread of bob's job is on its cores" job_is_confined "$b"

eventually "alice's three busy threads have three CPUs, of both cores" is_balanced alice 3 "$a_cpus"
check "nothing is planned but pins" only_pins_planned
check "alice's cpuset is as Slurm wrote it" [ "$(cpuset_of_job "$a")" = "$a_cpus" ]
check "bob's tasks keep Slurm's binding" [ "$(step_masks "$b")" = "$b_masks" ]

# One more step of the job, for which Slurm writes the job's cpuset again.
as bob srun --overlap --jobid="$b" -n1 sh -c 'grep Cpus_allowed_list /proc/self/status' >/tmp/step
check "another step is inside the grant" within "$(sed 's/.*:[[:space:]]*//' /tmp/step)" "$b_cpus"
check "and the grant is the same" scheduler_grants "$b"
scancel "$a" "$b"
eventually "alice's cancelled job is forgotten" has_no_job "slurm:$a"
eventually "bob's cancelled job is forgotten" has_no_job "slurm:$b"
eventually "the node is idle" is_idle
check "the node was never drained" never_drained
