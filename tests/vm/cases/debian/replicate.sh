# Replicas: each instance reads the program and its libraries from its own NUMA node, and nothing of them is left behind.
. /cases/functions

export LC_ALL=C
# spawn OPTION…: starts instances on both nodes, two each, and waits until they sleep.
spawn() {
    pjwctl spawn --local -n 4 --map numa "$@" -- sleep 1000 2>/tmp/said &
    launcher=$!
    eventually "instances run on both nodes ($*)" both_sleep
}
node_cpus() { cat "/sys/devices/system/node/node$1/cpulist"; }
# instances NODE: those of the launcher that may run on the CPUs of the node.
instances() {
    local pid
    for pid in $(pgrep -P "$launcher" -x sleep); do
        [ "$(masks "$pid")" != "$(node_cpus "$1")" ] || echo "$pid"
    done
}
sleep_on() { [ "$(for pid in $(instances "$1"); do cat "/proc/$pid/wchan"; echo; done | grep -c nanosleep)" = 2 ]; }
both_sleep() { sleep_on 0 && sleep_on 1; }
# permille NODE: how many of a thousand file pages lie on the node, for the instance on it that has the fewest there.
permille() {
    local pid
    for pid in $(instances "$1"); do
        awk -v node="N$1" '
            / file=\// {
                for (at = 1; at <= NF; at++) if (split($at, page, "=") == 2 && page[1] ~ /^N[0-9]+$/) {
                    all += page[2]
                    if (page[1] == node) own += page[2]
                }
            }
            END { print all ? int(1000 * own / all) : 0 }' "/proc/$pid/numa_maps"
    done | sort -n | head -n 1
}
# measure: sets `zero` and `one` to these of the two nodes.
measure() {
    zero=$(permille 0) one=$(permille 1)
    figure "$1: $zero and $one of a thousand file pages are on the own node"
}
is_local() { [ "$zero" -ge 950 ] && [ "$one" -ge 950 ]; }
prefers() { local pid; for pid in $(instances "$1"); do grep -q "prefer[=:]$1 " "/proc/$pid/numa_maps" || return 1; done; }
not() { ! "$@"; }
# Memory in tmpfs, in KB.
shmem() { awk '$1 == "Shmem:" { print $2 }' /proc/meminfo; }
nothing_left() {
    ! pgrep -x sleep && ! grep -qs 'mpol=bind' /proc/[0-9]*/mountinfo && [ "$(shmem)" -lt $((before + 1000)) ]
}

install_pjw
before=$(shmem)
spawn
measure "without replicas"
check "without replicas, one node has fewer" not is_local
check "without replicas, the memory of instances prefers node 0" prefers 0
check "without replicas, the memory of instances prefers node 1" prefers 1
kill -9 "$launcher"
eventually "nothing is left of the plain instances" nothing_left

for mode in never always; do
    spawn --replicate --proxy "$mode"
    measure "with replicas and --proxy $mode"
    check "the memory was told before ($mode)" grep -Eq 'takes 2 x [0-9]+ MB of memory for [0-9]+ files of .*sleep' /tmp/said
    check "at least 950 of a thousand file pages are on the own node ($mode)" is_local
    check "so much is in tmpfs ($mode)" [ "$(shmem)" -gt $((before + 2000)) ]
    check "the memory of instances prefers node 0 ($mode)" prefers 0
    check "and node 1 ($mode)" prefers 1
    check "nobody else sees the mounts ($mode)" not grep -q mpol=bind /proc/self/mountinfo
    kill -9 "$launcher"
    eventually "nothing is left after kill -9 ($mode)" nothing_left
done

# Killed at random moments: before, while and after the copies are made and the instances are started. A shell lets commands
# in the background ignore SIGINT and SIGQUIT, so these two are not among the signals.
for round in $(seq 20); do
    mode=$(shuf -n 1 -e never always) signal=$(shuf -n 1 -e HUP TERM KILL USR1 ABRT) delay=$(shuf -n 1 -i 200-1500)
    pjwctl spawn --local -n 4 --map numa --replicate --proxy "$mode" -- sleep 1000 2>/tmp/said &
    launcher=$!
    sleep "$((delay / 1000)).$(printf %03d $((delay % 1000)))"
    children=$(pgrep -c -P "$launcher")
    kill -s "$signal" "$launcher"
    wait "$launcher"
    figure "round $round: SIG$signal after $delay ms with --proxy $mode, when pjwctl had $children children"
    eventually "nothing is left after a signal at a random moment, round $round" nothing_left
done

pjwctl spawn --local -n 2 --map numa --replicate --async -- sleep 1000 2>/tmp/said
check "with --async the mounts live as long as the instances" grep -qs mpol=bind "/proc/$(pgrep -n -x sleep)/mountinfo"
pkill -x sleep
eventually "nothing is left after the instances" nothing_left

cp /bin/sleep /tmp/large && truncate -s 100G /tmp/large
if pjwctl spawn --local -n 2 --map numa --replicate -- /tmp/large 0 2>/tmp/said; then
    not_ok "replicas that don't fit are refused" "they were started"
else
    check "replicas that don't fit are refused" grep -q 'nothing was started: replicas would take .* MB on NUMA node 0, and at most .*: run without replicas' /tmp/said
fi
