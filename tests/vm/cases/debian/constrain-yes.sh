# Slurm puts jobs into cpusets, and these cpusets are the grants. pjwd assigns no cores, and widens no mask.
. /cases/functions

only_pins_planned() {
    pjwctl plan --json | tr -d ' \n' >/tmp/planned && ! grep -Eq '"action":"(confine|repair|restore)"' /tmp/planned
}

scheduler_grants() { [ -n "$(cpuset_of_job "$1")" ] && [ "$(cpus "slurm:$1")" = "$(cpuset_of_job "$1")" ] && [ "$(field "slurm:$1" granted_by)" = scheduler ]; }
has_steps() { [ "$(pids_of_job "$1" 0 | wc -l)" -ge "$2" ]; }
core_of() { cat "/sys/devices/system/cpu/cpu$1/topology/thread_siblings_list"; }
# Each running thread of a user is pinned to a CPU of its own. Two of them share a core only if no core of the grant is idle.
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
eventually "the grant of alice's job is the cpuset that Slurm made" scheduler_grants "$a"
eventually "the grant of bob's job is the cpuset that Slurm made" scheduler_grants "$b"
eventually "bob's step has its tasks" has_steps "$b" 2
a_cpus=$(cpuset_of_job "$a") b_cpus=$(cpuset_of_job "$b") b_masks=$(step_masks "$b")
check "Slurm gave the jobs different cores" disjoint "$a_cpus" "$b_cpus"
check "pjwd shows the CPUs of both jobs as allocated" sh -c "pjwctl status --json | tr -d ' \n' | grep -q '\"allocated\":\"0-7\"'"
check "Slurm bound bob's two tasks to different CPUs" [ "$(echo "$b_masks" | wc -w)" = 2 ]
eventually "every thread of alice's job is on its cores" job_is_confined "$a"
eventually "every thread of bob's job is on its cores" job_is_confined "$b"

eventually "alice's three running threads are pinned to three CPUs, on both cores" is_balanced alice 3 "$a_cpus"
check "pjwctl plan has no other actions than pins" only_pins_planned
check "alice's cpuset is as Slurm wrote it" [ "$(cpuset_of_job "$a")" = "$a_cpus" ]
check "bob's tasks keep the masks that Slurm gave them" [ "$(step_masks "$b")" = "$b_masks" ]

# Another step of the job starts. Slurm writes the cpuset of the job again for it.
as bob srun --overlap --jobid="$b" -n1 sh -c 'grep Cpus_allowed_list /proc/self/status' >/tmp/step
check "another step of bob's job is inside the grant" within "$(sed 's/.*:[[:space:]]*//' /tmp/step)" "$b_cpus"
check "the grant of bob's job is the same after another step" scheduler_grants "$b"
scancel "$a" "$b"
eventually "alice's cancelled job is no longer in the status" has_no_job "slurm:$a"
eventually "bob's cancelled job is no longer in the status" has_no_job "slurm:$b"
eventually "the node is idle" is_idle
check "the node was never drained" never_drained
