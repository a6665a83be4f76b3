# Replicas: each instance reads the program and its libraries from its own NUMA node. The replicas are removed at the end.
. /cases/functions

export LC_ALL=C
# spawn OPTION…: starts two instances on each of both nodes, and waits until they sleep.
spawn() {
    pjwctl spawn --local -n 4 --map numa "$@" -- sleep 1000 2>/tmp/output &
    launcher=$!
    eventually "instances run on both nodes ($*)" both_sleep
}
node_cpus() { cat "/sys/devices/system/node/node$1/cpulist"; }
# instances NODE: prints the launcher's instances whose masks are the CPUs of the node.
instances() {
    local pid
    for pid in $(pgrep -P "$launcher" -x sleep); do
        [ "$(masks "$pid")" != "$(node_cpus "$1")" ] || echo "$pid"
    done
}
sleep_on() { [ "$(for pid in $(instances "$1"); do cat "/proc/$pid/wchan"; echo; done | grep -c nanosleep)" = 2 ]; }
both_sleep() { sleep_on 0 && sleep_on 1; }
# permille NODE: prints how many of a thousand file pages are on the node, for the instance there with the lowest number.
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
# measure SITUATION: sets `zero` and `one` to the result of `permille` for the two nodes.
measure() {
    zero=$(permille 0) one=$(permille 1)
    figure "$1: $zero and $one of a thousand file pages are on the own node"
}
is_local() { [ "$zero" -ge 950 ] && [ "$one" -ge 950 ]; }
prefers() { local pid; for pid in $(instances "$1"); do grep -q "prefer[=:]$1 " "/proc/$pid/numa_maps" || return 1; done; }
not() { ! "$@"; }
# Prints the memory in tmpfs, in KB. The files in /run do not count: the journal grows there.
shmem() {
    local all total free size
    all=$(awk '$1 == "Shmem:" { print $2 }' /proc/meminfo)
    read -r total free size <<<"$(stat -f -c '%b %f %S' /run)"
    echo $((all - (total - free) * size / 1024))
}
nothing_left() {
    ! pgrep -x sleep && ! grep -qs 'mpol=bind' /proc/[0-9]*/mountinfo && [ "$(shmem)" -lt $((before + 1000)) ]
}

install_pjw
before=$(shmem)
spawn
measure "without replicas"
check "without replicas, not all instances have their file pages on the own node" not is_local
check "without replicas, the memory of instances prefers node 0" prefers 0
check "without replicas, the memory of instances prefers node 1" prefers 1
kill -9 "$launcher"
eventually "nothing is left of the instances without replicas" nothing_left

for mode in never always; do
    spawn --replicate --proxy "$mode"
    measure "with replicas and --proxy $mode"
    check "pjwctl printed the memory of the replicas ($mode)" grep -Eq 'takes 2 x [0-9]+ MB of memory for [0-9]+ files of .*sleep' /tmp/output
    check "at least 950 of a thousand file pages are on the own node ($mode)" is_local
    check "the replicas are in tmpfs ($mode)" [ "$(shmem)" -gt $((before + 2000)) ]
    check "the memory of instances prefers node 0 ($mode)" prefers 0
    check "the memory of instances prefers node 1 ($mode)" prefers 1
    check "the mounts are in no other mount namespace ($mode)" not grep -q mpol=bind /proc/self/mountinfo
    kill -9 "$launcher"
    eventually "nothing is left after kill -9 ($mode)" nothing_left
done

# The launcher is killed at random moments: before, while and after the replicas are made and the instances are started. SIGINT and
# SIGQUIT are left out, because a shell lets background commands ignore them.
for round in $(seq 20); do
    mode=$(shuf -n 1 -e never always) signal=$(shuf -n 1 -e HUP TERM KILL USR1 ABRT) delay=$(shuf -n 1 -i 200-1500)
    pjwctl spawn --local -n 4 --map numa --replicate --proxy "$mode" -- sleep 1000 2>/tmp/output &
    launcher=$!
    sleep "$((delay / 1000)).$(printf %03d $((delay % 1000)))"
    children=$(pgrep -c -P "$launcher")
    kill -s "$signal" "$launcher"
    wait "$launcher"
    figure "round $round: SIG$signal after $delay ms with --proxy $mode, when pjwctl had $children children"
    eventually "nothing is left after a signal at a random moment, round $round" nothing_left
done

pjwctl spawn --local -n 2 --map numa --replicate --async -- sleep 1000 2>/tmp/output
has_mounts() { grep -qs mpol=bind "/proc/$(pgrep -n -x sleep)/mountinfo"; }
eventually "with --async the mounts exist while the instances run" has_mounts
pkill -x sleep
eventually "nothing is left after the instances have ended" nothing_left

cp /bin/sleep /tmp/large && truncate -s 100G /tmp/large
if pjwctl spawn --local -n 2 --map numa --replicate -- /tmp/large 0 2>/tmp/output; then
    not_ok "replicas that don't fit are refused" "they were started"
else
    check "replicas that don't fit are refused" grep -q 'nothing was started: replicas would take .* MB on NUMA node 0, and at most .*: run without replicas' /tmp/output
fi

printf '#!/no/such/interpreter\n' >/tmp/script && chmod 755 /tmp/script
pjwctl spawn --local -n 2 --map numa --replicate -- /tmp/script 2>/tmp/output
code=$?
check "a script without its interpreter has the exit code that it has without --replicate" [ "$code" = 127 ]
check "the missing interpreter is named, and no replica is made" grep -q \
    '^pjwctl: nothing was started: /tmp/script: step exec failed: .*; the interpreter /no/such/interpreter in the first line of /tmp/script is missing' /tmp/output
(ulimit -f 100 && pjwctl spawn --local -n 2 --map numa --replicate -- sleep 0 2>/tmp/output)
check "a limit of the file size is named with its remedy" grep -q 'copy: File too large; raise the limit of the file size (ulimit -f)' /tmp/output
