# Walls on a machine without systemd: a cgroup of the warden's own for each job. Nothing a job does leads out of it,
# whether the warden runs or not; CPUs go off and come back under it; all of it is undone.
. /cases/functions

answers() { pjwctl status --json >/dev/null 2>&1; }
stopped() { [ ! -d "/proc/$1" ] || grep -q '^State:.Z' "/proc/$1/status"; }
grew() { [ "$(family "$1" | wc -l)" -ge "$2" ]; }
is_jailed() { confined "$(cpus "$1")" $(family "$2"); }
has_mask() { [ "$(masks "$1")" = "$2" ]; }
bound() { for pid in $(family $a); do [ "$(masks "$pid")" = "${a_cpus%%[-,]*}" ] && echo "$pid"; done; }
has_bound() { [ -n "$(bound)" ]; }
top=/sys/fs/cgroup
wall_is() { [ "$(cat $top/pjw/"$1"/cpuset.cpus)" = "$2" ] && [ "$(cat $top/pjw/"$1"/cpuset.cpus.effective)" = "$2" ]; }
wall_fits() { wall_is "$1" "$(cpus "manual:$1")"; }
in_wall() { grep -qx "0::/pjw/$1" "/proc/$2/cgroup"; }
mask_after() { taskset -p ffff "$1" >/dev/null; masks "$1"; }
dump() {
    find $top \( -name 'cpuset.*' -o -name cgroup.subtree_control -o -name cgroup.procs \) | sort | while read -r file; do
        case $file in *cgroup.procs) echo "$file";; *) echo "$file $(cat "$file" 2>/dev/null)";; esac
    done
    # Not the bystander: this kernel wipes its mask when any core of its cgroup goes off.
    for pid in $guest; do echo "$pid $(masks "$pid") $(cat "/proc/$pid/cgroup")"; done
}

taskset 8 sleep 1000 &
guest=$!
taskset 10 sleep 1000 &
bystander=$!
mkdir $top/night && echo $guest >$top/night/cgroup.procs && echo $bystander >$top/night/cgroup.procs
dump >/tmp/before

pjwd 2>>/dev/ttyS0 &
warden=$!
eventually "the daemon answers beside walls" answers || exit 1
pjwctl run --cores 2 --job a -- sh -c 'sleep 1000 & setsid sh -c "sleep 1000 & sleep 1000" & taskset -c ${PJW_CPUS%%[-,]*} sleep 1000 & wait' &
a=$!
pjwctl run --cores 3 --job b --bind-memory -- sh -c 'sleep 1000 & wait' &
b=$!
eventually "job a is behind a wall" wall_fits a
eventually "job b is behind a wall" wall_fits b
eventually "job a has all its processes" grew $a 5
a_cpus=$(cpus manual:a)
check "job a is kept by a cpuset" [ "$(field manual:a enforcement)" = cpuset ]
check "who has no part in it has its own mask" has_mask $bystander 4
check "no CPU belongs to both jobs" disjoint "$a_cpus" "$(cpus manual:b)"
check "job a's processes are in it" in_wall a "$(family $a | tail -n 1)"
eventually "every thread is inside" is_jailed manual:a $a
node=$(for at in 0 1; do within "$(cpus manual:b)" "$(cat /sys/devices/system/node/node$at/cpulist)" && echo $at; done)
check "job b's memory is its node's" [ "$(cat $top/pjw/b/cpuset.mems.effective)" = "$node" ]
if pjwctl assign guest --cores 1 --pid $guest >&2; then ok "a process in a cgroup of its own is assigned"; else not_ok "a process in a cgroup of its own is assigned" "exit $?"; fi
eventually "it is behind a wall too" in_wall guest $guest
eventually "and inside" confined "$(cpus manual:guest)" $guest

# Masks of all CPUs are cut to the wall's, in the same moment, with a warden and beside one that hangs.
eventually "one of job a's processes has bound itself" has_bound
bound=$(bound)
rebel=$(family $a | grep -vx "$bound" | tail -n 1)
check "who asks for all CPUs gets the wall's" within "$(mask_after "$rebel")" "$a_cpus"
kill -STOP $warden
check "also while the warden hangs" within "$(mask_after "$rebel")" "$a_cpus"
check "everybody is where they were" confined "$a_cpus" $(family $a)
kill -CONT $warden
# Root may move its own out of the wall.
# A rescan finds an idle process that was moved. One of eight rescans reads all processes: at most 80 s.
echo "$rebel" >$top/cgroup.procs
time_limit=100
eventually "who was moved out is fetched back" in_wall a "$rebel"
time_limit=60
# Before Linux 6.2 a mask that is first seen while a PU of it is off comes back without that PU.
check "the warden has seen it there" eval 'pjwctl reload >&2'

# The core of nobody's mask, and not CPU 0's: off and on again. The kernel forgets masks with each change of a cpuset.
was=$(masks "$bound")
core=$(cat "/sys/devices/system/cpu/cpu$(members "$a_cpus" | tail -n 1)/topology/thread_siblings_list")
switch 0 "$core"
eventually "job a has no core that is off" holds_none_of manual:a "$core"
a_cpus=$(cpus manual:a)
check "but as many as before" [ "$(members "$a_cpus" | wc -l)" = 4 ]
eventually "its wall went along" wall_is a "$a_cpus"
eventually "its threads too" is_jailed manual:a $a
eventually "who had bound itself is bound as before" has_mask "$bound" "$was"
switch 1 "$core"
eventually "the core that is back behind no wall is free" is_free "$core"
check "the wall stays" wall_is a "$a_cpus"
eventually "the binding stays" has_mask "$bound" "$was"

# The daemon dies: walls stand. The next one undoes them all.
kill -9 $warden
check "walls need no daemon" wall_is a "$a_cpus"
if pjwd --release-all >&2; then ok "everything is put back without a daemon"; else not_ok "everything is put back without a daemon" "exit $?"; fi
check "job a may run anywhere" has_mask $a 0-15
kill -9 $(family $a) $(family $b)
wait $a $b $warden 2>/dev/null
dump >/tmp/after
check "every cpuset, cgroup and mask is as before" diff /tmp/before /tmp/after
kill $guest $bystander
wait $guest $bystander 2>/dev/null
rmdir $top/night
