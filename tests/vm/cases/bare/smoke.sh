# Two jobs on a machine with two NUMA nodes, from the assignment of cores to the release.
. /cases/functions

start_daemon() {
    pjwd 2>>/dev/ttyS0 &
    daemon=$!
}
answers() { pjwctl status --json >/dev/null 2>&1; }
does_not_answer() { ! answers; }
# A child that has ended is a zombie until the shell waits for it.
stopped() { [ ! -d "/proc/$1" ] || grep -q '^State:.Z' "/proc/$1/status"; }
has_processes() { [ "$(process_tree "$1" | wc -l)" -ge "$2" ]; }
has_masks() { [ "$(masks $(process_tree "$1"))" = "$2" ]; }
# Prints the masks and the cgroups of a process and its descendants, for the console.
print_masks() { for pid in $(process_tree "$1"); do echo "$pid: CPUs $(masks "$pid"), $(tr '\n' ' ' <"/proc/$pid/cgroup")"; done >&2; }
is_confined() { confined "$(cpus "$1")" $(process_tree "$2"); }

start_daemon
eventually "pjwd answers" answers || exit 1

# Job a requests two cores and has six processes that compute. Job b requests three cores and has three. A core has two CPUs.
busy='while :; do :; done'
pjwctl run --cores 2 --job a -- sh -c "
    for i in 1 2 3 4 5; do sh -c '$busy' & done
    setsid sh -c '$busy' &
    wait" &
a=$!
pjwctl run --cores 3 --job b -- sh -c "sh -c '$busy' & sh -c '$busy' & $busy" &
b=$!
eventually "job a holds cores" holds manual:a
eventually "job b holds cores" holds manual:b
eventually "job a has all its processes" has_processes $a 7
eventually "job b has all its processes" has_processes $b 3

a_cpus=$(cpus manual:a) b_cpus=$(cpus manual:b)
check "job a holds two whole cores" [ "$(each_cpu "$a_cpus" | wc -l)" = 4 ]
check "job b holds three whole cores" [ "$(each_cpu "$b_cpus" | wc -l)" = 6 ]
check "no CPU belongs to both jobs" disjoint "$a_cpus" "$b_cpus"
check "the cores of job a are in one NUMA node" in_one_node "$a_cpus"
check "the cores of job b are in one NUMA node" in_one_node "$b_cpus"
eventually "every thread of job a is on its cores" is_confined manual:a $a
eventually "every thread of job b is on its cores" is_confined manual:b $b

# A process of job a widens its own mask. pjwd restores it.
member=$(process_tree $a | tail -n 1)
taskset -p ffff "$member" >/dev/null
eventually "a thread that left its cores is moved back" is_confined manual:a $a

# A running process with a mask of its own is assigned. A release restores its mask below.
taskset 8 sh -c "$busy" &
assigned=$!
eventually "the running process has its own mask" has_masks $assigned 3
if pjwctl assign assigned --cores 1 --pid $assigned >&2; then ok "pjwctl assign of a running process succeeds"; else not_ok "pjwctl assign of a running process succeeds" "exit $?"; fi
assigned_cpus=$(cpus manual:assigned)
eventually "every thread of the assigned process is on the cores of its job" is_confined manual:assigned $assigned
check "the cores of the assigned process belong to no other job" disjoint "$assigned_cpus" "$a_cpus,$b_cpus"

# The daemon is killed. The masks stay, and the next daemon reads the jobs from its journal. It is refused while the first one has not
# ended.
kill -9 $daemon
wait $daemon 2>/dev/null
eventually "the killed pjwd does not answer" does_not_answer
eventually "job a stays on its cores without pjwd" confined "$a_cpus" $(process_tree $a)
start_daemon
eventually "the next pjwd answers" answers
check "job a holds the same cores after the restart" [ "$(cpus manual:a)" = "$a_cpus" ]
check "job b holds the same cores after the restart" [ "$(cpus manual:b)" = "$b_cpus" ]
check "the assigned process holds the same cores after the restart" [ "$(cpus manual:assigned)" = "$assigned_cpus" ]
eventually "every thread of job a is on its cores after the restart" is_confined manual:a $a
eventually "every thread of job b is on its cores after the restart" is_confined manual:b $b

# A core of job b goes offline, and the job gets another one. When the core is online again, it is free.
core=$(cat "/sys/devices/system/cpu/cpu$(each_cpu "$b_cpus" | tail -n 1)/topology/thread_siblings_list")
set_online 0 "$core"
eventually "job b holds no CPU that is offline" holds_none_of manual:b "$core"
b_now=$(cpus manual:b)
check "job b has as many CPUs as before" [ "$(each_cpu "$b_now" | wc -l)" = 6 ]
check "the new core of job b belongs to no other job" disjoint "$b_now" "$a_cpus,$assigned_cpus"
eventually "every thread of job b is on its new cores" is_confined manual:b $b
set_online 1 "$core"
eventually "the core is free when it is online again" is_free "$core"
check "job b keeps its new cores" [ "$(cpus manual:b)" = "$b_now" ]

# The release restores every mask, including the one that only the journal has.
if pjwctl release --all >&2; then ok "pjwctl release --all succeeds"; else not_ok "pjwctl release --all succeeds" "exit $?"; fi
eventually "all threads of job a may run on all CPUs after the release" has_masks $a 0-15 || print_masks $a
eventually "all threads of job b may run on all CPUs after the release" has_masks $b 0-15 || print_masks $b
eventually "the assigned process has its own mask after the release" has_masks $assigned 3

kill -9 $(process_tree $a) $(process_tree $b) $assigned
kill $daemon
eventually "pjwd stops after SIGTERM" stopped $daemon
