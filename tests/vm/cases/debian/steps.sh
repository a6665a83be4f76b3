# Job arrays, several steps, overlapping steps and salloc: each job has one grant, and all its steps are on these cores.
. /cases/functions

array_jobs() { squeue -h -r -j "$1" -t R -o %A; }
runs_all() { [ "$(array_jobs "$1" | wc -l)" = "$2" ]; }
steps_run() { [ "$(squeue -h -s -j "$1" -o %i | grep -c "\.[0-9]")" -ge "$2" ]; }
command_is_on() { local pids; pids=$(pgrep -u "$1" -f "$2"); [ -n "$pids" ] && confined "$3" $pids; }

has_no_process() { [ -z "$(pids_of_job "$job")" ]; }
is_observed() { [ "$(field "slurm:$job" state)" = observed ]; }

start_pjw
array=$(sbatch_sleep alice --array=1-3 -n1 -c2)
eventually "three jobs of the array run" runs_all "$array" 3
held=
for job in $(array_jobs "$array"); do
    eventually "job $job of the array holds cores" holds "slurm:$job"
    now=$(cpus "slurm:$job")
    check "job $job of the array has one core for two CPUs" [ "$(each_cpu "$now" | wc -l)" = 2 ]
    check "no other job of the array has a CPU of job $job" disjoint "$now" "${held:-99}"
    eventually "job $job of the array is on its core" job_is_confined "$job"
    held=$held${held:+,}$now
done
scancel "$array"
eventually "the array has ended" is_over "$array"
eventually "all cores are free after the array" is_free 0-15

job=$(submit bob -n4 <<'END'
srun -n2 --exact sleep 2001 &
srun -n2 --exact sleep 2002 &
wait
END
)
eventually "two steps of bob's job run" steps_run "$job" 2
eventually "bob's job holds cores" holds "slurm:$job"
grant=$(cpus "slurm:$job")
check "bob's job of four CPUs holds two whole cores" [ "$(each_cpu "$grant" | wc -l)" = 4 ]
as bob srun --overlap --jobid="$job" -n1 sleep 2003 &
eventually "a third step overlaps the others" steps_run "$job" 3
for seconds in 2001 2002 2003; do
    eventually "the tasks of the step sleep $seconds are on the job's cores" \
        command_is_on bob "^[^ ]*sleep $seconds" "$grant"
done
check "the grant of bob's job is the same after the third step" [ "$(cpus "slurm:$job")" = "$grant" ]
scancel "$job"
eventually "bob's cancelled job is no longer in the status" has_no_job "slurm:$job"

as alice salloc -n1 -c4 srun sleep 3001 &
# An allocation that was cancelled before may still be in the queue. It no longer runs.
allocation() { squeue -h -u alice -t R -o %A; }
allocated() { [ -n "$(allocation)" ]; }
eventually "salloc has an allocation" allocated
job=$(allocation)
eventually "the job of salloc holds cores when its step runs" holds "slurm:$job"
grant=$(cpus "slurm:$job")
check "the job of salloc with four CPUs holds two whole cores" [ "$(each_cpu "$grant" | wc -l)" = 4 ]
eventually "the step of salloc is on these cores" job_is_confined "$job"
scancel "$job"
eventually "the cancelled job of salloc is no longer in the status" has_no_job "slurm:$job"

# An allocation without a shell and without a step has no process on the node. Without a hook, pjwd cannot find it.
as alice salloc --no-shell -n1 -c4 >&2
eventually "salloc has an allocation without a shell" allocated
job=$(allocation)
check "the allocation has no process" has_no_process
other=$(sbatch_sleep bob -n1 -c4)
eventually "another job holds cores" holds "slurm:$other"
check "the allocation without a process is not in the status" has_no_job "slurm:$job"
as alice srun --jobid="$job" sleep 3002 &
eventually "the job is observed when a step runs in it: Slurm names the CPUs of the step, and not those of the job" is_observed
has_remedy() { grep -q "pjwctl assign slurm:$job --cores" <<<"$(pjwctl status --json)"; }
eventually "status names the command that assigns cores to it" has_remedy
eventually "the other job is on its cores" job_is_confined "$other"
pjwctl assign "slurm:$job" --cores 2 >&2
grant=$(cpus "slurm:$job")
check "this command assigns two cores to the job" [ "$(each_cpu "$grant" | wc -l)" = 4 ]
check "the assigned cores do not belong to the other job" disjoint "$grant" "$(cpus "slurm:$other")"
eventually "the step is on the assigned cores" command_is_on alice '^[^ ]*sleep 3002' "$grant"
scancel "$job" "$other"
eventually "the cancelled job without a shell is no longer in the status" has_no_job "slurm:$job"
eventually "all cores are free" is_free 0-15
check "the node was never drained" never_drained
