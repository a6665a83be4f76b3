# Open MPI and MPICH bind their ranks to the first core of the machine, whatever mask the ranks inherit. In a cpuset they cannot: the
# ranks are on the cores of the job from their first instruction. With enforcement by masks, pjwd moves them to these cores.
. /cases/functions

rank_pids() { pgrep -u alice -f "^[^ ]*sleep $1\$"; }
rank_runs() { [ -n "$(rank_pids "$1")" ]; }
rank_is_on() { local pids; pids=$(rank_pids "$1"); [ -n "$pids" ] && confined "$2" $pids; }
has_mask() { [ "$(masks $(rank_pids "$1"))" = "$2" ]; }
# Rank N reads its own mask until it is inside the cores of its job. It writes the first mask, the last one, and the milliseconds
# between its fork and the last reading. Then it executes `sleep N`.
cat >/tmp/rank <<'END'
#!/bin/bash
. /cases/functions
read_mask() { while read -r name value; do [ "$name" != Cpus_allowed_list: ] || mask=$value; done </proc/$$/status; }
read_mask
began=$mask
read -r -a stat </proc/$$/stat
until within "$mask" "$PJW_CPUS"; do read_mask; done
read -r to rest </proc/uptime
echo "$began $mask $(((10#${to/./} - stat[21]) * 10))" >/tmp/began.$1
exec sleep "$1"
END
chmod +x /tmp/rank
read_report() { read -r began ended milliseconds <"/tmp/began.$1"; }
# The commands of both jobs wait for /tmp/begin. A job starts on masks, because systemd may take long to make its scope.
start_pair() {
    local begin='until [ -e /tmp/begin ]; do sleep 0.1; done; exec'
    as alice pjwctl run --cores 2 --job "ompi$1" -- bash -c "$begin mpirun.openmpi --oversubscribe -np 1 /tmp/rank ${1}5" >&2 &
    as alice pjwctl run --cores 2 --job "mpich$1" -- bash -c "$begin mpirun.mpich -bind-to core -launcher fork -np 1 /tmp/rank ${1}6" >&2 &
}

# Without pjwd the ranks leave the mask that they inherit.
as alice taskset -c 4 mpirun.openmpi -np 1 sleep 7001 >&2 &
as alice taskset -c 4 mpirun.mpich -bind-to core -np 1 sleep 7002 >&2 &
eventually "Open MPI's rank runs without pjwd" rank_runs 7001
eventually "Open MPI's rank has left its inherited mask" has_mask 7001 0-1
eventually "MPICH's rank runs without pjwd" rank_runs 7002
eventually "MPICH's rank has left its inherited mask" has_mask 7002 0-1
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
start_pair 700
eventually "Slurm's job holds cores" holds "slurm:$job"
grant=$(cpus "slurm:$job")
check "the cores of Slurm's job are not the first two" disjoint "$grant" 0-3
for number in 3 4; do
    eventually "rank $number of Slurm's job runs" rank_runs 700$number
    eventually "rank $number of Slurm's job is on the job's cores" rank_is_on 700$number "$grant"
done
eventually "every thread of Slurm's job is on its cores" job_is_confined "$job"
for which in ompi700 mpich700; do eventually "$which is confined by a cpuset before its rank starts" is_by_cpuset "manual:$which"; done
touch /tmp/begin
for each in ompi700:7005 mpich700:7006; do
    number=${each#*:} which=${each%:*}
    eventually "the rank of $which runs" rank_runs "$number"
    read_report "$number"
    check "the rank of $which was on the job's cores at its first instruction" within "$began" "$(cpus "manual:$which")"
    check "the mask of the rank of $which did not change" [ "$began" = "$ended" ]
    check "the rank of $which is on the job's cores" rank_is_on "$number" "$(cpus "manual:$which")"
    check "the cores of $which are not the first two" disjoint "$(cpus "manual:$which")" 0-3
    eventually "$which is confined by a cpuset" is_by_cpuset "manual:$which"
done
pkill -u alice sleep
scancel "$job"
eventually "the cancelled job is no longer in the status" has_no_job "slurm:$job"
eventually "the cores of the commands are free" is_free 4-15

# The interval of cycles. A thread may be outside its cores for this time.
interval=5
printf '%s\n' 'enforcement = "affinity"' 'user_max_cores = 4' "interval = \"${interval}s\"" >/etc/pjw/pjwd.toml
check "pjwctl reload accepts enforcement by masks" pjwctl reload
start_pair 800
for each in ompi800:8005 mpich800:8006; do
    number=${each#*:} which=${each%:*}
    eventually "the rank of $which runs with masks" rank_runs "$number"
    read_report "$number"
    figure "the first mask of the rank of $which was $began, and it was $ended $milliseconds ms after its fork; the interval of cycles is $interval s"
    check "the rank of $which was moved to the job's cores within one interval" [ "$milliseconds" -le $((interval * 1000)) ]
    check "the last mask of the rank of $which is inside the job's cores" within "$ended" "$(cpus "manual:$which")"
    eventually "the rank of $which stays on the job's cores" rank_is_on "$number" "$(cpus "manual:$which")"
    check "$which is confined by masks" [ "$(field "manual:$which" enforcement)" = affinity ]
done
