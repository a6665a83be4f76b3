# Arrays, several steps, steps that overlap, salloc: each job has one grant, and all its steps are on it.
# first
. /cases/words

array_jobs() { squeue -h -r -j "$1" -t R -o %A; }
runs_all() { [ "$(array_jobs "$1" | wc -l)" = "$2" ]; }
steps_run() { [ "$(squeue -h -s -j "$1" -o %i | grep -c "\.[0-9]")" -ge "$2" ]; }
comm_is_on() { local pids; pids=$(pgrep -u "$1" -f "$2"); [ -n "$pids" ] && confined "$3" $pids; }

start_pjw
array=$(sbatch_sleep alice --array=1-3 -n1 -c2)
eventually "three members of the array run" runs_all "$array" 3
held=
for job in $(array_jobs "$array"); do
    eventually "member $job holds cores" holds "slurm:$job"
    now=$(cpus "slurm:$job")
    check "two CPUs are one core for member $job" [ "$(members "$now" | wc -l)" = 2 ]
    check "nobody else's" disjoint "$now" "${held:-99}"
    eventually "member $job is on its core" job_is_jailed "$job"
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
check "four CPUs are two whole cores" [ "$(members "$grant" | wc -l)" = 4 ]
as bob srun --overlap --jobid="$job" -n1 sleep 2003 &
eventually "a third step overlaps them" steps_run "$job" 3
for seconds in 2001 2002 2003; do
    eventually "the tasks of step sleep $seconds are on the job's cores" \
        comm_is_on bob "^[^ ]*sleep $seconds" "$grant"
done
check "the grant is still the same" [ "$(cpus "slurm:$job")" = "$grant" ]
scancel "$job"
eventually "the job is forgotten" forgot "slurm:$job"

as alice salloc -n1 -c4 srun sleep 3001 &
allocated() { [ -n "$(squeue -h -u alice -o %A)" ]; }
eventually "salloc has an allocation" allocated
job=$(squeue -h -u alice -o %A)
eventually "the allocation's step holds cores" holds "slurm:$job"
grant=$(cpus "slurm:$job")
check "the allocation of four CPUs is two whole cores" [ "$(members "$grant" | wc -l)" = 4 ]
eventually "its step is on them" job_is_jailed "$job"
scancel "$job"
eventually "the allocation is forgotten" forgot "slurm:$job"
eventually "every core is free" is_free 0-15
check "the node was never drained" never_drained
