# The words that cases on both machines are written in: for busybox's shell, and so for bash too. Cases begin with
# `. /cases/functions`, which is this file, on the Debian machine followed by debian.sh.

# ok NAME, not_ok NAME WHY: one line for each rule.
ok() { echo "ok $1"; }
not_ok() { echo "not ok $1: $2"; }

# check NAME COMMAND…: the rule holds if the command succeeds now. What commands print goes to standard error.
check() {
    name=$1
    shift
    if "$@" >&2; then ok "$name"; else not_ok "$name" "false: $*"; fi
}

# prints_nothing COMMAND…: whether the command succeeds and prints nothing. A failed command that prints nothing is no proof.
prints_nothing() {
    local printed
    printed=$("$@") && [ -z "$printed" ]
}

# eventually NAME COMMAND…: the rule holds once the command succeeds, within time_limit seconds (60). The guest is emulated, and its
# 16 CPUs may share two real ones.
eventually() {
    name=$1
    shift
    deadline=$(($(date +%s) + ${time_limit:-60}))
    until "$@" >&2; do
        if [ "$(date +%s)" -gt $deadline ]; then
            not_ok "$name" "still false after ${time_limit:-60} s: $*"
            return 1
        fi
        sleep 0.2
    done
    ok "$name"
}

# figure TEXT: something that was measured, for whoever reads the results; no rule.
figure() { echo "# $*"; }

# A new process costs the emulated machine dearly: these words are made of the shell's own.

# expand LIST: sets `expanded` to the CPUs of a list such as 0-2,8, a blank around each.
expand() {
    expanded=' '
    local IFS=, part cpu
    for part in $1; do
        cpu=${part%-*}
        while [ "$cpu" -le "${part#*-}" ]; do
            expanded="$expanded$cpu "
            cpu=$((cpu + 1))
        done
    done
}

# members LIST: the same, one a line.
members() {
    local cpu
    expand "$1"
    for cpu in $expanded; do echo "$cpu"; done
}

# within A B: whether list A is inside list B, and not empty.
within() {
    local large cpu
    [ -n "$1" ] || return 1
    expand "$2"
    large=$expanded
    expand "$1"
    for cpu in $expanded; do
        case $large in *" $cpu "*) ;; *) return 1 ;; esac
    done
}

# disjoint A B: whether no CPU is in both, and both are something.
disjoint() {
    local other cpu
    [ -n "$1" ] && [ -n "$2" ] || return 1
    expand "$2"
    other=$expanded
    expand "$1"
    for cpu in $expanded; do
        case $other in *" $cpu "*) return 1 ;; esac
    done
}

# in_one_node LIST: whether the list is inside one NUMA node.
in_one_node() {
    local node
    for node in /sys/devices/system/node/node*/cpulist; do
        # Not by `read`: busybox reads byte by byte, and the kernel gives this file in one piece only.
        within "$1" "$(cat "$node")" && return 0
    done
    return 1
}

# ask_status: sets `told` to the JSON that scripts may rely on, without blanks.
ask_status() {
    local IFS=' 
'
    told=$(pjwctl status --json) || told=
    set -f
    # shellcheck disable=SC2086 # split on purpose
    set -- $told
    set +f
    IFS=
    told="$*"
}

# value TEXT NAME: sets `value` to what the JSON has for NAME; empty if nothing.
value() {
    value=${1#*\"$2\":}
    case $value in
        "$1") value= ;;
        \"*) value=${value#\"} && value=${value%%\"*} ;;
        *) value=${value%%[,\}]*} ;;
    esac
}

# field JOB NAME: a job's value in that JSON, such as `field manual:a granted_by`.
field() {
    local rest
    ask_status
    rest=${told#*\"id\":\""$1"\"}
    [ "$rest" != "$told" ] || return 0
    value "\"id\":\"$1\"${rest%%[{\}]*}" "$2"
    [ -z "$value" ] || echo "$value"
}

# cpus JOB: what it holds.
cpus() { field "$1" cpus; }

# switch 0|1 LIST: CPUs off or on.
switch() {
    for cpu in $(members "$2"); do echo "$1" >"/sys/devices/system/cpu/cpu$cpu/online"; done
}

# is_free LIST: whether all of these are in the pool.
is_free() {
    ask_status
    value "$told" free
    within "$1" "$value"
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
masks() { all_masks "$@" | sort -u; }
all_masks() {
    local pid mask files=
    for pid in "$@"; do files="$files /proc/$pid/task/[0-9]*/status"; done
    # shellcheck disable=SC2086 # patterns on purpose
    [ -z "$files" ] || grep -hs '^Cpus_allowed_list:' $files | while read -r _ mask; do echo "$mask"; done
}

# confined LIST PID…: whether every thread of these processes is inside the list.
confined() {
    local mask found seen=' '
    list=$1
    shift
    found=$(all_masks "$@")
    [ -n "$found" ] || return 1
    for mask in $found; do
        case $seen in *" $mask "*) continue ;; esac
        seen="$seen$mask "
        within "$mask" "$list" || return 1
    done
}
