# Eight processes in one address space map and unmap memory all the time, each on a core of its own. pjwctl says that they wait for
# one another, and what helps. Processes in one address space that only compute get no such advice.
. /cases/functions

answers() { pjwctl status --json >/dev/null 2>&1; }
has_ended() { [ ! -d "/proc/$1" ] || grep -q '^State:.Z' "/proc/$1/status"; }
has_hot() { [ "$(field "$1" hot)" = "$2" ]; }
# squeezed COMMAND…: prints the output of the command in one line. pjwctl breaks long lines.
squeezed() { "$@" | tr -s ' \n' ' '; }
waits='active threads of processes .* wait for one another to map and unmap memory'
has_advice() { squeezed pjwctl show "$1" --memory | grep -q "$waits: they are blocked .* GLIBC_TUNABLES="; }
# pjwctl explain tells what the last reading has found, and each call of pjwctl show makes one.
is_explained() { has_advice "$1" && squeezed pjwctl explain "$1" | grep -q "$waits"; }
has_no_advice() { pjwctl show "$1" --memory --json | tr -d ' \n' | grep -q '"map_lock_waits":\[\]'; }
end() {
    kill -9 $(process_tree $started)
    eventually "job $1 has ended" has_ended $started
    eventually "the cores of job $1 are free" is_free 0-15
}

pjwd 2>>/dev/ttyS0 &
daemon=$!
eventually "pjwd answers" answers || exit 1

pjwctl run --cores 8 --job computing -- busy-tasks &
started=$!
eventually "four tasks in one address space compute" has_hot manual:computing 4
check "tasks that only compute get no advice about mapping memory" has_no_advice computing
end computing

# Each reading samples the tasks for 0.2 s, or for up to 2 s where the machine is slow. Readings are repeated: the CPUs of the host
# may run none of the waiting tasks for the time of one of them.
time_limit=240
pjwctl run --cores 8 --job mapping -- map-tasks &
started=$!
eventually "job mapping holds all cores" holds manual:mapping
eventually "tasks that map and unmap memory on many cores get advice" has_advice mapping
eventually "pjwctl explain says that they wait for one another" is_explained mapping
end mapping

kill $daemon
eventually "pjwd stops after the tasks" has_ended $daemon
