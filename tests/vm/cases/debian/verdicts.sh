# Jobs with known faults, and a job without one. Their reports have the right verdicts and advice. A job is judged if its use of CPUs
# was measured for 10 s, and a serial part counts from 10 s on.
# deadline: 840
# alone
. /cases/functions

# The commands of the jobs. A command first waits for a line: see `begin`. `spin N UNTIL` starts N processes that compute until UNTIL
# seconds after this line. The serial part of late-serial takes 23 s: if the machine stands still for a moment, and so the measurements of
# up to 3 s in this part have a wrong use of CPUs, then one of the two rest parts has 10 s, or both.
cat >/tmp/work <<'END'
#!/bin/bash
: >"/tmp/waits.$1"
read -r _ <"/tmp/begin.$1"
SECONDS=0
spin() {
    for ((n = 0; n < $1; n++)); do (while [ $SECONDS -lt "$2" ]; do :; done) & done
    wait
}
case $1 in
    serial) spin 1 22 ;;
    late-serial) spin 2 4; spin 1 27 ;;
    many-threads) spin 8 15 ;;
    sleeping) spin 1 1; sleep 15 ;;
    good | displaced | other) spin 2 15 ;;
esac
END
chmod +x /tmp/work
# run NAME CORES [COMMAND...]: starts the job NAME, by a command such as taskset.
run() {
    local job=$1 cores=$2
    shift 2
    mkfifo "/tmp/begin.$job"
    pjwctl run --cores "$cores" --job "$job" -- "$@" /tmp/work "$job" </dev/null >&2 &
}
has_started() { [ -e "/tmp/waits.$1" ]; }
# begin NAME...: lets the commands compute, when all of them have started. Beside others that compute, a start takes a second of CPU time,
# which would count for the job.
begin() {
    local job
    for job in "$@"; do eventually "the command of $job has started" has_started "$job"; done
    for job in "$@"; do echo >"/tmp/begin.$job" & done
}
has_report() { pjwctl report "manual:$1" --json >"/tmp/report.$1" 2>/dev/null; }
# report_value NAME FIELD: prints a value in the report of a job.
report_value() { python3 -c 'import json, sys
value = json.load(open(sys.argv[1]))[sys.argv[2]]
print(" ".join(value) if isinstance(value, list) else value)' "/tmp/report.$1" "$2"; }
# advice_has NAME TEXT: whether the advice in the report has this text. If not, the report goes to standard error.
advice_has() { report_value "$1" advice | grep -qF "$2" || { cat "/tmp/report.$1" >&2; return 1; }; }
# verdict_is NAME VERDICT: whether the report has this verdict. If not, the report goes to standard error.
verdict_is() { [ "$(report_value "$1" verdict)" = "$2" ] || { cat "/tmp/report.$1" >&2; return 1; }; }
time_limit=120

# A core has two CPUs here.
start_pjw 'affinity = "respect"'
run serial 2
run many-threads 1
run sleeping 1
run good 1
begin serial many-threads sleeping good
for job in serial many-threads sleeping good; do
    eventually "the job $job has a report" has_report $job
done
check "the verdict on fewer threads than cores is serial" verdict_is serial serial
check "the advice has the number of cores for a serial job" advice_has serial 'ask for `--cores 1`'
check "the verdict on more threads than CPUs is oversubscribed" verdict_is many-threads oversubscribed
check "the advice has the number of threads and the setting for OpenMP" advice_has many-threads "8 threads want to run on 1 core: set OMP_NUM_THREADS=1"
check "the advice has the number of cores for an oversubscribed job" advice_has many-threads 'ask for `--cores 4`'
check "the verdict on a job that sleeps is waiting" verdict_is sleeping waiting
check "the advice says that the job did not wait for its core" advice_has sleeping "not for its core"
check "the verdict on a job that uses its cores is fine" verdict_is good fine
check "a job with the verdict fine has no advice" prints_nothing report_value good advice

run late-serial 2
run displaced 1
eventually "the job displaced holds cores" holds manual:displaced
# A program outside all jobs runs on the CPUs of the job.
mkfifo /tmp/begin.other
taskset -c "$(cpus manual:displaced)" /tmp/work other </dev/null >&2 &
begin late-serial displaced other
for job in late-serial displaced; do
    eventually "the job $job has a report" has_report $job
done
check "the verdict on a serial part after a parallel part is serial" verdict_is late-serial serial
check "the advice has the time of the serial part" advice_has late-serial "one thread ran alone"
is_one_or_two() { [ "$1" = 1 ] || [ "$1" = 2 ]; }
check "the serial part is one serial phase, or two if a measurement in it is wrong" is_one_or_two "$(report_value late-serial serial_phases)"
check "the verdict on threads that share their cores with another program is waiting" verdict_is displaced waiting
check "the advice names the cores that other programs used" advice_has displaced "cores of their own job that other programs used"
