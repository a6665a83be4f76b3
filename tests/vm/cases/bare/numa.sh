# A job on both NUMA nodes: new processes go where --within-job says, each to a core of its own. A process whose memory is on the
# other node is named. Processes that share an address space are on one node.
. /cases/functions

answers() { pjwctl status --json >/dev/null 2>&1; }
# The shells of a job that compute: all but the first.
ranks() { family "$1" | grep -vx "$1"; }
# are_in PID NODE0 NODE1: whether so many ranks are pinned to one CPU each of node 0 (0-7) and of node 1 (8-15).
are_in() {
    node0=0
    node1=0
    for pid in $(ranks "$1"); do
        mask=$(masks "$pid")
        case $mask in '' | *[!0-9]*) return 1 ;; esac
        if [ "$mask" -le 7 ]; then node0=$((node0 + 1)); else node1=$((node1 + 1)); fi
    done
    [ "$node0 $node1" = "$2 $3" ]
}
are_in_one_node() { are_in "$1" 4 0 || are_in "$1" 0 4; }
gone() { [ ! -d "/proc/$1" ] || grep -q '^State:.Z' "/proc/$1/status"; }
has_memory() { [ "$(awk '/^VmRSS/ { print $2 }' "/proc/$1/status")" -ge 90000 ]; }
is_far() { pjwctl show far --memory --nodes | tr -s ' \n' ' ' | grep -q "process $1: 1 busy thread runs on NUMA node 0, and .* of the memory is elsewhere, most of it on node 1"; }

[ ! -e /proc/sys/kernel/numa_balancing ] || echo 0 >/proc/sys/kernel/numa_balancing
pjwd 2>>/dev/ttyS0 &
warden=$!
eventually "the daemon answers" answers || exit 1

busy='while :; do :; done'
start() { # RULE: a job on the whole machine with four ranks
    pjwctl run --cores 8 --job "$1" --within-job "$1" -- sh -c "for rank in 1 2 3 4; do sh -c '$busy' & done; wait" &
    started=$!
    eventually "the job $1 holds the machine" holds "manual:$1"
}
end() {
    kill -9 $(family $started)
    eventually "the job $1 has ended" gone $started
    eventually "the cores of $1 are free" is_free 0-15
}
start rr
eventually "with rr the nodes are taken in turns" are_in $started 2 2
end rr
start ll
eventually "with ll each node has as many" are_in $started 2 2
end ll
start fill
eventually "with fill a node is filled first" are_in $started 4 0
end fill
start packed
eventually "with packed all are in one node" are_in_one_node $started
end packed

# The tasks of a job, by the node of the one CPU to which each is pinned: `node0` and `node1`.
count_tasks() {
    node0=0
    node1=0
    for pid in $(family "$1"); do
        read -r comm <"/proc/$pid/comm" && [ "$comm" = busy-tasks ] || continue
        mask=$(masks "$pid")
        case $mask in '' | *[!0-9]*) continue ;; esac
        if [ "$mask" -le 7 ]; then node0=$((node0 + 1)); else node1=$((node1 + 1)); fi
    done
}
tasks_are_on_one_node() {
    count_tasks "$1"
    [ "$node0 $node1" = "4 0" ] || [ "$node0 $node1" = "0 4" ]
}
is_pinned() { [ "$(field "$1" pinned)" = "$2" ]; }
# One more process computes, so one of the nodes has only three idle cores.
rm -f /tmp/begin
pjwctl run --cores 8 --job together -- sh -c "sh -c '$busy' & until [ -e /tmp/begin ]; do sleep 1; done; busy-tasks" &
started=$!
eventually "the job of the tasks holds the machine" holds manual:together
eventually "the other process is pinned" is_pinned manual:together 1
: >/tmp/begin
eventually "four tasks in one address space are pinned on one node" tasks_are_on_one_node $started
end together
rm -f /tmp/begin

# Six cores are on both nodes, and four tasks fit in one.
pjwctl spawn --cores 6 --job spawned -n 4 --share memory -- busy-tasks alone &
started=$!
eventually "the job of the spawned tasks holds cores" holds manual:spawned
# are_placed: the CPUs of all four tasks are in one node.
are_placed() {
    placed=
    count=0
    for pid in $(family $started); do
        read -r comm <"/proc/$pid/comm" && [ "$comm" = busy-tasks ] || continue
        count=$((count + 1))
        for cpu in $(masks "$pid"); do placed=${placed:+$placed,}$cpu; done
    done
    [ $count = 4 ] && in_one_node "$placed"
}
eventually "four spawned tasks are placed on one node" are_placed
check "their job has cores on both nodes" eval '! in_one_node "$(cpus manual:spawned)"'
check "no CPU belongs to two spawned tasks" eval '[ -z "$(members "$placed" | sort | uniq -d)" ]'
end spawned

pjwctl run --cores 8 --job far -- sh -c 'taskset -c 8 dd if=/dev/zero of=/dev/null bs=100M & wait' &
started=$!
eventually "the job holds the machine" holds manual:far
has_program() { [ "$(ranks $started | wc -l)" = 1 ]; }
eventually "its program runs" has_program
program=$(ranks $started)
eventually "it has memory" has_memory "$program"
is_busy() { [ "$(field manual:far hot)" = 1 ]; }
eventually "it is busy" is_busy
check "the memory is not far from a thread beside it" eval '! is_far "$program"'
taskset -pc 0 "$program" >&2
eventually "far memory is named" is_far "$program"
end far
kill $warden
eventually "the daemon of the NUMA nodes stops" gone $warden
