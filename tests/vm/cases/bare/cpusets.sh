# Cpusets on a machine without systemd: pjwd makes a cgroup for each job. A process of the job cannot leave it by a change of its
# mask, whether pjwd runs or not. CPUs of the job go offline and online. `pjwd --release-all` restores everything.
. /cases/functions

answers() { pjwctl status --json >/dev/null 2>&1; }
stopped() { [ ! -d "/proc/$1" ] || grep -q '^State:.Z' "/proc/$1/status"; }
has_processes() { [ "$(process_tree "$1" | wc -l)" -ge "$2" ]; }
is_confined() { confined "$(cpus "$1")" $(process_tree "$2"); }
has_mask() { [ "$(masks "$1")" = "$2" ]; }
# Prints the process of job a that binds itself. Its mask does not tell: a shell that computes is pinned to one CPU for a moment, too.
bound() { for pid in $(process_tree $a); do [ "$(tr '\0' ' ' <"/proc/$pid/cmdline")" = 'sleep 1001 ' ] && echo "$pid"; done 2>/dev/null; }
has_bound() { bound=$(bound); [ -n "$bound" ] && has_mask "$bound" "${a_cpus%%[-,]*}"; }
top=/sys/fs/cgroup
cgroup_has() { [ "$(cat $top/pjw/"$1"/cpuset.cpus)" = "$2" ] && [ "$(cat $top/pjw/"$1"/cpuset.cpus.effective)" = "$2" ]; }
cgroup_has_cpus_of_job() { cgroup_has "$1" "$(cpus "manual:$1")"; }
in_cgroup() { grep -qx "0::/pjw/$1" "/proc/$2/cgroup"; }
mask_after() { taskset -p ffff "$1" >/dev/null; masks "$1"; }
dump() {
    find $top \( -name 'cpuset.*' -o -name cgroup.subtree_control -o -name cgroup.procs \) | sort | while read -r file; do
        case $file in *cgroup.procs) echo "$file";; *) echo "$file $(cat "$file" 2>/dev/null)";; esac
    done
    # Without the outsider: before Linux 6.2 the kernel resets its mask when a core of its cgroup goes offline.
    for pid in $assigned; do echo "$pid $(masks "$pid") $(cat "/proc/$pid/cgroup")"; done
}

taskset 8 sleep 1000 &
assigned=$!
taskset 10 sleep 1000 &
outsider=$!
mkdir $top/night && echo $assigned >$top/night/cgroup.procs && echo $outsider >$top/night/cgroup.procs
eventually "the process that will be assigned has its own mask" has_mask $assigned 3
eventually "the process outside all jobs has its own mask before pjwd runs" has_mask $outsider 4
dump >/tmp/before

# One of eight rescans reads all processes.
echo 'rescan_interval = "2s"' >/tmp/cpusets.toml
pjwd --config /tmp/cpusets.toml 2>>/dev/ttyS0 &
daemon=$!
eventually "pjwd answers before any cpuset is made" answers || exit 1
pjwctl run --cores 2 --job a -- sh -c 'sleep 1000 & setsid sh -c "sleep 1000 & sleep 1000" & taskset -c ${PJW_CPUS%%[-,]*} sleep 1001 & wait' &
a=$!
pjwctl run --cores 3 --job b --bind-memory -- sh -c 'sleep 1000 & wait' &
b=$!
eventually "the cgroup of job a has the CPUs of the job" cgroup_has_cpus_of_job a
eventually "the cgroup of job b has the CPUs of the job" cgroup_has_cpus_of_job b
eventually "job a has all its processes" has_processes $a 5
a_cpus=$(cpus manual:a)
eventually "job a is confined by a cpuset" is_by_cpuset manual:a
check "a process outside all jobs has its own mask" has_mask $outsider 4
check "no CPU belongs to both jobs" disjoint "$a_cpus" "$(cpus manual:b)"
check "a process of job a is in the cgroup of the job" in_cgroup a "$(process_tree $a | tail -n 1)"
eventually "every thread of job a is on its cores" is_confined manual:a $a
node=$(for at in 0 1; do within "$(cpus manual:b)" "$(cat /sys/devices/system/node/node$at/cpulist)" && echo $at; done)
check "the memory of job b is limited to its NUMA node" [ "$(cat $top/pjw/b/cpuset.mems.effective)" = "$node" ]
if pjwctl assign assigned --cores 1 --pid $assigned >&2; then ok "pjwctl assign of a process in a cgroup of its own succeeds"; else not_ok "pjwctl assign of a process in a cgroup of its own succeeds" "exit $?"; fi
eventually "the assigned process is in the cgroup of its job" in_cgroup assigned $assigned
eventually "the assigned process is on the cores of its job" confined "$(cpus manual:assigned)" $assigned

