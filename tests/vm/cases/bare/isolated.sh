# A job has a cpuset partition of its own. The partition is valid, and its CPUs belong to no other cgroup. Its removal restores
# all settings. Before Linux 6.2, a change of a cpuset resets the masks of the processes in it. pjwd restores these masks.
. /cases/functions

answers() { pjwctl status --json >/dev/null 2>&1; }
stopped() { [ ! -d "/proc/$1" ] || grep -q '^State:.Z' "/proc/$1/status"; }
has_mask() { [ "$(masks "$1")" = "$2" ]; }
top=/sys/fs/cgroup
isolated() { [ "$(cat $top/pjw-alone/cpuset.cpus.partition)" = isolated ]; }
settings() { find $top \( -name 'cpuset.*' -o -name cgroup.subtree_control \) -exec grep -H '' {} + | sort; }
is_inside() { confined "$alone_cpus" $(process_tree $alone); }
settings_are_as_before() { settings >/tmp/after; diff /tmp/before /tmp/after; }
gone() { [ ! -e $top/pjw-alone ]; }
# Each of the two shells of the job that compute is pinned to one CPU, and these differ.
each_is_pinned_alone() { found=$(for pid in $(process_tree $alone | grep -v "^$alone\$"); do masks "$pid"; done | grep -v '[-,]' | sort -u | wc -l); [ "$found" -ge 2 ]; }

taskset 8000 sleep 1000 &
outsider=$!
taskset 4000 sleep 1000 &
other=$!
eventually "the process outside all jobs has bound itself" has_mask $outsider 15
eventually "the process of job other has bound itself" has_mask $other 14
settings >/tmp/before

pjwd 2>>/dev/ttyS0 &
daemon=$!
eventually "pjwd answers before the partition is made" answers || exit 1
if pjwctl assign other --cores 1 --pid $other >&2; then ok "pjwctl assign succeeds"; else not_ok "pjwctl assign succeeds" "exit $?"; fi
# A process is bound to a CPU that the partition will get. The job `probe` has the same size, and so finds the CPU.
pjwctl assign probe --cores 2 >&2
cpu=$(each_cpu "$(cpus manual:probe)" | head -n 1)
pjwctl release probe >&2
taskset -c "$cpu" sleep 1000 &
bound=$!
# In a partition, no CPU of it could be requested any more.
eventually "the process is bound to the CPU before the partition is made" has_mask $bound "$cpu"
busy='while :; do :; done'
pjwctl run --cores 2 --isolated --job alone -- sh -c "sh -c '$busy' & sh -c '$busy' & wait" &
alone=$!
eventually "the cgroup of the isolated job is a valid partition" isolated
alone_cpus=$(cpus manual:alone)
check "the partition has the CPUs of the job" [ "$(cat $top/pjw-alone/cpuset.cpus.effective)" = "$alone_cpus" ]
check "the CPU of the bound process is one of them" within "$cpu" "$alone_cpus"
check "the bound process has no CPU of the partition in its mask" disjoint "$(masks $bound)" "$alone_cpus"
check "the root cgroup has no CPU of the partition" disjoint "$(cat $top/cpuset.cpus.effective)" "$alone_cpus"
eventually "each running thread in the partition is pinned to a CPU of its own" each_is_pinned_alone
# pjwctl starts the command after 5 s even if the partition is not complete.
eventually "every thread of the isolated job is inside the partition" is_inside
eventually "the process of job other is on its cores" confined "$(cpus manual:other)" $other
figure "the mask of the process that was bound to CPU 15 is now $(masks $outsider)"

kill -9 $(process_tree $alone)
eventually "the partition is removed after the end of the job" gone
eventually "the bound process has its mask of one CPU again" has_mask $bound "$cpu"
eventually "the process of job other is still on its cores" confined "$(cpus manual:other)" $other
if pjwctl release --all >&2; then ok "pjwctl release --all succeeds"; else not_ok "pjwctl release --all succeeds" "exit $?"; fi
eventually "the process of job other has its original mask" has_mask $other 14
eventually "the process outside all jobs has its original mask" has_mask $outsider 15
eventually "a process without a mask of its own has all CPUs" has_mask $$ 0-15
# A release is answered after 5 s even if a cgroup is not removed yet.
eventually "all cpuset settings are as before the release" settings_are_as_before
kill $daemon
eventually "pjwd stops after the partition" stopped $daemon
check "all cpuset settings are as before the partition" settings_are_as_before
kill $other $outsider $bound
wait $other $outsider $bound $alone 2>/dev/null || true
