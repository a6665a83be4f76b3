# With adopt_strays, what a user with several jobs starts beside them belongs to none, and is kept off every grant, also
# other users', until the jobs end.
. /cases/functions

pid() { pgrep -u alice -f "^[^ ]*sleep $1\$"; }
mask() { masks $(pid "$1"); }
has_mask() { [ "$(mask "$1")" = "$2" ]; }
off_every_grant() { [ -n "$(mask "$1")" ] && disjoint "$(mask "$1")" "$grants"; }
joins_none() { pjwctl explain "$(pid "$1")" --json >/tmp/explained && ! grep -q '"job": *"' /tmp/explained; }
# Whom the events on strays of this user name: each names one process of the user's that no job has. A short command of
# the login may be one of them.
told_of() { pjwctl events --json | grep '"event":"stray"' | grep "of user $1 belong" | sed 's/.*"pid":\([0-9]*\).*/\1/'; }
names_a_stray() {
    local pid
    for pid in $(told_of 1001); do
        grep -qs '^Uid:[[:space:]]*1001' "/proc/$pid/status" &&
            ! { pids_of_job "$one"; pids_of_job "$two"; } | grep -qx "$pid" && return
    done
    return 1
}
warns() { pjwctl status --json | tr -d '\n' | grep -o '"warnings":.*' | grep '"code": *"stray"' | grep -q "$1"; }

start_pjw 'adopt_strays = true' 'interval = "500ms"' 'rescan_interval = "2s"'
one=$(sbatch_sleep alice -n1 -c4) two=$(sbatch_sleep alice -n1 -c4) other=$(sbatch_sleep bob -n1 -c2)
for job in $one $two $other; do eventually "job $job holds cores" holds "slurm:$job"; done
linger alice
grants=$(cpus "slurm:$one"),$(cpus "slurm:$two"),$(cpus "slurm:$other")
as alice ssh alice@node1 'sleep 6004 >/dev/null 2>&1 </dev/null & taskset -c 15 sleep 6005 >/dev/null 2>&1 </dev/null &'
user_run alice sleep 6006
echo '* * * * * alice exec flock -n /tmp/only-one sleep 6007' >/etc/cron.d/stray
run_cron_now
for seconds in 6004 6005 6006 6007; do
    eventually "stray $seconds runs beside them" pid $seconds
    eventually "it is kept off all of them" off_every_grant $seconds
    check "and joins neither" joins_none $seconds
done
check "who had bound itself elsewhere stays there" has_mask 6005 15
for job in $one $two; do eventually "job $job is on its cores" job_is_confined "$job"; done
eventually "strays are told, by one of them" names_a_stray
eventually "and whose they are" warns "processes of user 1001 belong to no job"
check "bob has none" [ -z "$(told_of 1002)" ]
rm /etc/cron.d/stray

scancel "$one" "$two"
for job in $one $two; do eventually "job $job is forgotten" has_no_job "slurm:$job"; done
eventually "what ssh started has its mask again" has_mask 6004 0-15
eventually "what systemd-run started too" has_mask 6006 0-15
eventually "and what cron started" has_mask 6007 0-15
check "and who was bound is bound" has_mask 6005 15
check "bob's job has what it had" within "$(cpus "slurm:$other")" "$grants"
