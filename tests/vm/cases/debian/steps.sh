# Arrays, several steps, steps that overlap, salloc: each job has one grant, and all its steps are on it.
. /cases/functions

array_jobs() { squeue -h -r -j "$1" -t R -o %A; }
runs_all() { [ "$(array_jobs "$1" | wc -l)" = "$2" ]; }
steps_run() { [ "$(squeue -h -s -j "$1" -o %i | grep -c "\.[0-9]")" -ge "$2" ]; }
comm_is_on() { local pids; pids=$(pgrep -u "$1" -f "$2"); [ -n "$pids" ] && confined "$3" $pids; }

has_no_process() { [ -z "$(pids_of_job "$job")" ]; }
is_observed() { [ "$(field "slurm:$job" state)" = observed ]; }

start_pjw
array=$(sbatch_sleep alice --array=1-3 -n1 -c2)
eventually "three members of the array run" runs_all "$array" 3
held=
for job in $(array_jobs "$array"); do
    eventually "member $job holds cores" holds "slurm:$job"
    now=$(cpus "slurm:$job")
    check "two CPUs are one core for member $job" [ "$(each_cpu "$now" | wc -l)" = 2 ]
    check "nobody else's" disjoint "$now" "${held:-99}"
    eventually "member $job is on its core" job_is_confined "$job"
    held=$held${held:+,}$now
done
scancel "$array"
eventually "the array is over" is_over "$array"
eventually "its cores are free" is_free 0-15

job=$(submit bob -n4 <<'END'
srun -n2 --exact sleep 2001 &
srun -n2 --exact sleep 2002 &
wait
END
)
eventually "two steps run" steps_run "$job" 2
eventually "the job holds cores" holds "slurm:$job"
grant=$(cpus "slurm:$job")
check "four CPUs are two whole cores" [ "$(each_cpu "$grant" | wc -l)" = 4 ]
as bob srun --overlap --jobid="$job" -n1 sleep 2003 &
eventually "a third step overlaps them" steps_run "$job" 3
for seconds in 2001 2002 2003; do
    eventually "the tasks of step sleep $seconds are on the job's cores" \
        comm_is_on bob "^[^ ]*sleep $seconds" "$grant"
done
check "the grant is still the same" [ "$(cpus "slurm:$job")" = "$grant" ]
scancel "$job"
eventually "the job is forgotten" has_no_job "slurm:$job"

as alice salloc -n1 -c4 srun sleep 3001 &
allocated() { [ -n "$(squeue -h -u alice -o %A)" ]; }
eventually "salloc has an allocation" allocated
job=$(squeue -h -u alice -o %A)
eventually "the allocation's step holds cores" holds "slurm:$job"
grant=$(cpus "slurm:$job")
check "the allocation of four CPUs is two whole cores" [ "$(each_cpu "$grant" | wc -l)" = 4 ]
eventually "its step is on them" job_is_confined "$job"
scancel "$job"
eventually "the allocation is forgotten" has_no_job "slurm:$job"

# An allocation without a shell and without a step: no process of it is on the node, and nobody has told the warden.
as alice salloc --no-shell -n1 -c4 >&2
eventually "salloc has an allocation again" allocated
job=$(squeue -h -u alice -o %A)
check "it has no process" has_no_process
other=$(sbatch_sleep bob -n1 -c4)
eventually "a job beside it holds cores" holds "slurm:$other"
check "who has no process has none" has_no_job "slurm:$job"
as alice srun --jobid="$job" sleep 3002 &
eventually "a step in it is watched: Slurm tells it of its own CPUs and not of the job's" is_observed
check "status says so, and what to do" grep -q "pjwctl assign slurm:$job --cores" <<<"$(pjwctl status --json)"
check "the other job's cores are the other job's" job_is_confined "$other"
pjwctl assign "slurm:$job" --cores 2 >&2
grant=$(cpus "slurm:$job")
check "what status said helps" [ "$(each_cpu "$grant" | wc -l)" = 4 ]
check "with cores that are not the other job's" disjoint "$grant" "$(cpus "slurm:$other")"
eventually "the step is on them" comm_is_on alice '^[^ ]*sleep 3002' "$grant"
scancel "$job" "$other"
eventually "the allocation without a shell is forgotten" has_no_job "slurm:$job"
eventually "every core is free" is_free 0-15
check "the node was never drained" never_drained
