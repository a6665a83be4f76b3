# Jobs with planted faults, and a good one: the verdicts in their reports, and the remedies.
# deadline: 420
# alone
. /cases/functions

# The commands of the jobs. `spin N UNTIL`: N processes that compute until UNTIL seconds after the begin of the script.
cat >/tmp/work <<'END'
#!/bin/bash
spin() {
    for ((n = 0; n < $1; n++)); do (while [ $SECONDS -lt "$2" ]; do :; done) & done
    wait
}
case $1 in
    serial) spin 1 18 ;;
    late-serial) spin 2 4; spin 1 24 ;;
    crowded) spin 8 18 ;;
    asleep) spin 1 1; sleep 20 ;;
    good | displaced | other) spin 2 18 ;;
esac
END
chmod +x /tmp/work
# run NAME CORES [COMMAND...]: the job of this name, below a command such as taskset.
run() {
    local name=$1 cores=$2
    shift 2
    pjwctl run --cores "$cores" --job "$name" -- "$@" /tmp/work "$name" </dev/null >&2 &
}
has_report() { pjwctl report "manual:$1" --json >"/tmp/report.$1" 2>/dev/null; }
# told NAME FIELD: a value in the report of a job.
told() { python3 -c 'import json, sys
value = json.load(open(sys.argv[1]))[sys.argv[2]]
print(" ".join(value) if isinstance(value, list) else value)' "/tmp/report.$1" "$2"; }
advises() { told "$1" advice | grep -qF "$2"; }
# judged NAME WORD: whether this is the verdict. If not, the report goes to the standard error.
judged() { [ "$(told "$1" verdict)" = "$2" ] || { cat "/tmp/report.$1" >&2; return 1; }; }
time_limit=120

# One core has two CPUs here.
start_pjw 'affinity = "respect"'
run serial 2
run crowded 1
run asleep 1
run good 1
for name in serial crowded asleep good; do
    eventually "the job $name leaves a report" has_report $name
done
check "fewer threads than cores are serial" judged serial serial
check "with the cores to ask for" advises serial 'ask for `--cores 1`'
check "more threads than CPUs are oversubscribed" judged crowded oversubscribed
check "with their number and the one to set" advises crowded "8 threads want to run on 1 core: set OMP_NUM_THREADS=1"
check "and the cores to ask for" advises crowded 'ask for `--cores 4`'
check "a job that sleeps is waiting" judged asleep waiting
check "for something else than its core" advises asleep "not for its core"
check "a job that uses its cores is fine" judged good fine
check "without advice" prints_nothing told good advice

run late-serial 2
run displaced 1
eventually "the job has cores" holds manual:displaced
# A program in no job, on the CPUs of the job.
taskset -c "$(cpus manual:displaced)" /tmp/work other </dev/null >&2 &
for name in late-serial displaced; do
    eventually "the job $name leaves a report" has_report $name
done
check "a serial part after a parallel one is serial" judged late-serial serial
check "with the time of that part" advises late-serial "one thread ran alone"
check "which is one phase" [ "$(told late-serial serial_phases)" = 1 ]
check "threads beside another program are waiting" judged displaced waiting
check "for the cores of their own job" advises displaced "cores of their own job that other programs used"
