# A job has cores on both NUMA nodes. Each new process goes to a core of its own, on the node that --within-job gives. A process
# whose memory is on the other node is found without a request, and reported on request. Processes that share an address space are placed on one node, and stay there
# when their job is resized.
. /cases/functions

answers() { pjwctl status --json >/dev/null 2>&1; }
# Prints the shells of a job that compute: all processes except the first.
ranks() { process_tree "$1" | grep -vx "$1"; }
# are_in PID NODE0 NODE1: whether each rank is pinned to one CPU, NODE0 ranks on node 0 (0-7) and NODE1 ranks on node 1 (8-15).
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
has_ended() { [ ! -d "/proc/$1" ] || grep -q '^State:.Z' "/proc/$1/status"; }
has_memory() { [ "$(awk '/^VmRSS/ { print $2 }' "/proc/$1/status")" -ge 90000 ]; }
squeezed() { "$@" | tr -s ' \n' ' '; }
is_far() { squeezed pjwctl show far --memory --nodes | grep -q "process $1: 1 hot thread runs on NUMA node 0, and .* of the memory is elsewhere, most of it on node 1"; }
# is_explained PID: whether pjwctl explain names the process, and says how to move its memory.
is_explained() { squeezed pjwctl explain far | grep -q "process $1, when its memory was last sampled: 1 hot thread runs on NUMA node 0, and about .* of the memory is elsewhere, most of it on node 1; move the memory: migratepages $1 1 0 "; }
# is_in_show PID: whether pjwctl show names the process without --nodes, which reads the nodes of all pages.
is_in_show() { pjwctl show far --memory --json | tr -d ' \n' | grep -q "\"far\":\[{\"pid\":$1,\"busy_threads\":1,"; }

[ ! -e /proc/sys/kernel/numa_balancing ] || echo 0 >/proc/sys/kernel/numa_balancing
pjwd 2>>/dev/ttyS0 &
daemon=$!
eventually "pjwd answers" answers || exit 1

busy='while :; do :; done'
# The ranks wait for one line each. The pipe is open all the time, so that it has no end.
mkfifo /tmp/ranks
exec 5<>/tmp/ranks
all_wait() { [ "$(field "$1" processes)" = 5 ] && [ "$(field "$1" hot)" = 0 ]; }
start() { # RULE: starts a job with four ranks on the whole machine
    pjwctl run --cores 8 --job "$1" --within-job "$1" -- \
        sh -c "for rank in 1 2 3 4; do sh -c 'read -r _ </tmp/ranks; $busy' & done; wait" &
    started=$!
    eventually "job $1 holds all cores" holds "manual:$1"
    # The rule counts each process that computes. The first shell may compute until it has started the ranks.
    eventually "the ranks of job $1 have started, and its first shell is idle" all_wait "manual:$1"
    printf '\n\n\n\n' >&5
}
end() {
    kill -9 $(process_tree $started)
    eventually "job $1 has ended" has_ended $started
    eventually "the cores of job $1 are free" is_free 0-15
}
start rr
eventually "with rr two ranks are on each node" are_in $started 2 2
end rr
start ll
eventually "with ll two ranks are on each node" are_in $started 2 2
end ll
start fill
eventually "with fill all ranks are on node 0" are_in $started 4 0
end fill
start packed
eventually "with packed all ranks are on one node" are_in_one_node $started
end packed
exec 5>&-
rm /tmp/ranks

