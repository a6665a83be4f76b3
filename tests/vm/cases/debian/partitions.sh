# Options of a job for its cpuset: memory only from the NUMA nodes of its cores, and a partition of its own. In a partition no other
# process runs, and the kernel does no load balancing, so pjwd pins every running thread. The release undoes everything.
# without pjw
. /cases/functions

top=/sys/fs/cgroup
mems_are() { [ "$(cat "$top/$1/cpuset.mems.effective")" = "$2" ]; }
process_has_mems() { [ "$(sed -n 's/^Mems_allowed_list:[[:space:]]*//p' "/proc/$1/status")" = "$2" ]; }
busy='for i in 1 2 3; do (while :; do :; done) & done; sleep 1000'
# Whether each running thread of bob is pinned to one CPU, and no two threads to the same.
each_is_pinned_alone() {
    local masks
    masks=$(for pid in $(pgrep -u bob -r R); do masks "$pid"; done)
    [ "$(wc -l <<<"$masks")" -ge 3 ] && [ "$(sort -u <<<"$masks" | wc -l)" = "$(wc -l <<<"$masks")" ] && ! grep -q '[-,]' <<<"$masks"
}
# Whether no process outside the list runs there. Processes of bob, who owns the job, and kernel threads do not count.
others_avoid() {
    local pid
    for pid in $(pgrep -v -u bob); do
        [ -s "/proc/$pid/cmdline" ] || continue
        for mask in $(masks "$pid"); do disjoint "$mask" "$1" || { echo "$pid on $mask" >&2; return 1; }; done
    done
}
is_removed() { [ ! -e "$1" ]; }

install_pjw 'user_max_cores = 4'
eventually "two dumps of the node before pjwd runs are equal" is_same_twice dump_node /tmp/before
start_pjw 'user_max_cores = 4'
pjwctl run --cores 2 --job filler -- sleep 1000 &
pjwctl run --cores 3 --bind-memory --job near -- sh -c 'sleep 1000 & wait' &
near=$!
scope=pjw.slice/pjw-near.scope
eventually "the job with --bind-memory holds cores" holds manual:near
near_cpus=$(cpus manual:near)
check "the cores of the job are in one NUMA node" in_one_node "$near_cpus"
node=$(for at in 0 1; do within "$near_cpus" "$(cat /sys/devices/system/node/node$at/cpulist)" && echo $at; done)
# A job holds its cores before systemd has made its scope.
eventually "the cgroup of the job has only the memory of that node" mems_are $scope "$node"
eventually "the cgroup of the other job has the memory of both nodes" mems_are pjw.slice/pjw-filler.scope 0-1
eventually "a process of the job has only the memory of that node" process_has_mems $near "$node"

# A process is bound to a CPU that the partition will get. The job `probe` has the same size, and so finds the CPU.
pjwctl assign probe --cores 2 >&2
cpu=$(each_cpu "$(cpus manual:probe)" | head -n 1)
pjwctl release probe >&2
taskset -c "$cpu" sleep 1000 &
bound=$!
bound_has() { [ "$(masks $bound)" = "$1" ]; }
# When the partition has the CPU, a process outside of it can't request the CPU any more.
eventually "the process is bound to the CPU before the partition is made" bound_has "$cpu"
as bob pjwctl run --cores 2 --isolated --job alone -- bash -c "$busy" >&2 &
eventually "the isolated job holds cores" holds manual:alone
alone=$(cpus manual:alone)
partition() { [ "$(cat "$top/pjw-alone.scope/cpuset.cpus.partition")" = isolated ]; }
eventually "the cgroup of the isolated job is a valid partition" partition
check "the partition has the CPUs of the job" [ "$(cat "$top/pjw-alone.scope/cpuset.cpus.effective")" = "$alone" ]
eventually "each running thread in the partition is pinned to a CPU of its own" each_is_pinned_alone
# pjwctl starts the command after 5 s even if the partition is not complete.
bob_is_inside() { confined "$alone" $(pgrep -u bob); }
eventually "every thread of the isolated job is inside the partition" bob_is_inside
check "the CPU of the bound process is in the partition" within "$cpu" "$alone"
eventually "no other process has a CPU of the partition in its mask" others_avoid "$alone"
check "the bound process has no CPU of the partition in its mask" disjoint "$(masks $bound)" "$alone"
check "the other job holds the same cores" [ "$(cpus manual:near)" = "$near_cpus" ]

kill $(pgrep -u bob)
eventually "the partition is removed after the end of the job" is_removed $top/pjw-alone.scope
eventually "the CPUs of the partition are in system.slice again" eval '[ "$(cat $top/system.slice/cpuset.cpus.effective)" = 0-15 ]'
eventually "the bound process has its mask of one CPU again" bound_has "$cpu"
kill $(pgrep -f 'sleep 1000')
eventually "all cores are free" is_free 0-15
check "pjwctl release --all succeeds" pjwctl release --all
no_cgroup_left() { prints_nothing find $top -name 'pjw-*.scope'; }
eventually "no cgroup of a job is left" no_cgroup_left
systemctl disable --now pjwd.service pjwd.socket >&2
# systemd removes an empty slice some time after its last scope.
is_as_before() { dump_node /tmp/after; diff /tmp/before /tmp/after; }
eventually "the node is as before" is_as_before
