# Both kinds of MPI bind their ranks to the machine's first core, whatever mask they inherit. Behind a wall they can't:
# they are inside from their first instruction. With masks alone they are put back.
# first
. /cases/words

rank() { pgrep -u alice -f "^[^ ]*sleep $1\$"; }
runs() { [ -n "$(rank "$1")" ]; }
rank_is_on() { local pids; pids=$(rank "$1"); [ -n "$pids" ] && confined "$2" $pids; }
has_mask() { [ "$(masks $(rank "$1"))" = "$2" ]; }
# speaking N: a rank that writes down the mask it begins with and is `sleep N` then.
speaking() { echo "grep Cpus_allowed_list /proc/self/status | cut -f2 >/tmp/began.$1; exec sleep $1"; }
began_on() { within "$(cat "/tmp/began.$1")" "$2"; }
pair() {
    as alice pjwctl run --cores 2 --job "ompi$1" -- mpirun.openmpi --oversubscribe -np 1 sh -c "$(speaking "$1"5)" >&2 &
    as alice pjwctl run --cores 2 --job "mpich$1" -- mpirun.mpich -bind-to core -launcher fork -np 1 sh -c "$(speaking "$1"6)" >&2 &
}

# Without the warden: the reason for this case.
as alice taskset -c 4 mpirun.openmpi -np 1 sleep 7001 >&2 &
as alice taskset -c 4 mpirun.mpich -bind-to core -np 1 sleep 7002 >&2 &
eventually "Open MPI's rank runs" runs 7001
eventually "and has left the mask it was given" has_mask 7001 0-1
eventually "MPICH's rank runs" runs 7002
eventually "and has left the mask it was given" has_mask 7002 0-1
pkill -u alice sleep

start_pjw 'user_max_cores = 4'
sleep 1000 &
pjwctl assign first --cores 2 --pid $! >&2
job=$(submit alice -n4 <<END
mpirun.openmpi --oversubscribe -np 1 sleep 7003 &
mpirun.mpich -bind-to core -launcher fork -np 1 sleep 7004 &
wait
END
)
pair 700
eventually "the job holds cores" holds "slurm:$job"
grant=$(cpus "slurm:$job")
check "not the first ones" disjoint "$grant" 0-3
for number in 3 4; do
    eventually "rank $number runs in the job" runs 700$number
    eventually "it is on the job's cores" rank_is_on 700$number "$grant"
done
eventually "and all else of the job" job_is_jailed "$job"
for each in ompi700:7005 mpich700:7006; do
    number=${each#*:} which=${each%:*}
    eventually "the rank of $which runs" runs "$number"
    check "it began inside" began_on "$number" "$(cpus "manual:$which")"
    check "and is inside" rank_is_on "$number" "$(cpus "manual:$which")"
    check "which isn't the first core" disjoint "$(cpus "manual:$which")" 0-3
    check "by a cpuset" [ "$(field "manual:$which" enforcement)" = cpuset ]
done
pkill -u alice sleep
scancel "$job"
eventually "the job is forgotten" forgot "slurm:$job"
eventually "so are the commands" is_free 4-15

printf '%s\n' 'enforcement = "affinity"' 'user_max_cores = 4' >/etc/pjw/pjwd.toml
check "the warden is told to use masks" pjwctl reload
pair 800
for each in ompi800:8005 mpich800:8006; do
    number=${each#*:} which=${each%:*}
    eventually "the rank of $which runs with masks" runs "$number"
    eventually "it is put on the job's cores" rank_is_on "$number" "$(cpus "manual:$which")"
    check "by masks" [ "$(field "manual:$which" enforcement)" = affinity ]
done
