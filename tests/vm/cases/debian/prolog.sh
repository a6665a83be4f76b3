# The hooks for Slurm as they are shipped, except for their time limit. A job has its cores before its first instruction, gets them in
# variables, and frees them at its end. With --strict, the prolog fails if pjwd cannot give the job its cores, and Slurm drains the node.
# deadline: 600
. /cases/functions

hooks=/usr/share/pjw/hooks/slurm
# The shell of a job writes its own mask and its variables before it starts anything.
write_report='while read -r name value; do [ "$name" != Cpus_allowed_list: ] || mask=$value; done </proc/$$/status
echo "$mask" >/tmp/$SLURM_JOB_ID.$SLURM_PROCID.${SLURM_STEP_ID:-batch}
env | grep -E "^(PJW|OMP)_" >/tmp/$SLURM_JOB_ID.$SLURM_PROCID.${SLURM_STEP_ID:-batch}.report'
script="$write_report
srun -n2 -c2 bash -c '${write_report//\'/}; sleep 1000'"
mask_of() { cat "/tmp/$1"; }
report_has() { grep -qx "$2" "/tmp/$1.report"; }
both_have_reports() { [ -s "/tmp/$1.0.0.report" ] && [ -s "/tmp/$1.1.0.report" ]; }

is_drained() { sinfo -h -o %T | grep -q drain; }

start_pjw
check "the hooks have more time for this machine" give_hooks_time "$hooks"
slurm_mode constrain-no "Prolog=$hooks/prolog.sh" "Epilog=$hooks/epilog.sh" "TaskProlog=$hooks/task-prolog.sh" \
    PrologFlags=Contain
a=$(submit alice -n2 -c2 <<<"$script")
b=$(submit bob -n2 -c2 <<<"$script")
for job in "$a" "$b"; do
    eventually "both tasks of job $job have written their reports" both_have_reports "$job" || exit 1
done
a_cpus=$(cpus "slurm:$a") b_cpus=$(cpus "slurm:$b")
check "no CPU belongs to both jobs" disjoint "$a_cpus" "$b_cpus"
for job in "$a:$a_cpus" "$b:$b_cpus"; do
    grant=${job#*:} job=${job%%:*}
    check "job $job holds four CPUs" [ "$(each_cpu "$grant" | wc -l)" = 4 ]
    check "the cores of job $job are in one NUMA node" in_one_node "$grant"
    eventually "job $job is confined by a cpuset" is_by_cpuset "slurm:$job"
    for task in 0.batch 0.0 1.0; do
        check "shell $task of job $job was on its cores at its first instruction" within "$(mask_of "$job.$task")" "$grant"
        check "shell $task of job $job has the cores in PJW_CPUS" report_has "$job.$task" "PJW_CPUS=$grant"
        check "shell $task of job $job has the number of cores in PJW_NCORES" report_has "$job.$task" PJW_NCORES=2
    done
    check "a task of two CPUs in job $job has OMP_NUM_THREADS=2" report_has "$job.1.0" OMP_NUM_THREADS=2
    check "every thread of job $job is on its cores" job_is_confined "$job"
    check "the owner of job $job is its user" [ "$(field "slurm:$job" owner)" = "$(id -u "$([ "$job" = "$a" ] && echo alice || echo bob)")" ]
done

# The epilog frees the cores. The next job can get them.
scancel "$a" "$b"
eventually "the epilog freed the cores of alice's job" has_no_job "slurm:$a"
eventually "the epilog freed the cores of bob's job" has_no_job "slurm:$b"
eventually "all cores are free after both jobs" is_free 0-15
eventually "the node is idle" is_idle
c=$(submit alice -n16 <<<"$write_report; sleep 1000")
eventually "a job of the whole node writes its mask" [ -s "/tmp/$c.0.batch" ]
check "a job of the whole node holds all CPUs" [ "$(cpus "slurm:$c")" = 0-15 ]
scancel "$c"
eventually "all cores are free after the job of the whole node" is_free 0-15

# An allocation without a shell has no process here except those of Slurm. A step starts in it later.
as alice salloc --no-shell -n1 -c4 >&2
allocated() { [ -n "$(squeue -h -u alice -t R -o %A)" ]; }
eventually "salloc has an allocation without a shell" allocated
job=$(squeue -h -u alice -t R -o %A)
eventually "the allocation holds cores before its first step" holds "slurm:$job"
check "the allocation holds the requested number of CPUs" [ "$(each_cpu "$(cpus "slurm:$job")" | wc -l)" = 4 ]
as alice srun --jobid="$job" bash -c "$write_report; sleep 1000" &
eventually "a step of the allocation has its cores in PJW_CPUS" report_has "$job.0.0" "PJW_CPUS=$(cpus "slurm:$job")"
check "the step was on its cores at its first instruction" within "$(mask_of "$job.0.0")" "$(cpus "slurm:$job")"
scancel "$job"
eventually "the cores of the allocation are free after its end" is_free 0-15
check "the node was never drained" never_drained

# --strict is added as the comment in the hook says. Then another job gets all cores.
sed -i 's/ hook slurm-prolog/& --strict/' "$hooks/prolog.sh"
check "the prolog has the option --strict" grep -q ' hook slurm-prolog --strict ' "$hooks/prolog.sh"
pjwctl assign everything --cores 8 >&2
job=$(sbatch_sleep bob -n2)
eventually "a strict prolog that is refused drains the node" is_drained
check "the reason of the drain names the prolog" sh -c "sinfo -R -h -o %E | grep -i prolog"
eventually "the job is in the queue again" is_state "$job" PENDING
check "the job has no processes" [ -z "$(pids_of_job "$job")" ]
eventually "the log has the refusal" sh -c 'journalctl --no-pager | grep "hook slurm-prolog: .*refused, as --strict says"'
check "the job holds no cores" has_no_job "slurm:$job"
pjwctl release everything >&2
scontrol update NodeName=node1 State=RESUME >&2
# Slurm holds a job whose prolog failed, and would start it two minutes later.
scontrol release "$job" >&2
scontrol update JobId="$job" StartTime=now >&2
eventually "the job runs when cores are free" is_state "$job" RUNNING
eventually "the job is on its cores" job_is_confined "$job"

# The cpuset of the job is a cgroup of Slurm. It is set to all CPUs from outside.
cpuset=$(ls -d /sys/fs/cgroup/system.slice/*slurmstepd.scope/job_"$job")/cpuset.cpus
grant=$(cpus "slurm:$job")
cpuset_is_grant() { [ "$(cat "$cpuset")" = "$grant" ]; }
eventually "the cgroup of the job has the CPUs of the grant" cpuset_is_grant
eventually "the job is confined by this cpuset" is_by_cpuset "slurm:$job"
echo 0-15 >"$cpuset"
eventually "a cpuset of Slurm that was widened is repaired" cpuset_is_grant
check "the grant is the same after the repair" [ "$(cpus "slurm:$job"):$(field "slurm:$job" granted_by)" = "$grant:warden" ]
eventually "an event reports the repair" sh -c "pjwctl events --json | grep '\"event\":\"repaired\"' | grep '\"slurm:$job\"'"
eventually "every thread of the job is on its cores after the repair" job_is_confined "$job"
scancel "$job"
eventually "all cores are free at the end" is_free 0-15
