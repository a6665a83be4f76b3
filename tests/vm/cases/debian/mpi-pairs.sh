# Two runs of MPI with four ranks each, started one beside the other. Bound by their mpirun, both take the machine's first
# PUs and share them. With pjwd each has PUs of its own, and its ranks wait for a PU no longer than beside nobody. Where two
# host CPUs play 16, no time of a program means anything: compared is what the guest's kernel counts for each rank, how long
# it ran and how long it waited for a PU (schedstat).
# alone
. /cases/functions

# A rank stops itself first: a node whose PUs all compute starts the next run slowly.
printf '#!/bin/bash\nkill -STOP $$\nwhile :; do :; done\n' >/tmp/rank
chmod +x /tmp/rank
ranks() { pgrep -u "$1" -f '^/bin/bash /tmp/rank'; }
has_four() { [ "$(cat $(printf '/proc/%s/stat ' $(ranks "$1")) | awk '$3 == "T" { n++ } END { print n + 0 }')" = 4 ]; } 2>/dev/null
# measure USER...: lets the ranks of these users run for a time, and stops them. Sets `waits`: the permille of this time that
# the ranks of the first user wait for a PU.
measure() {
    local before after user
    before=$(sched_times $(ranks "$1"))
    for user in "$@"; do kill -CONT $(ranks "$user"); done
    sleep 2
    for user in "$@"; do kill -STOP $(ranks "$user"); done
    after=$(sched_times $(ranks "$1"))
    read -r _ waits <<<"$(sched_difference "$before" "$after")"
}
# end USER...: ends all ranks.
end() { for user in "$@"; do pkill -KILL -u "$user" -f '/tmp/rank'; done; eventually "the ranks of $* have ended" all_ended "$@"; }
all_ended() { for user in "$@"; do [ -z "$(ranks "$user")" ] || return 1; done; }
open_mpi="mpirun.openmpi --oversubscribe -np 4"
start() {
    case $1 in
        'Open MPI') echo "$open_mpi --bind-to hwthread --map-by hwthread /tmp/rank" ;;
        'MPICH') echo 'mpirun.mpich -bind-to hwthread -launcher fork -np 4 /tmp/rank' ;;
        'Open MPI by default') echo "$open_mpi /tmp/rank" ;;
    esac
}

for way in 'Open MPI' MPICH; do
    command=$(start "$way")
    as alice $command >&2 &
    as bob $command >&2 &
    eventually "$way: the first run has its ranks" has_four alice
    eventually "$way: the second run has its ranks" has_four bob
    measure alice
    alone=$waits
    measure alice bob
    figure "$way, without pjwd: the ranks wait for $alone permille of the time alone, and for $waits beside the second run"
    check "$way: without pjwd the runs share PUs" [ "$waits" -ge 200 ]
    end alice bob
done

start_pjw 'user_max_cores = 4'
for way in 'Open MPI' MPICH 'Open MPI by default'; do
    command=$(start "$way")
    as alice pjwctl run --cores 4 --job first -- $command >&2 &
    as bob pjwctl run --cores 4 --job second -- $command >&2 &
    eventually "$way: the first job has its ranks" has_four alice
    eventually "$way: the second job has its ranks" has_four bob
    check "$way: the jobs have PUs of their own" disjoint "$(cpus manual:first)" "$(cpus manual:second)"
    check "$way: the ranks of the first job are on them" confined "$(cpus manual:first)" $(ranks alice)
    check "$way: the ranks of the second job are on theirs" confined "$(cpus manual:second)" $(ranks bob)
    measure alice
    alone=$waits
    measure alice bob
    figure "$way, with pjwd: the ranks wait for $alone permille of the time alone, and for $waits beside the second run"
    check "$way: with pjwd a run takes at most 1.05 of its time alone" [ $((1000 * (1000 - alone))) -le $((1050 * (1000 - waits))) ]
    end alice bob
    eventually "$way: the jobs are forgotten" is_free 0-15
done
