# Two jobs that leave no NUMA node whole come together when the administrator asks, and not before.
. /cases/functions

answers() { pjwctl status --json >/dev/null 2>&1; }
stopped() { [ ! -d "/proc/$1" ] || grep -q '^State:.Z' "/proc/$1/status"; }
has_mask() { [ "$(masks "$1")" = "$2" ]; }
says() { pjwctl plan --defrag | grep -q "$1"; }

pjwd 2>>/dev/ttyS0 &
warden=$!
eventually "the daemon answers again" answers || exit 1

# Three cores of the four of a node, the fourth for a moment, and one of the other node.
sleep 1000 &
large=$!
sleep 1000 &
small=$!
pjwctl assign large --cores 3 --pid $large >&2
pjwctl assign between --cores 1 >&2
pjwctl assign small --cores 1 --pid $small >&2
pjwctl release between >&2
was=$(cpus manual:small)
check "the jobs lie on two nodes" eval '! in_one_node "$(cpus manual:large),$was"'
eventually "the small job's process is on its core" has_mask $small "$was"

check "the plan says what would be won" says "fits one L3: 3 now, 4 after"
check "nothing moves by itself" [ "$(cpus manual:small)" = "$was" ]
if pjwctl defrag >&2; then ok "the moves are done"; else not_ok "the moves are done" "exit $?"; fi
is=$(cpus manual:small)
check "the jobs lie on one node" in_one_node "$(cpus manual:large),$is"
check "no CPU belongs to both after the move" disjoint "$(cpus manual:large)" "$is"
check "its process went along at once" has_mask $small "$is"
check "there is nothing more to move" says "nothing to move"

pjwctl release --all >&2
eventually "the moved process may run anywhere again" has_mask $small 0-15
kill $large $small $warden
eventually "the daemon stops after the moves" stopped $warden
