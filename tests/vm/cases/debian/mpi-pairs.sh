# Two MPI runs with four ranks each, started at the same time. Their mpirun commands bind the ranks of both to the first PUs of the
# machine, which they share. With pjwd each run has PUs of its own, and its ranks wait for a PU no longer than without the other
# run. Wall-clock times mean nothing when 16 emulated CPUs run on two CPUs of the host. So the check compares what the kernel of
# the guest counts for each rank: its run time, and its wait time for a PU (schedstat).
# alone
. /cases/functions

# Each rank stops itself first: if all PUs compute, the next run starts slowly.
printf '#!/bin/bash\nkill -STOP $$\nwhile :; do :; done\n' >/tmp/rank
chmod +x /tmp/rank
ranks() { pgrep -u "$1" -f '^/bin/bash /tmp/rank'; }
four_ranks_are_stopped() {
    local pid count=0
    for pid in $(ranks "$1"); do ! is_in_state T "$pid" || count=$((count + 1)); done
    [ "$count" = 4 ]
}
# measure PERIODS USER...: lets the ranks of these users run for this number of periods of 2 s, and stops them. Sets the
# array `waits`. It has one number for each user, in the order of the arguments: the wait time of the ranks, in permille
# of the sum of their run time and wait time. The number is the median of the periods. The ranks are looked up first:
# while they compute, other programs are slow.
measure() {
    local user at run pids=() times=() periods=$1
    shift
    for user in "$@"; do pids+=("$(ranks "$user")"); done
    read_times
    kill -CONT ${pids[*]}
    for ((at = 0; at < periods; at++)); do
        sleep 2
        read_times
    done
    kill -STOP ${pids[*]}
    waits=()
    for ((run = 0; run < $#; run++)); do
        waits+=("$(for ((at = run; at < periods * $#; at += $#)); do sched_difference "${times[at]}" "${times[at + $#]}"; done |
            cut -d ' ' -f 2 | sort -n | sed -n "$(((periods + 1) / 2))p")")
    done
}
# read_times: reads the run time and the wait time of the ranks of each user, and adds them to the array `times` of
# measure.
read_times() { local of_user; for of_user in "${pids[@]}"; do times+=("$(sched_times $of_user)"); done; }
# takes_at_most_1_05 ALONE BESIDE: whether a run takes at most 1.05 of its time alone. Its ranks wait for ALONE permille
# of the time if no other run is there, and for BESIDE permille of the time beside another run.
takes_at_most_1_05() { [ $((1000 * (1000 - $1))) -le $((1050 * (1000 - $2))) ]; }
# end USER...: kills all ranks of these users.
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
    eventually "$way: the first run has its ranks" four_ranks_are_stopped alice
    eventually "$way: the second run has its ranks" four_ranks_are_stopped bob
    measure 1 alice
    alone=$waits
    measure 1 alice bob
    figure "$way, without pjwd: the ranks wait for $alone permille of the time alone, and for $waits with the second run"
    check "$way: without pjwd the runs share PUs" [ "$waits" -ge 200 ]
    end alice bob
done

start_pjw 'user_max_cores = 4'
for way in 'Open MPI' MPICH 'Open MPI by default'; do
    command=$(start "$way")
    as alice pjwctl run --cores 4 --job first -- $command >&2 &
    as bob pjwctl run --cores 4 --job second -- $command >&2 &
    eventually "$way: the first job has its ranks" four_ranks_are_stopped alice
    eventually "$way: the second job has its ranks" four_ranks_are_stopped bob
    check "$way: no PU belongs to both jobs" disjoint "$(cpus manual:first)" "$(cpus manual:second)"
    eventually "$way: the ranks of the first job are on its cores" confined "$(cpus manual:first)" $(ranks alice)
    eventually "$way: the ranks of the second job are on its cores" confined "$(cpus manual:second)" $(ranks bob)
    measure 1 alice
    alone=$waits
    measure 1 bob
    second_alone=$waits
    # A CPU of the host may stand still for a second while it emulates a PU for which a rank waits. So two of five periods do not
    # count. Ranks that share a PU wait in each of them.
    measure 5 alice bob
    figure "$way, with pjwd: the ranks wait for $alone permille of the time alone, and for ${waits[0]} with the second run;" \
        "those of the second run for $second_alone and ${waits[1]}"
    check "$way: with pjwd a run takes at most 1.05 of its time alone" takes_at_most_1_05 "$alone" "${waits[0]}"
    check "$way: with pjwd the second run takes at most 1.05 of its time alone" takes_at_most_1_05 "$second_alone" "${waits[1]}"
    end alice bob
    eventually "$way: all cores are free after the jobs" is_free 0-15
done