# Counts the tasks that are pinned to one CPU: `node0` on node 0, and `node1` on node 1.
count_tasks() {
    node0=0
    node1=0
    for pid in $(process_tree "$1"); do
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
has_hot() { [ "$(field "$1" hot)" = "$2" ]; }
# Another process of the job computes, so one of the nodes has only three idle cores.
rm -f /tmp/begin
pjwctl run --cores 8 --job together -- sh -c "sh -c '$busy' & until [ -e /tmp/begin ]; do sleep 1; done; busy-tasks" &
started=$!
eventually "the job of the tasks holds all cores" holds manual:together
eventually "the other process is hot" has_hot manual:together 1
: >/tmp/begin
eventually "four tasks in one address space are pinned on one node" tasks_are_on_one_node $started

# The tasks and the other process have a core each also with five cores. So the job has to keep the four cores of the tasks.
if [ "$node0" = 4 ]; then node_of_tasks=0-7; else node_of_tasks=8-15; fi
stay() {
    tasks_are_on_one_node "$1" || return 1
    if [ "$node0" = 4 ]; then [ $node_of_tasks = 0-7 ]; else [ $node_of_tasks = 8-15 ]; fi
}
has_cores() { [ "$(each_cpu "$(cpus "$1")" | wc -l)" = $(($2 * 2)) ]; }
resize_tasks() { # CORES
    check "the job of the tasks is resized to $1 cores" pjwctl assign together --cores "$1"
    eventually "the job of the tasks has $1 cores" has_cores manual:together "$1"
    check "of $1 cores the job has all cores of the node of the tasks" within $node_of_tasks "$(cpus manual:together)"
    eventually "with $1 cores the tasks are pinned on the same node" stay $started
}
resize_tasks 5
# Another job takes two of the cores that became free. The job of the tasks grows on the others.
check "another job gets two cores beside the tasks" pjwctl assign neighbour --cores 2
resize_tasks 6
check "the job beside the tasks is released" pjwctl release neighbour
resize_tasks 8
resize_tasks 5
end together
rm -f /tmp/begin

# Six cores are on both nodes, and one node has enough cores for the four tasks.
pjwctl spawn --cores 6 --job spawned -n 4 --share memory -- busy-tasks alone &
started=$!
eventually "the job of the spawned tasks holds cores" holds manual:spawned
# are_placed: whether the CPUs of all four tasks are in one node.
are_placed() {
    placed=
    count=0
    for pid in $(process_tree $started); do
        read -r comm <"/proc/$pid/comm" && [ "$comm" = busy-tasks ] || continue
        count=$((count + 1))
        for cpu in $(masks "$pid"); do placed=${placed:+$placed,}$cpu; done
    done
    [ $count = 4 ] && in_one_node "$placed"
}
eventually "four spawned tasks are placed on one node" are_placed
are_apart() { are_placed && [ -z "$(each_cpu "$placed" | sort | uniq -d)" ]; }
check "the job of the spawned tasks has cores on both nodes" eval '! in_one_node "$(cpus manual:spawned)"'
eventually "no CPU belongs to two spawned tasks" are_apart
end spawned

pjwctl run --cores 8 --job far -- sh -c 'taskset -c 8 dd if=/dev/zero of=/dev/null bs=100M & wait' &
started=$!
eventually "job far holds all cores" holds manual:far
has_program() { [ "$(ranks $started | wc -l)" = 1 ]; }
eventually "the program of job far runs" has_program
program=$(ranks $started)
eventually "the program has its memory" has_memory "$program"
thread_is_hot() { [ "$(field manual:far hot)" = 1 ]; }
eventually "its thread is hot" thread_is_hot
check "no far memory is reported while the thread is on the node of the memory" eval '! is_far "$program"'
check "pjwctl explain says nothing while the thread is on the node of the memory" eval '! is_explained "$program"'
taskset -pc 0 "$program" >&2
# A sample of the pages is taken once a minute, and two in a row have to find the memory.
time_limit=400
eventually "far memory is found without a request when the thread is on the other node" is_explained "$program"
check "pjwctl show names the process with far memory" is_in_show "$program"
eventually "far memory is reported when the thread is on the other node" is_far "$program"
taskset -pc 8 "$program" >&2
eventually "the finding ends when the thread is on the node of the memory again" eval '! is_explained "$program"'
end far
kill $daemon
eventually "pjwd stops after the jobs on NUMA nodes" has_ended $daemon