# The kernel limits a requested mask of all CPUs to the cpuset at once, while pjwd runs and while it is stopped by SIGSTOP.
eventually "a process of job a has bound itself to one CPU" has_bound
member=$(process_tree $a | grep -vx "$bound" | tail -n 1)
check "a process that requests all CPUs gets those of the cpuset" within "$(mask_after "$member")" "$a_cpus"
kill -STOP $daemon
check "it gets those of the cpuset while pjwd is stopped, too" within "$(mask_after "$member")" "$a_cpus"
check "every thread of job a is on its cores while pjwd is stopped" confined "$a_cpus" $(process_tree $a)
kill -CONT $daemon
# Root can move a process out of the cgroup. The rescan that reads all processes finds an idle process that was moved.
echo "$member" >$top/cgroup.procs
eventually "a process that was moved out of the cgroup is moved back" in_cgroup a "$member"
# Before Linux 6.2, a mask that pjwd reads first while a PU of it is offline is restored without that PU. So pjwd reads it now.
check "pjwctl reload makes pjwd read the masks" eval 'pjwctl reload >&2'

# A core that is in no process's own mask, and is not that of CPU 0, goes offline and online. Each change of a cpuset resets
# masks, before Linux 6.2.
was=${a_cpus%%[-,]*}
core=$(cat "/sys/devices/system/cpu/cpu$(each_cpu "$a_cpus" | tail -n 1)/topology/thread_siblings_list")
set_online 0 "$core"
eventually "job a holds no CPU that is offline" holds_none_of manual:a "$core"
a_cpus=$(cpus manual:a)
check "job a has as many CPUs as before" [ "$(each_cpu "$a_cpus" | wc -l)" = 4 ]
eventually "the cgroup of job a has the new CPUs" cgroup_has a "$a_cpus"
eventually "every thread of job a is on its new cores" is_confined manual:a $a
eventually "the process that bound itself has its mask again" has_mask "$bound" "$was"
set_online 1 "$core"
eventually "the core is free when it is online again" is_free "$core"
check "the cgroup of job a keeps its CPUs" cgroup_has a "$a_cpus"
eventually "the process that bound itself keeps its mask" has_mask "$bound" "$was"

# The daemon is killed. The cgroups stay until `pjwd --release-all` removes them. It is refused while the daemon has not ended.
kill -9 $daemon
wait $daemon 2>/dev/null
check "the cgroup of job a stays without pjwd" cgroup_has a "$a_cpus"
if pjwd --release-all >&2; then ok "pjwd --release-all succeeds"; else not_ok "pjwd --release-all succeeds" "exit $?"; fi
check "a process of job a may run on all CPUs after that" has_mask $a 0-15
kill -9 $(process_tree $a) $(process_tree $b)
wait $a $b $daemon 2>/dev/null
dump >/tmp/after
check "all cpusets, cgroups and masks are as before" diff /tmp/before /tmp/after
kill $assigned $outsider
wait $assigned $outsider 2>/dev/null
rmdir $top/night
