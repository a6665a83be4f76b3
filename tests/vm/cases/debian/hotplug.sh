# Cores of two running jobs go offline and online: a job of Slurm and one of pjwctl run. The grants are replaced, the cpusets follow,
# and masks that programs requested are restored. Before Linux 6.2, each change of a cpuset resets them.
. /cases/functions

bound() { pgrep -f "^sleep $1\$"; }
mask_of() { masks $(bound "$1"); }
has_mask() { [ "$(mask_of "$1")" = "$2" ]; }
first() { each_cpu "$1" | head -n 1; }
last_core() { cat "/sys/devices/system/cpu/cpu$(each_cpu "$1" | tail -n 1)/topology/thread_siblings_list"; }
run_cpuset() { cat /sys/fs/cgroup/pjw.slice/pjw-bound.scope/cpuset.cpus; }
cpusets_are_grants() { [ "$(cpuset_of_job "$job")" = "$(cpus "slurm:$job")" ] && [ "$(run_cpuset)" = "$(cpus manual:bound)" ]; }
all_are_bound() { [ -n "$(bound 5001)" ] && [ -n "$(bound 5002)" ] && [ -n "$(bound 5003)" ] && within "$(mask_of 5001)" "$(cpus "slurm:$job")"; }
run_is_on() { confined "$(cpus manual:bound)" $(process_tree $run); }

start_pjw
# The job waits for the CPU of its process: it cannot tell its own mask from the one PU of a hot thread.
job=$(submit alice -n1 -c4 <<'END'
until [ -s /tmp/bind-to ]; do sleep 0.2; done
taskset -c "$(</tmp/bind-to)" sleep 5001 &
for i in 1 2; do (while :; do :; done) & done
wait
END
)
pjwctl run --cores 2 --job bound -- bash -c 'taskset -c ${PJW_CPUS%%[-,]*} sleep 5002 & taskset -c ${PJW_CPUS##*[-,]} sleep 5003 & wait' &
run=$!
eventually "Slurm's job holds cores" holds "slurm:$job"
eventually "Slurm's job is on its cores before its process binds itself" job_is_confined "$job" || exit 1
first "$(cpus "slurm:$job")" >/tmp/first && mv /tmp/first /tmp/bind-to
eventually "processes of both jobs have bound themselves" all_are_bound || exit 1
eventually "Slurm's job is on its cores" job_is_confined "$job"
slurm_was=$(cpus "slurm:$job") run_was=$(cpus manual:bound)
slurm_mask=$(first "$slurm_was") run_mask=$(first "$run_was")
eventually "the cpusets of both jobs are their grants" cpusets_are_grants
eventually "Slurm's job is confined by a cpuset" is_by_cpuset "slurm:$job"
eventually "the command is confined by a cpuset" is_by_cpuset manual:bound
# The first cpuset may have come after the process had bound itself, and may have reset its mask.
eventually "the process of Slurm's job is bound to the first CPU of the job" has_mask 5001 "$slurm_mask"
eventually "the process of the command is bound to the first CPU of its job" has_mask 5002 "$run_mask"

# CPU 0 cannot go offline. Its core is assigned first, so the last cores of the jobs go offline.
core=$(last_core "$slurm_was"),$(last_core "$run_was")
set_online 0 "$core"
eventually "Slurm's job holds no CPU that is offline" holds_none_of "slurm:$job" "$core"
eventually "the command holds no CPU that is offline" holds_none_of manual:bound "$core"
check "both jobs have as many CPUs as before" [ "$(each_cpu "$(cpus "slurm:$job")" | wc -l):$(each_cpu "$(cpus manual:bound)" | wc -l)" = 4:4 ]
check "no CPU belongs to both jobs" disjoint "$(cpus "slurm:$job")" "$(cpus manual:bound)"
eventually "the cpusets of both jobs are their new grants" cpusets_are_grants
eventually "every thread of Slurm's job is on the new cores" job_is_confined "$job"
eventually "every thread of the command is on the new cores, also one whose bound core is offline" run_is_on
eventually "the process of Slurm's job has the mask that it requested" has_mask 5001 "$slurm_mask"
eventually "the process of the command has the mask that it requested" has_mask 5002 "$run_mask"
slurm_now=$(cpus "slurm:$job") run_now=$(cpus manual:bound)
set_online 1 "$core"
eventually "the cores are free when they are online again" is_free "$core"
check "the jobs keep their new cores" [ "$(cpus "slurm:$job"):$(cpus manual:bound)" = "$slurm_now:$run_now" ]
check "the cpusets of both jobs stay the same" cpusets_are_grants
eventually "every thread of Slurm's job is still on its cores" job_is_confined "$job"
eventually "every thread of the command is still on its cores" run_is_on
eventually "the process of Slurm's job keeps its mask" has_mask 5001 "$slurm_mask"
eventually "the process of the command keeps its mask" has_mask 5002 "$run_mask"
check "the node was never drained" never_drained
scancel "$job"
kill $(process_tree $run)
eventually "the cancelled job is no longer in the status" has_no_job "slurm:$job"
eventually "all cores are free" is_free 0-15
