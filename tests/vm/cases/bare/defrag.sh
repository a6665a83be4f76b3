# Two jobs leave no NUMA node completely free. `pjwctl defrag` moves one of them to the node of the other. Without this
# command no job is moved.
. /cases/functions

answers() { pjwctl status --json >/dev/null 2>&1; }
stopped() { [ ! -d "/proc/$1" ] || grep -q '^State:.Z' "/proc/$1/status"; }
has_mask() { [ "$(masks "$1")" = "$2" ]; }
defrag_plan_has() { pjwctl plan --defrag | grep -q "$1"; }

pjwd 2>>/dev/ttyS0 &
daemon=$!
eventually "pjwd answers before the moves" answers || exit 1

# Of one node, `large` has three of the four cores, and `between` has the fourth for a moment. So `small` is on the other node.
sleep 1000 &
large=$!
sleep 1000 &
small=$!
pjwctl assign large --cores 3 --pid $large >&2
pjwctl assign between --cores 1 >&2
pjwctl assign small --cores 1 --pid $small >&2
pjwctl release between >&2
was=$(cpus manual:small)
check "the jobs are on two nodes" eval '! in_one_node "$(cpus manual:large),$was"'
eventually "the process of the small job is on its core" has_mask $small "$was"

check "pjwctl plan --defrag shows what the moves gain" defrag_plan_has "fits one L3: 3 now, 4 after"
check "no job is moved without a command" [ "$(cpus manual:small)" = "$was" ]
if pjwctl defrag >&2; then ok "pjwctl defrag succeeds"; else not_ok "pjwctl defrag succeeds" "exit $?"; fi
is=$(cpus manual:small)
check "the jobs are on one node" in_one_node "$(cpus manual:large),$is"
check "no CPU belongs to both jobs after the move" disjoint "$(cpus manual:large)" "$is"
eventually "the process of the moved job is on the new core" has_mask $small "$is"
check "pjwctl plan --defrag has no further move" defrag_plan_has "nothing to move"

pjwctl release --all >&2
eventually "the moved process has a mask of all CPUs after the release" has_mask $small 0-15
kill $large $small $daemon
eventually "pjwd stops after the moves" stopped $daemon
