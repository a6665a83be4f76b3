# A core goes off and comes back under running jobs, one of Slurm and one of pjwctl run. The grant is replaced, the wall
# goes along, and the masks that programs chose are as before: this kernel forgets them with each change of a cpuset.
. /cases/functions

bound() { pgrep -f "^sleep $1\$"; }
mask_of() { masks $(bound "$1"); }
has_mask() { [ "$(mask_of "$1")" = "$2" ]; }
first() { each_cpu "$1" | head -n 1; }
last_core() { cat "/sys/devices/system/cpu/cpu$(each_cpu "$1" | tail -n 1)/topology/thread_siblings_list"; }
run_wall() { cat /sys/fs/cgroup/pjw.slice/pjw-bound.scope/cpuset.cpus; }
walls_fit() { [ "$(cpuset_of_job "$job")" = "$(cpus "slurm:$job")" ] && [ "$(run_wall)" = "$(cpus manual:bound)" ]; }
is_bound() { [ -n "$(bound 5001)" ] && [ -n "$(bound 5002)" ] && [ -n "$(bound 5003)" ] && within "$(mask_of 5001)" "$(cpus "slurm:$job")"; }
run_is_on() { confined "$(cpus manual:bound)" $(process_tree $run); }

start_pjw
job=$(submit alice -n1 -c4 <<'END'
until [ -n "$mask" ] && [ "$mask" != 0-15 ]; do
    while read -r name value; do [ "$name" != Cpus_allowed_list: ] || mask=$value; done </proc/$$/status
done
taskset -c ${mask%%[-,]*} sleep 5001 &
for i in 1 2; do (while :; do :; done) & done
wait
END
)
pjwctl run --cores 2 --job bound -- bash -c 'taskset -c ${PJW_CPUS%%[-,]*} sleep 5002 & taskset -c ${PJW_CPUS##*[-,]} sleep 5003 & wait' &
run=$!
eventually "the job holds cores" holds "slurm:$job"
eventually "a process of each has bound itself" is_bound || exit 1
eventually "it is on them" job_is_confined "$job"
slurm_was=$(cpus "slurm:$job") run_was=$(cpus manual:bound)
slurm_mask=$(mask_of 5001) run_mask=$(mask_of 5002)
check "the one of Slurm's job to a CPU of the job" [ "$slurm_mask" = "$(first "$slurm_was")" ]
check "the one of the command too" [ "$run_mask" = "$(first "$run_was")" ]
check "each is behind a wall" walls_fit

# CPU 0 can't be switched off, and its core is the first to be given.
core=$(last_core "$slurm_was"),$(last_core "$run_was")
set_online 0 "$core"
eventually "Slurm's job no longer holds a core that is off" holds_none_of "slurm:$job" "$core"
eventually "nor does the command" holds_none_of manual:bound "$core"
check "another took its place" [ "$(each_cpu "$(cpus "slurm:$job")" | wc -l):$(each_cpu "$(cpus manual:bound)" | wc -l)" = 4:4 ]
check "no CPU belongs to both" disjoint "$(cpus "slurm:$job")" "$(cpus manual:bound)"
eventually "the walls went along" walls_fit
eventually "every thread of Slurm's job is on the new cores" job_is_confined "$job"
eventually "every thread of the command is, whose bound core is off too" run_is_on
eventually "who had bound itself in Slurm's job is bound as before" has_mask 5001 "$slurm_mask"
eventually "and in the command" has_mask 5002 "$run_mask"
slurm_now=$(cpus "slurm:$job") run_now=$(cpus manual:bound)
set_online 1 "$core"
eventually "the cores that are back are free" is_free "$core"
check "the jobs stay where they are" [ "$(cpus "slurm:$job"):$(cpus manual:bound)" = "$slurm_now:$run_now" ]
check "so do the walls" walls_fit
eventually "every thread is still on the job's cores" job_is_confined "$job"
eventually "and on the command's" run_is_on
eventually "bindings are still as before" has_mask 5001 "$slurm_mask"
eventually "both" has_mask 5002 "$run_mask"
check "Slurm has not taken the node away" never_drained
scancel "$job"
kill $(process_tree $run)
eventually "the job is forgotten" has_no_job "slurm:$job"
eventually "every core is free" is_free 0-15
