# Slurm's hooks as they are shipped: a job has its cores before its first instruction, is told them, and gives them back
# when it ends. Told to be strict, the prolog refuses what the warden can't serve, and Slurm takes the node away.
# deadline: 300
. /cases/functions

hooks=/usr/share/pjw/hooks/slurm
# What a job's shell reads of itself before it starts anything, and what it was told.
first_words='while read -r name value; do [ "$name" != Cpus_allowed_list: ] || mask=$value; done </proc/$$/status
echo "$mask" >/tmp/$SLURM_JOB_ID.$SLURM_PROCID.${SLURM_STEP_ID:-batch}
env | grep -E "^(PJW|OMP)_" >/tmp/$SLURM_JOB_ID.$SLURM_PROCID.${SLURM_STEP_ID:-batch}.told'
script="$first_words
srun -n2 -c2 bash -c '${first_words//\'/}; sleep 1000'"
said() { cat "/tmp/$1"; }
was_told() { grep -qx "$2" "/tmp/$1.told"; }
both_speak() { [ -s "/tmp/$1.0.0.told" ] && [ -s "/tmp/$1.1.0.told" ]; }

is_drained() { sinfo -h -o %T | grep -q drain; }

start_pjw
slurm_mode constrain-no "Prolog=$hooks/prolog.sh" "Epilog=$hooks/epilog.sh" "TaskProlog=$hooks/task-prolog.sh" \
    PrologFlags=Contain
a=$(submit alice -n2 -c2 <<<"$script")
b=$(submit bob -n2 -c2 <<<"$script")
for job in "$a" "$b"; do
    eventually "the tasks of job $job have spoken" both_speak "$job" || exit 1
done
a_cpus=$(cpus "slurm:$a") b_cpus=$(cpus "slurm:$b")
check "no CPU belongs to both" disjoint "$a_cpus" "$b_cpus"
for job in "$a:$a_cpus" "$b:$b_cpus"; do
    grant=${job#*:} job=${job%%:*}
    check "job $job has four CPUs" [ "$(each_cpu "$grant" | wc -l)" = 4 ]
    check "in one NUMA node" in_one_node "$grant"
    check "by a cpuset" [ "$(field "slurm:$job" enforcement)" = cpuset ]
    for who in 0.batch 0.0 1.0; do
        check "shell $who of job $job was inside at its first instruction" within "$(said "$job.$who")" "$grant"
        check "and knew its cores" was_told "$job.$who" "PJW_CPUS=$grant"
        check "and how many" was_told "$job.$who" PJW_NCORES=2
    done
    check "a task of two CPUs is told of one core's worth of threads" was_told "$job.1.0" OMP_NUM_THREADS=2
    check "every thread is inside" job_is_confined "$job"
    check "the job's user owns it" [ "$(field "slurm:$job" owner)" = "$(id -u "$([ "$job" = "$a" ] && echo alice || echo bob)")" ]
done

# An epilog gives cores back; whoever comes next may have them.
scancel "$a" "$b"
eventually "with the epilog alice's cores are free" has_no_job "slurm:$a"
eventually "with the epilog bob's cores are free" has_no_job "slurm:$b"
check "all cores are free" is_free 0-15
eventually "the node is idle" is_idle
c=$(submit alice -n16 <<<"$first_words; sleep 1000")
eventually "a job of the whole node has it" [ -s "/tmp/$c.0.batch" ]
check "all of it" [ "$(cpus "slurm:$c")" = 0-15 ]
scancel "$c"
eventually "and gives it back" is_free 0-15

# An allocation without a shell: no process of it is here but Slurm's own, and later a step comes from outside.
as alice salloc --no-shell -n1 -c4 >&2
allocated() { [ -n "$(squeue -h -u alice -t R -o %A)" ]; }
eventually "salloc has an allocation" allocated
job=$(squeue -h -u alice -t R -o %A)
eventually "an allocation without a step holds cores" holds "slurm:$job"
check "as many as it asked for" [ "$(each_cpu "$(cpus "slurm:$job")" | wc -l)" = 4 ]
as alice srun --jobid="$job" bash -c "$first_words; sleep 1000" &
eventually "a step comes to it" was_told "$job.0.0" "PJW_CPUS=$(cpus "slurm:$job")"
check "and was inside at its first instruction" within "$(said "$job.0.0")" "$(cpus "slurm:$job")"
scancel "$job"
eventually "its cores are free" is_free 0-15
check "the node was never drained" never_drained

# As the file says: --strict is added. Then all cores are somebody else's.
sed -i 's/ hook slurm-prolog$/& --strict/' "$hooks/prolog.sh"
check "the prolog is strict now" grep -q -- --strict$ "$hooks/prolog.sh"
pjwctl assign everything --cores 8 >&2
job=$(sbatch_sleep bob -n2)
eventually "a strict prolog that is refused drains the node" is_drained
check "Slurm says why" sh -c "sinfo -R -h -o %E | grep -i prolog"
eventually "the job is back in the queue" is_state "$job" PENDING
check "it never ran" [ -z "$(pids_of_job "$job")" ]
eventually "the log says who refused it" sh -c 'journalctl --no-pager | grep "hook slurm-prolog: .*refused, as --strict says"'
check "no core is the job's" has_no_job "slurm:$job"
pjwctl release everything >&2
scontrol update NodeName=node1 State=RESUME >&2
# Slurm holds a job whose prolog failed, and would begin with it two minutes later.
scontrol release "$job" >&2
scontrol update JobId="$job" StartTime=now >&2
eventually "with cores for it the job runs" is_state "$job" RUNNING
eventually "on cores of its own" job_is_confined "$job"

# Its wall is a directory of Slurm's, which somebody opens.
cpuset=$(ls -d /sys/fs/cgroup/system.slice/*slurmstepd.scope/job_"$job")/cpuset.cpus
grant=$(cpus "slurm:$job")
check "which its cpuset keeps" [ "$(cat "$cpuset")" = "$grant" ]
echo 0-15 >"$cpuset"
eventually "a cpuset of Slurm's that somebody opened is repaired" eval '[ "$(cat "$cpuset")" = "$grant" ]'
check "the grant is the same" [ "$(cpus "slurm:$job"):$(field "slurm:$job" granted_by)" = "$grant:warden" ]
eventually "that is told" sh -c "pjwctl events --json | grep '\"event\":\"repaired\"' | grep '\"slurm:$job\"'"
eventually "every thread is inside again" job_is_confined "$job"
scancel "$job"
eventually "all cores are free at last" is_free 0-15
