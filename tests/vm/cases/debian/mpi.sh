# Both kinds of MPI bind their ranks to the machine's first core, whatever mask they inherit. Behind a wall they can't:
# they are inside from their first instruction. With masks alone they are put back.
. /cases/functions

rank() { pgrep -u alice -f "^[^ ]*sleep $1\$"; }
runs() { [ -n "$(rank "$1")" ]; }
rank_is_on() { local pids; pids=$(rank "$1"); [ -n "$pids" ] && confined "$2" $pids; }
has_mask() { [ "$(masks $(rank "$1"))" = "$2" ]; }
# A rank N that looks at itself until it is inside its job's cores, writes down with which mask it began, with which it
# ended, and how many milliseconds after its fork that was, and is `sleep N` then.
cat >/tmp/rank <<'END'
#!/bin/bash
. /cases/functions
look() { while read -r name value; do [ "$name" != Cpus_allowed_list: ] || mask=$value; done </proc/$$/status; }
look
began=$mask
read -r -a stat </proc/$$/stat
until within "$mask" "$PJW_CPUS"; do look; done
read -r to rest </proc/uptime
echo "$began $mask $(((10#${to/./} - stat[21]) * 10))" >/tmp/began.$1
exec sleep "$1"
END
chmod +x /tmp/rank
told_by() { read -r began ended milliseconds <"/tmp/began.$1"; }
pair() {
    as alice pjwctl run --cores 2 --job "ompi$1" -- mpirun.openmpi --oversubscribe -np 1 /tmp/rank "$1"5 >&2 &
    as alice pjwctl run --cores 2 --job "mpich$1" -- mpirun.mpich -bind-to core -launcher fork -np 1 /tmp/rank "$1"6 >&2 &
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
eventually "and all else of the job" job_is_confined "$job"
for each in ompi700:7005 mpich700:7006; do
    number=${each#*:} which=${each%:*}
    eventually "the rank of $which runs" runs "$number"
    told_by "$number"
    check "it began inside" within "$began" "$(cpus "manual:$which")"
    check "where it was left" [ "$began" = "$ended" ]
    check "and is inside" rank_is_on "$number" "$(cpus "manual:$which")"
    check "which isn't the first core" disjoint "$(cpus "manual:$which")" 0-3
    check "by a cpuset" [ "$(field "manual:$which" enforcement)" = cpuset ]
done
pkill -u alice sleep
scancel "$job"
eventually "the job is forgotten" has_no_job "slurm:$job"
eventually "so are the commands" is_free 4-15

# So long may a cycle be in coming, and no thread be outside.
interval=5
printf '%s\n' 'enforcement = "affinity"' 'user_max_cores = 4' "interval = \"${interval}s\"" >/etc/pjw/pjwd.toml
check "the warden is told to use masks" pjwctl reload
pair 800
for each in ompi800:8005 mpich800:8006; do
    number=${each#*:} which=${each%:*}
    eventually "the rank of $which runs with masks" runs "$number"
    told_by "$number"
    figure "it first saw itself on $began, and was on $ended $milliseconds ms after its fork; a cycle comes every $interval s"
    check "it was put on the job's cores within one cycle" [ "$milliseconds" -le $((interval * 1000)) ]
    check "inside the grant" within "$ended" "$(cpus "manual:$which")"
    eventually "it stays there" rank_is_on "$number" "$(cpus "manual:$which")"
    check "by masks" [ "$(field "manual:$which" enforcement)" = affinity ]
done
