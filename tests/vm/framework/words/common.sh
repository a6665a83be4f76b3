# The words that cases on both machines are written in: for busybox's shell, and so for bash too. Cases begin with
# `. /cases/words`, which is this file, on the Debian machine followed by debian.sh.

# ok NAME, not_ok NAME WHY: one line for each rule.
ok() { echo "ok $1"; }
not_ok() { echo "not ok $1: $2"; }

# check NAME COMMAND…: the rule holds if the command succeeds now. What commands print goes to standard error.
check() {
    name=$1
    shift
    if "$@" >&2; then ok "$name"; else not_ok "$name" "false: $*"; fi
}

# eventually NAME COMMAND…: the rule holds once the command succeeds, within a minute. The guest is emulated and its
# 16 CPUs may share two real ones.
eventually() {
    name=$1
    shift
    deadline=$(($(date +%s) + 60))
    until "$@" >&2; do
        if [ "$(date +%s)" -gt $deadline ]; then
            not_ok "$name" "still false after a minute: $*"
            return 1
        fi
        sleep 0.2
    done
    ok "$name"
}

# figure TEXT: something that was measured, for whoever reads the results; no rule.
figure() { echo "# $*"; }

# members LIST: the CPUs of a list such as 0-2,8, one a line.
members() {
    echo "$1" | tr ',' '\n' | awk -F- 'NF { for (cpu = $1; cpu <= $NF; cpu++) print cpu }'
}

# within A B: whether list A is inside list B, and not empty.
within() {
    [ -n "$1" ] && { members "$2"; echo --; members "$1"; } |
        awk '/^--$/ { second = 1; next } !second { has[$1] = 1; next } !($1 in has) { exit 1 }'
}

# disjoint A B: whether no CPU is in both.
disjoint() {
    { members "$1"; members "$2"; } | awk 'seen[$1]++ { exit 1 }'
}

# in_one_node LIST: whether the list is inside one NUMA node.
in_one_node() {
    for node in /sys/devices/system/node/node*/cpulist; do
        within "$1" "$(cat "$node")" && return 0
    done
    return 1
}

# cpus JOB: what it holds, by the JSON that scripts may rely on.
cpus() {
    pjwctl status --json | tr -d ' \n' | grep -o "\"id\":\"$1\"[^{}]*\"cpus\":\"[^\"]*\"" | sed 's/.*"cpus":"//; s/"$//'
}

# field JOB NAME: a job's value in that JSON, such as `field manual:a granted_by`.
field() {
    pjwctl status --json | tr -d ' \n' | grep -o "\"id\":\"$1\"[^{}]*" | grep -o "\"$2\":\(\"[^\"]*\"\|[^,]*\)" |
        sed 's/^"[^"]*"://; s/"//g'
}

# switch 0|1 LIST: CPUs off or on.
switch() {
    for cpu in $(members "$2"); do echo "$1" >"/sys/devices/system/cpu/cpu$cpu/online"; done
}

# is_free LIST: whether all of these are in the pool.
is_free() {
    within "$1" "$(pjwctl status --json | tr -d ' \n' | grep -o '"free":"[^"]*"' | sed 's/.*:"//; s/"$//')"
}

# holds_none_of JOB LIST: whether it has cores, and none of these.
holds_none_of() {
    now=$(cpus "$1")
    [ -n "$now" ] && disjoint "$now" "$2"
}

# holds JOB: whether it holds any.
holds() {
    [ -n "$(cpus "$1")" ]
}

# family PID: the process and all its descendants.
family() {
    cat /proc/[0-9]*/stat 2>/dev/null | sed 's/(.*)/x/' | awk -v root="$1" '
        { parent[$1] = $4 }
        END {
            for (pid in parent) {
                at = pid
                while (at != root && (at in parent)) at = parent[at]
                if (at == root) print pid
            }
        }'
}

# masks PID…: the masks of all threads of these processes, each once.
masks() {
    for pid in "$@"; do
        cat /proc/"$pid"/task/*/status 2>/dev/null | sed -n 's/^Cpus_allowed_list:[[:space:]]*//p'
    done | sort -u
}

# confined LIST PID…: whether every thread of these processes is inside the list.
confined() {
    list=$1
    shift
    found=$(masks "$@")
    [ -n "$found" ] || return 1
    for mask in $found; do
        within "$mask" "$list" || return 1
    done
}
