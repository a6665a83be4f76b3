# What a job may ask of its wall: memory from its cores' NUMA nodes alone, and a partition of its own, where nobody else
# runs and the kernel balances nothing, so that every thread is pinned. All of it is undone.
# without pjw
. /cases/functions

top=/sys/fs/cgroup
mems() { cat "$top/$1/cpuset.mems.effective"; }
busy='for i in 1 2 3; do (while :; do :; done) & done; sleep 1000'
# Every thread that runs has one CPU, and no CPU is two threads'.
each_has_its_own() {
    local masks
    masks=$(for pid in $(pgrep -u bob -r R); do masks "$pid"; done)
    [ "$(wc -l <<<"$masks")" -ge 3 ] && [ "$(sort -u <<<"$masks" | wc -l)" = "$(wc -l <<<"$masks")" ] && ! grep -q '[-,]' <<<"$masks"
}
# Everybody but the job's user and the kernel's threads.
others_are_off() {
    local pid
    for pid in $(pgrep -v -u bob); do
        [ -s "/proc/$pid/cmdline" ] || continue
        for mask in $(masks "$pid"); do disjoint "$mask" "$1" || { echo "$pid on $mask" >&2; return 1; }; done
    done
}
is_gone() { [ ! -e "$1" ]; }

install_pjw 'user_max_cores = 4'
dump_node /tmp/before
start_pjw 'user_max_cores = 4'
pjwctl run --cores 2 --job filler -- sleep 1000 &
pjwctl run --cores 3 --bind-memory --job near -- sh -c 'sleep 1000 & wait' &
near=$!
scope=pjw.slice/pjw-near.scope
eventually "the job with memory of its own holds cores" holds manual:near
near_cpus=$(cpus manual:near)
check "in one NUMA node" in_one_node "$near_cpus"
node=$(for at in 0 1; do within "$near_cpus" "$(cat /sys/devices/system/node/node$at/cpulist)" && echo $at; done)
check "its memory is that node's" [ "$(mems $scope)" = "$node" ]
check "the filler's is anywhere" [ "$(mems pjw.slice/pjw-filler.scope)" = 0-1 ]
check "its processes may have no other" [ "$(sed -n 's/^Mems_allowed_list:[[:space:]]*//p' /proc/$near/status)" = "$node" ]

# Who is bound to a CPU that the partition takes: the place is found by a job that is to have it first.
pjwctl assign scout --cores 2 >&2
cpu=$(each_cpu "$(cpus manual:scout)" | head -n 1)
pjwctl release scout >&2
taskset -c "$cpu" sleep 1000 &
bystander=$!
as bob pjwctl run --cores 2 --isolated --job alone -- bash -c "$busy" >&2 &
eventually "the isolated job holds cores" holds manual:alone
alone=$(cpus manual:alone)
partition() { [ "$(cat "$top/pjw-alone.scope/cpuset.cpus.partition")" = isolated ]; }
eventually "its partition is valid" partition
check "it has its cores" [ "$(cat "$top/pjw-alone.scope/cpuset.cpus.effective")" = "$alone" ]
eventually "every thread that runs is pinned to a CPU of its own" each_has_its_own
check "all its threads are inside" confined "$alone" $(pgrep -u bob)
check "also the one that somebody is bound to" within "$cpu" "$alone"
eventually "everybody else is off these CPUs" others_are_off "$alone"
check "who was bound there may run elsewhere" disjoint "$(masks $bystander)" "$alone"
check "other jobs have what they had" [ "$(cpus manual:near)" = "$near_cpus" ]

kill $(pgrep -u bob)
eventually "with its end the partition is gone" is_gone $top/pjw-alone.scope
eventually "its CPUs are everybody's" eval '[ "$(cat $top/system.slice/cpuset.cpus.effective)" = 0-15 ]'
eventually "and who was bound there is bound again" eval '[ "$(masks $bystander)" = "$cpu" ]'
kill $(pgrep -f 'sleep 1000')
eventually "all cores are free" is_free 0-15
check "everything is released" pjwctl release --all
systemctl disable --now pjwd.service pjwd.socket >&2
dump_node /tmp/after
check "the node is as before" diff /tmp/before /tmp/after
