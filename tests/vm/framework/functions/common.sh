# Functions for the cases on both machines. They run in busybox's shell and in bash. Cases begin with `. /cases/functions`.
# That file is this one. On the Debian machine it is followed by debian.sh.

# ok NAME, not_ok NAME REASON: writes the result of one check, as one line.
ok() { echo "ok $1"; }
not_ok() { echo "not ok $1: $2"; }

# check NAME COMMAND…: passes if the command succeeds now. The output of the command goes to standard error.
check() {
    name=$1
    shift
    if "$@" >&2; then ok "$name"; else not_ok "$name" "false: $*"; fi
}

# prints_nothing COMMAND…: whether the command succeeds and prints nothing. A command that fails does not count.
prints_nothing() {
    local printed
    printed=$("$@") && [ -z "$printed" ]
}

# eventually NAME COMMAND…: passes as soon as the command succeeds. Fails if it does not succeed within time_limit seconds
# (90 by default). The limit is long because the guest is emulated, and its 16 CPUs may run on two CPUs of the host. The time is
# the time since the boot: no program has to be started to read it, and it stays right if a case sets the clock.
eventually() {
    name=$1
    shift
    read -r deadline _ </proc/uptime
    deadline=$((${deadline%.*} + ${time_limit:-90}))
    until "$@" >&2; do
        read -r uptime _ </proc/uptime
        if [ "${uptime%.*}" -gt $deadline ]; then
            not_ok "$name" "still false after ${time_limit:-90} s: $*"
            return 1
        fi
        sleep 0.2
    done
    ok "$name"
}

# figure TEXT: prints a measurement, which is not checked.
figure() { echo "# $*"; }

# Starting a process is slow on the emulated machine. So the following functions use builtins of the shell where possible.

# expand LIST: sets `expanded` to the CPUs of a list such as 0-2,8. Each CPU has a blank before and after it.
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

# each_cpu LIST: prints the CPUs of the list, one on each line.
each_cpu() {
    local cpu
    expand "$1"
    for cpu in $expanded; do echo "$cpu"; done
}

# within A B: whether list A is not empty and has only CPUs of list B.
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

# disjoint A B: whether no CPU is in both lists, and neither list is empty.
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

# in_one_node LIST: whether all CPUs of the list are in one NUMA node.
in_one_node() {
    local node
    for node in /sys/devices/system/node/node*/cpulist; do
        # `read` cannot be used: busybox reads one byte at a time, and the kernel returns this file only to a single read.
        within "$1" "$(cat "$node")" && return 0
    done
    return 1
}

# read_status: sets `status_json` to the output of `pjwctl status --json`, without blanks.
read_status() {
    local IFS=' 
'
    status_json=$(pjwctl status --json) || status_json=
    set -f
    # shellcheck disable=SC2086 # split on purpose
    set -- $status_json
    set +f
    IFS=
    status_json="$*"
}

# value JSON NAME: sets `value` to the first value of NAME in the JSON text. It is empty if there is no such name.
value() {
    value=${1#*\"$2\":}
    case $value in
        "$1") value= ;;
        \"*) value=${value#\"} && value=${value%%\"*} ;;
        *) value=${value%%[,\}]*} ;;
    esac
}

# field JOB NAME: prints a value of the job in the status, such as `field manual:a granted_by`.
field() {
    local rest
    read_status
    rest=${status_json#*\"id\":\""$1"\"}
    [ "$rest" != "$status_json" ] || return 0
    value "\"id\":\"$1\"${rest%%[{\}]*}" "$2"
    [ -z "$value" ] || echo "$value"
}

# cpus JOB: prints the CPUs that the job holds.
cpus() { field "$1" cpus; }

# is_by_cpuset JOB: whether a cpuset confines the job. Masks do until the kernel or systemd has made a change of a cpuset, which may
# take longer than a cycle, and until a scan has found all processes of the job in the cpuset.
is_by_cpuset() { [ "$(field "$1" enforcement)" = cpuset ]; }

# set_online 0|1 LIST: takes the CPUs of the list offline (0) or online (1).
set_online() {
    for cpu in $(each_cpu "$2"); do echo "$1" >"/sys/devices/system/cpu/cpu$cpu/online"; done
}

# is_free LIST: whether all CPUs of the list are free.
is_free() {
    read_status
    value "$status_json" free
    within "$1" "$value"
}

# holds_none_of JOB LIST: whether the job holds cores, but no CPU of the list.
holds_none_of() {
    now=$(cpus "$1")
    [ -n "$now" ] && disjoint "$now" "$2"
}

# holds JOB: whether the job holds cores.
holds() {
    [ -n "$(cpus "$1")" ]
}

# process_tree PID: prints the pids of the process and of all its descendants.
process_tree() {
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

# masks PID…: prints the affinity masks of all threads of these processes. Equal masks are printed once.
masks() { all_masks "$@" | sort -u; }
all_masks() {
    local pid mask files=
    for pid in "$@"; do files="$files /proc/$pid/task/[0-9]*/status"; done
    # shellcheck disable=SC2086 # patterns on purpose
    [ -z "$files" ] || grep -hs '^Cpus_allowed_list:' $files | while read -r _ mask; do echo "$mask"; done
}

# confined LIST PID…: whether the mask of each thread of these processes has only CPUs of the list.
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
