# Four ranks are all bound to the two hardware threads of one core, as two runs of a launcher bind them. pjwd lets them use both
# cores of their job. A rank that is alone on the core to which it is bound stays there. A release restores every mask.
. /cases/functions

answers() { pjwctl status --json >/dev/null 2>&1; }
stopped() { [ ! -d "/proc/$1" ] || grep -q '^State:.Z' "/proc/$1/status"; }
# Prints the shells of a job that compute: all processes except the first.
ranks() { process_tree "$1" | grep -vx "$1"; }
masks_of_ranks() { for pid in $(ranks "$1"); do masks "$pid"; done | sort | tr '\n' ' '; }
run_on() { [ "$(ranks "$1" | wc -l)" = "$2" ] && [ "$(masks_of_ranks "$1")" = "$3" ]; }
# Sums the threads in the events that report repairs of the job. Ranks that begin to compute at different times may be
# reported by several events.
repaired() {
    pjwctl events --json | grep '"repaired"' | grep "\"$1\"" | sed 's/.*"\([0-9]*\) threads* bound to.*/\1/' \
        | awk '{ sum += $1 } END { print sum + 0 }'
}
is_explained() { pjwctl explain "$1" --json | grep -q "too many running threads were bound to its own CPUs $2"; }

pjwd 2>>/dev/ttyS0 &
daemon=$!
eventually "pjwd answers" answers || exit 1

busy='while :; do :; done'
pjwctl run --cores 2 --job ranks -- sh -c "core=\$(echo \$PJW_CPUS | cut -d- -f1)
core=\$core-\$((core + 1))
for rank in 1 2 3 4; do taskset -c \$core sh -c '$busy' & done
wait" &
ranks=$!
pjwctl run --cores 2 --job bound -- sh -c "core=\$(echo \$PJW_CPUS | cut -d- -f1)
taskset -c \$core-\$((core + 1)) sh -c '$busy' &
taskset -c \$((core + 2))-\$((core + 3)) sh -c '$busy' &
wait" &
bound=$!
eventually "the job of four ranks holds two cores" holds manual:ranks
eventually "the job of two ranks holds two cores" holds manual:bound
first=$(cpus manual:ranks)
first=${first%-*}
core=$first-$((first + 1))
other=$(cpus manual:bound)
other=${other%-*}
masks_of_bound="$other-$((other + 1)) $((other + 2))-$((other + 3)) "
both_compute() { [ "$(field manual:bound hot)" = 2 ]; }
eventually "ranks that are alone on their core have bound themselves" run_on $bound 2 "$masks_of_bound"
eventually "ranks that are alone on their core compute" both_compute
eventually "two of four ranks bound to one core are pinned to the PUs of the other core" \
    run_on $ranks 4 "$core $core $((first + 2)) $((first + 3)) "
moved=$(for pid in $(ranks $ranks); do [ "$(masks "$pid")" = "$core" ] || echo "$pid"; done | head -n 1)
eventually "pjwctl explain shows why a rank was moved" is_explained "$moved" "$core"
is_repaired() { [ "$(repaired "$1")" = "$2" ]; }
eventually "each of the two moves is reported once" is_repaired manual:ranks 2
check "ranks that are alone on their core keep their masks" run_on $bound 2 "$masks_of_bound"
check "no repair of these ranks is reported" [ "$(repaired manual:bound)" = 0 ]

# The ranks are stopped and continued. The moved threads float while they are idle, and do not return to the full core. If
# both ranks of this core run again before the others, pjwd may move one of them too: the other core is idle then.
unbound() { for pid in $(ranks $ranks); do [ "$(masks "$pid")" = "$core" ] || echo "$pid"; done | wc -l; }
ranks_inside() {
    count=0
    for pid in $(ranks $ranks); do
        case $(masks "$pid") in "$1-$(($1 + 1))" | "$1" | "$(($1 + 1))") count=$((count + 1)) ;; esac
    done
    echo $count
}
is_even() { [ "$(ranks_inside $first)" = 2 ] && [ "$(ranks_inside $((first + 2)))" = 2 ]; }
kill -STOP $(ranks $ranks)
eventually "the moved ranks float while they are idle" run_on $ranks 4 "$core $core $first-$((first + 3)) $first-$((first + 3)) "
kill -CONT $(ranks $ranks)
eventually "each core has two of the ranks again when they run" is_even
each_is_reported_once() { [ "$(repaired manual:ranks)" = "$(unbound)" ]; }
eventually "pinning moved ranks again is not reported as a repair" each_is_reported_once

pjwctl release --all >&2
eventually "a release restores every mask" run_on $ranks 4 "$core $core $core $core "
kill -9 $(process_tree $ranks) $(process_tree $bound)
kill $daemon
eventually "pjwd stops" stopped $daemon
wait $ranks $bound $daemon 2>/dev/null || true
