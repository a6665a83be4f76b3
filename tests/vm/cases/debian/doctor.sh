# The doctor beside a real Slurm: it knows whether Slurm confines jobs, and what pjw does about it, with a daemon and
# without, for root and for everybody.
# without pjw
. /cases/functions

# examine WHO RUN: the doctor's words are in /tmp/RUN, JSON in /tmp/RUN.json.
examine() {
    local who=$1 run=$2
    if [ "$who" = root ]; then
        check "$run: it looks as root" sh -c "pjwctl doctor --all >/tmp/$run"
        check "$run: also for scripts" sh -c "pjwctl doctor --json >/tmp/$run.json"
    else
        check "$run: it looks as $who" sh -c "runuser -u $who -- pjwctl doctor --all >/tmp/$run"
        check "$run: also for scripts" sh -c "runuser -u $who -- pjwctl doctor --json >/tmp/$run.json"
    fi
    check "$run: that is JSON" python3 -m json.tool "/tmp/$run.json" /dev/null
    check "$run: it found Slurm" grep -qi slurm "/tmp/$run"
}
says() { tr -s ' \n' ' ' <"/tmp/$1" | grep -Eiq "$2" || { cat "/tmp/$1" >&2; return 1; }; }

install_pjw
before=$(masks $(pgrep -x slurmd))
examine root root-alone
examine alice alice-alone
check "it knows that Slurm binds nothing, and what pjwd does" says root-alone 'slurm.*binds nothing here: pjwd grants cores'
job=$(sbatch_busy bob 2 -n1 -c4)
eventually "a job runs" is_state "$job" RUNNING
start_pjw
eventually "the job holds cores" holds "slurm:$job"
eventually "it is on them" job_is_confined "$job"
examine root root-beside
examine alice alice-beside
check "it sees the daemon" says root-beside 'pjwd'
check "and the job" says root-beside "slurm:$job"
check "which alice sees too" says alice-beside "slurm:$job"
check "nothing has changed for the job" job_is_confined "$job"
scancel "$job"
eventually "the job is over" has_no_job "slurm:$job"
slurm_mode constrain-yes
examine root root-yes
check "it knows that Slurm's cpusets are the grants now" says root-yes 'slurm.*ConstrainCores=yes.*is the grant, pjwd only balances inside'
check "nobody else was touched" [ "$(masks $(pgrep -x slurmd))" = "$before" ]
