# Two jobs on a machine with two NUMA nodes, from the first command to the last mask put back.
. /cases/functions

start_warden() {
    pjwd 2>>/dev/ttyS0 &
    warden=$!
}
answers() { pjwctl status --json >/dev/null 2>&1; }
silent() { ! answers; }
# A child that ended stays in the table until the shell takes note.
stopped() { [ ! -d "/proc/$1" ] || grep -q '^State:.Z' "/proc/$1/status"; }
grew() { [ "$(family "$1" | wc -l)" -ge "$2" ]; }
has_masks() { [ "$(masks $(family "$1"))" = "$2" ]; }
is_jailed() { confined "$(cpus "$1")" $(family "$2"); }

start_warden
eventually "the daemon answers" answers || exit 1

# Job a asks for two cores and keeps six CPUs busy; job b asks for three and keeps to it. A core is two CPUs.
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
eventually "job a has grown" grew $a 7
eventually "job b has grown" grew $b 3

a_cpus=$(cpus manual:a) b_cpus=$(cpus manual:b)
check "job a holds two whole cores" [ "$(members "$a_cpus" | wc -l)" = 4 ]
check "job b holds three whole cores" [ "$(members "$b_cpus" | wc -l)" = 6 ]
check "no CPU belongs to both" disjoint "$a_cpus" "$b_cpus"
check "job a is inside one NUMA node" in_one_node "$a_cpus"
check "job b is inside one NUMA node" in_one_node "$b_cpus"
eventually "every thread of job a is on its cores" is_jailed manual:a $a
eventually "every thread of job b is on its cores" is_jailed manual:b $b

# A member widens its own mask: the warden puts it back.
rebel=$(family $a | tail -n 1)
taskset -p ffff "$rebel" >/dev/null
eventually "a thread that left its cores is brought back" is_jailed manual:a $a

# A process that was there before, with a mask of its own, joins and is let go again below.
taskset 8 sh -c "$busy" &
guest=$!
eventually "the guest has its own mask" has_masks $guest 3
if pjwctl assign guest --cores 1 --pid $guest >&2; then ok "a running process is assigned"; else not_ok "a running process is assigned" "exit $?"; fi
guest_cpus=$(cpus manual:guest)
eventually "the assigned process is on the job's cores" is_jailed manual:guest $guest
check "its cores are nobody else's" disjoint "$guest_cpus" "$a_cpus,$b_cpus"

# The daemon dies without a word; the jobs don't notice, and the next one knows them.
kill -9 $warden
eventually "the killed daemon is silent" silent
eventually "job a stays on its cores without a daemon" confined "$a_cpus" $(family $a)
start_warden
eventually "the next daemon answers" answers
check "job a kept its cores over the kill" [ "$(cpus manual:a)" = "$a_cpus" ]
check "job b kept its cores over the kill" [ "$(cpus manual:b)" = "$b_cpus" ]
check "the guest kept its cores over the kill" [ "$(cpus manual:guest)" = "$guest_cpus" ]
eventually "job a is still confined" is_jailed manual:a $a
eventually "job b is still confined" is_jailed manual:b $b

# A core of job b is switched off, and another takes its place; then it is there again, and nobody's.
core=$(cat "/sys/devices/system/cpu/cpu$(members "$b_cpus" | tail -n 1)/topology/thread_siblings_list")
switch 0 "$core"
eventually "job b no longer holds a core that is off" holds_none_of manual:b "$core"
b_now=$(cpus manual:b)
check "another core took its place" [ "$(members "$b_now" | wc -l)" = 6 ]
check "nobody else's" disjoint "$b_now" "$a_cpus,$guest_cpus"
eventually "every thread of job b is on its new cores" is_jailed manual:b $b
switch 1 "$core"
eventually "the core that is back is free" is_free "$core"
check "job b stays where it is" [ "$(cpus manual:b)" = "$b_now" ]

# Undo: every mask as it was, also the guest's own, which only the journal remembers.
if pjwctl release --all >&2; then ok "everything is released"; else not_ok "everything is released" "exit $?"; fi
eventually "job a may run anywhere again" has_masks $a 0-15
eventually "job b may run anywhere again" has_masks $b 0-15
eventually "the guest has its own mask again" has_masks $guest 3

kill -9 $(family $a) $(family $b) $guest
kill $warden
eventually "the daemon stops when it is told to" stopped $warden
