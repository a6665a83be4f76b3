# `pjwctl doctor` on a node with Slurm: it reports whether Slurm confines jobs, and what pjwd does in this case. It runs with a
# daemon and without one, as root and as a user.
# without pjw
. /cases/functions

# run_doctor USER RUN: runs the doctor as the user. Its text is in /tmp/RUN, its JSON in /tmp/RUN.json.
run_doctor() {
    local user=$1 run=$2
    if [ "$user" = root ]; then
        check "$run: pjwctl doctor succeeds as root" sh -c "pjwctl doctor --all >/tmp/$run"
        check "$run: pjwctl doctor --json succeeds" sh -c "pjwctl doctor --json >/tmp/$run.json"
    else
        check "$run: pjwctl doctor succeeds as $user" sh -c "runuser -u $user -- pjwctl doctor --all >/tmp/$run"
        check "$run: pjwctl doctor --json succeeds" sh -c "runuser -u $user -- pjwctl doctor --json >/tmp/$run.json"
    fi
    check "$run: the output is valid JSON" python3 -ISc 'import json, sys; json.load(open(sys.argv[1]))' "/tmp/$run.json"
    check "$run: Slurm is found" grep -qi slurm "/tmp/$run"
}
output_has() { tr -s ' \n' ' ' <"/tmp/$1" | grep -Eiq "$2" || { cat "/tmp/$1" >&2; return 1; }; }

install_pjw
before=$(masks $(pgrep -x slurmd))
run_doctor root root-without-daemon
run_doctor alice alice-without-daemon
check "doctor reports that Slurm binds nothing, and that pjwd grants cores" output_has root-without-daemon 'slurm.*binds nothing here: pjwd grants cores'
job=$(sbatch_busy bob 2 -n1 -c4)
eventually "a job of Slurm runs" is_state "$job" RUNNING
start_pjw
eventually "the job holds cores" holds "slurm:$job"
eventually "the job is on its cores" job_is_confined "$job"
run_doctor root root-with-daemon
run_doctor alice alice-with-daemon
check "doctor reports the daemon" output_has root-with-daemon 'pjwd'
check "doctor reports the job as root" output_has root-with-daemon "slurm:$job"
check "doctor reports the job as alice" output_has alice-with-daemon "slurm:$job"
check "the job is still on its cores after doctor ran" job_is_confined "$job"
scancel "$job"
eventually "the cancelled job is no longer in the status" has_no_job "slurm:$job"
slurm_mode constrain-yes
run_doctor root root-constrain-yes
check "doctor reports that the cpusets of Slurm are the grants in this mode" output_has root-constrain-yes 'slurm.*ConstrainCores=yes.*is the grant, pjwd only balances inside'
check "the masks of slurmd are unchanged" [ "$(masks $(pgrep -x slurmd))" = "$before" ]
