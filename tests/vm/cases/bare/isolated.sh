# A partition of its own for a job: valid, off limits for everybody else, and undone without a trace. The kernel wipes the
# masks of everybody whose cpuset changes with that; they are as before.
. /cases/functions

answers() { pjwctl status --json >/dev/null 2>&1; }
stopped() { [ ! -d "/proc/$1" ] || grep -q '^State:.Z' "/proc/$1/status"; }
has_mask() { [ "$(masks "$1")" = "$2" ]; }
top=/sys/fs/cgroup
isolated() { [ "$(cat $top/pjw-alone/cpuset.cpus.partition)" = isolated ]; }
settings() { find $top \( -name 'cpuset.*' -o -name cgroup.subtree_control \) -exec grep -H '' {} + | sort; }
gone() { [ ! -e $top/pjw-alone ]; }
# Each of a job's two shells that compute has one CPU, and another.
each_has_its_own() { found=$(for pid in $(family $alone | grep -v "^$alone\$"); do masks "$pid"; done | grep -v '[-,]' | sort -u | wc -l); [ "$found" -ge 2 ]; }

taskset 8000 sleep 1000 &
bystander=$!
taskset 4000 sleep 1000 &
guest=$!
settings >/tmp/before

pjwd 2>>/dev/ttyS0 &
warden=$!
eventually "the daemon answers beside a partition" answers || exit 1
if pjwctl assign guest --cores 1 --pid $guest >&2; then ok "somebody is assigned"; else not_ok "somebody is assigned" "exit $?"; fi
# Who is bound to a CPU that the partition takes: its place is found by a job that is to have it first.
pjwctl assign scout --cores 2 >&2
cpu=$(members "$(cpus manual:scout)" | head -n 1)
pjwctl release scout >&2
taskset -c "$cpu" sleep 1000 &
resident=$!
busy='while :; do :; done'
pjwctl run --cores 2 --isolated --job alone -- sh -c "sh -c '$busy' & sh -c '$busy' & wait" &
alone=$!
eventually "a job has a partition of its own" isolated
alone_cpus=$(cpus manual:alone)
check "with its cores" [ "$(cat $top/pjw-alone/cpuset.cpus.effective)" = "$alone_cpus" ]
check "among them that of a process that was bound there" within "$cpu" "$alone_cpus"
check "which runs elsewhere now" disjoint "$(masks $resident)" "$alone_cpus"
check "which are nobody else's" disjoint "$(cat $top/cpuset.cpus.effective)" "$alone_cpus"
eventually "threads that run are pinned there, each to its own CPU" each_has_its_own
check "all are inside" confined "$alone_cpus" $(family $alone)
eventually "the guest is inside its cores" confined "$(cpus manual:guest)" $guest
figure "the bystander's mask of CPU 15 is now $(masks $bystander)"

kill -9 $(family $alone)
eventually "with its end the partition is gone" gone
eventually "who was bound to a CPU of it is bound again" has_mask $resident "$cpu"
eventually "the guest is still on its cores" confined "$(cpus manual:guest)" $guest
if pjwctl release --all >&2; then ok "the isolated job and the guest are released"; else not_ok "the isolated job and the guest are released" "exit $?"; fi
eventually "the guest has its mask again" has_mask $guest 14
eventually "the bystander has its mask" has_mask $bystander 15
check "who was bound to nothing has all CPUs" has_mask $$ 0-15
kill $warden
eventually "the daemon stops after the partition" stopped $warden
settings >/tmp/after
check "every cpuset is as before the partition" diff /tmp/before /tmp/after
kill $guest $bystander $resident
wait $guest $bystander $resident $alone 2>/dev/null || true
