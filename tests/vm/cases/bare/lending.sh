# Lent cores on cgroup v2 without systemd. A besteffort job runs at idle priority in the directory of borrowers. It borrows a core that
# its owner leaves idle, and loses it when the owner computes. Without a core it is frozen, and the thaw watcher thaws it after pjwd
# was killed. A release undoes everything.
. /cases/functions

answers() { pjwctl status --json >/dev/null 2>&1; }
stopped() { [ ! -d "/proc/$1" ] || grep -q '^State:.Z' "/proc/$1/status"; }
top=/sys/fs/cgroup
borrowers=$top/pjw_besteffort
in_cgroup() { grep -qx "0::$1" "/proc/$2/cgroup"; }
# Prints the processes of the owner that compute. They stop themselves by SIGSTOP at their start, so the owner is idle then.
workers() { process_tree $web | grep -vx "$web"; }
workers_are_stopped() { [ "$(for pid in $(workers); do grep '^State:.T' "/proc/$pid/status"; done | wc -l)" = 2 ]; }
# Whether cores of the owner are lent. Sets `lent_cpus` to their CPUs. With BPF, what is bound to few CPUs and runs on a lent core
# takes it back for some time. So a later line of the case may find nothing lent.
is_lent() { lent_cpus=$(field manual:web lent) && within "$lent_cpus" "$web_cpus"; }
is_one_core() {
    [ "$(each_cpu "$1" | wc -l)" = 2 ] &&
        within "$(cat "/sys/devices/system/cpu/cpu${1%%[-,]*}/topology/thread_siblings_list")" "$1"
}
batch_may_use_what_is_lent() { is_lent && within "$lent_cpus" "$(masks $batch)"; }
batch_is_on_its_cores() { confined "$(cpus manual:batch)" $(process_tree $batch); }
web_may_use_all_its_cores() { [ "$(masks $web)" = "$web_cpus" ]; }
is_returned() { holds manual:web && [ -z "$(field manual:web lent)" ]; }
batch_has_none_of() { holds_none_of manual:batch "$1" && batch_is_on_its_cores; }
frozen_is() { grep -qs "^frozen $1\$" $borrowers/batch/cgroup.events; }
# A watcher that has ended may be a zombie until its parent waits for it.
has_watcher() { cat /proc/[0-9]*/stat 2>/dev/null | grep -q '(pjw-thaw) [^ZX]'; }
has_no_watcher() { ! has_watcher; }
ticks_of() { sed 's/.*) //' "/proc/$1/stat" | cut -d' ' -f12; }
has_run_since() { [ "$(ticks_of $batch)" -gt "$1" ]; }
batch_is_restored() { in_cgroup / $batch && [ "$(masks $(process_tree $batch))" = 0-15 ]; }
no_borrower_left() { [ ! -e $borrowers ]; }
no_cgroup_left() { [ -z "$(find $top -mindepth 1 -name 'pjw*' -type d)" ]; }
enables_no_cpu_controller() { ! grep -qw cpu $top/cgroup.subtree_control; }
# Writes what pjwd says about the owner and the borrower to the console, for a check that failed.
print_jobs() { pjwctl explain web; pjwctl explain batch; pjwctl events; } >&2
start_daemon() {
    pjwd --config /tmp/lending.toml 2>>/dev/ttyS0 &
    daemon=$!
}

cat >/tmp/lending.toml <<'END'
[lending]
enabled = true
buffer = 1
lend_after = "500ms"
starved = "freeze"
END
check "the cpu controller is not enabled before pjwd runs" enables_no_cpu_controller
start_daemon
eventually "pjwd answers before anything is lent" answers || exit 1

# The owner has two cores, one of which is the buffer. The borrower wants all eight cores of the machine.
busy='while :; do :; done'
work="kill -STOP \$\$; $busy"
pjwctl run --cores 2 --class guaranteed --job web -- sh -c "sh -c '$work' & sh -c '$work' & wait" &
web=$!
eventually "the owner holds its cores" holds manual:web
web_cpus=$(cpus manual:web)
check "the owner holds two whole cores" [ "$(each_cpu "$web_cpus" | wc -l)" = 4 ]
eventually "the owner's processes are stopped" workers_are_stopped
pjwctl run --cores 8 --class besteffort --job batch -- sh -c "sh -c '$busy' & $busy" &
batch=$!
eventually "the borrower holds free cores" holds manual:batch
eventually "the borrower is in the cgroup of borrowers" in_cgroup /pjw_besteffort/batch $batch || print_jobs
eventually "the owner is in a cgroup outside that of borrowers" in_cgroup /pjw/web $web
check "the cgroup of borrowers has idle priority" [ "$(cat $borrowers/cpu.idle)" = 1 ]
check "the cgroup of borrowers has no processes of its own" prints_nothing cat $borrowers/cgroup.procs
eventually "an idle core of the owner is lent" is_lent || print_jobs
check "one whole core is lent, and the other one is the buffer" is_one_core "$lent_cpus"
eventually "the borrower may use the lent core" batch_may_use_what_is_lent || print_jobs
eventually "every thread of the borrower is on the cores that it holds" batch_is_on_its_cores
eventually "the owner may use its lent core, too" web_may_use_all_its_cores

kill -CONT $(workers)
eventually "the core is returned when the owner computes" is_returned || print_jobs
eventually "no thread of the borrower may use the returned core" batch_has_none_of "$web_cpus" || print_jobs

# Without lent and without free cores the borrower has none. From here on the owner wants all its cores, whether it computes or not.
check "pjwctl want sets the wanted cores of the owner to all its cores" pjwctl want web 2
eventually "nothing is lent while the owner wants all its cores" is_returned
kill -STOP $(workers)
sleep 1000 &
rest=$!
check "another job gets all free cores" pjwctl assign rest --cores all --pid $rest
eventually "a borrower without a core is frozen" frozen_is 1 || print_jobs
eventually "the thaw watcher runs while the borrower is frozen" has_watcher
ran=$(ticks_of $batch)
kill -9 $daemon
wait $daemon 2>/dev/null
eventually "the frozen borrower is thawed after pjwd was killed" frozen_is 0
eventually "the frozen borrower runs after pjwd was killed" has_run_since "$ran"
eventually "the thaw watcher ends after it has thawed the borrower" has_no_watcher
check "the borrower stays at idle priority without pjwd" [ "$(cat $borrowers/cpu.idle)" = 1 ]

# The next daemon freezes the borrower again. A release thaws it.
start_daemon
eventually "pjwd answers after it was killed" answers
check "the owner holds the same cores after the restart" [ "$(cpus manual:web)" = "$web_cpus" ]
eventually "the next daemon freezes the borrower again" frozen_is 1 || print_jobs
ran=$(ticks_of $batch)
check "pjwctl release --all succeeds while a borrower is frozen" pjwctl release --all
eventually "no cgroup of a borrower is left" no_borrower_left
eventually "no cgroup of pjwd is left" no_cgroup_left
eventually "the cpu controller is disabled again" enables_no_cpu_controller
eventually "the borrower is in its former cgroup and may use all CPUs" batch_is_restored
eventually "the borrower runs after the release" has_run_since "$ran"

kill -9 $(process_tree $web) $(process_tree $batch) $rest
kill $daemon
eventually "pjwd stops after the lending" stopped $daemon
eventually "the thaw watcher ends with pjwd" has_no_watcher
wait $web $batch $rest $daemon 2>/dev/null || true
rm /tmp/lending.toml
