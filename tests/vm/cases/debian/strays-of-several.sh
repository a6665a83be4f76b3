# With adopt_strays, processes that a user with several jobs starts outside these jobs belong to none of them. They are kept off the
# cores of all jobs, including those of other users, until the user's jobs end.
. /cases/functions

pid() { pgrep -u alice -f "^[^ ]*sleep $1\$"; }
mask() { masks $(pid "$1"); }
has_mask() { [ "$(mask "$1")" = "$2" ]; }
is_outside_grants() { [ -n "$(mask "$1")" ] && disjoint "$(mask "$1")" "$grants"; }
is_in_no_job() { pjwctl explain "$(pid "$1")" --json >/tmp/explained && ! grep -q '"job": *"' /tmp/explained; }
# Prints the pids in the stray events of the user. Each event names one process of the user that belongs to no job. This may be a
# short command of the login.
pids_in_events() { pjwctl events --json | grep '"event":"stray"' | grep "of user $1 belong" | sed 's/.*"pid":\([0-9]*\).*/\1/'; }
event_names_a_stray() {
    local pid
    for pid in $(pids_in_events 1001); do
        grep -qs '^Uid:[[:space:]]*1001' "/proc/$pid/status" &&
            ! { pids_of_job "$one"; pids_of_job "$two"; } | grep -qx "$pid" && return
    done
    return 1
}
has_warning() { pjwctl status --json | tr -d '\n' | grep -o '"warnings":.*' | grep '"code": *"stray"' | grep -q "$1"; }
has_no_stray() { local status; status=$(pjwctl status --json) && ! grep -q '"code": *"stray"' <<<"$status"; }

start_pjw 'adopt_strays = true' 'interval = "500ms"' 'rescan_interval = "2s"'
one=$(sbatch_sleep alice -n1 -c4) two=$(sbatch_sleep alice -n1 -c4) other=$(sbatch_sleep bob -n1 -c2)
for job in $one $two $other; do eventually "job $job holds cores" holds "slurm:$job"; done
linger alice
# There is an event when a user has strays and had none before. So those that last begin when no short command of alice is a stray.
eventually "no process is a stray before the strays start" has_no_stray
grants=$(cpus "slurm:$one"),$(cpus "slurm:$two"),$(cpus "slurm:$other")
as alice ssh alice@node1 'sleep 6004 >/dev/null 2>&1 </dev/null & taskset -c 15 sleep 6005 >/dev/null 2>&1 </dev/null &'
user_run alice sleep 6006
echo '* * * * * alice exec flock -n /tmp/only-one sleep 6007' >/etc/cron.d/stray
run_cron_now
for seconds in 6004 6005 6006 6007; do
    eventually "stray sleep $seconds runs" pid $seconds
    eventually "stray sleep $seconds is kept off the cores of all jobs" is_outside_grants $seconds
    check "stray sleep $seconds belongs to no job" is_in_no_job $seconds
done
check "a stray with a mask of its own outside the grants keeps it" has_mask 6005 15
for job in $one $two; do eventually "job $job is on its cores" job_is_confined "$job"; done
eventually "an event names one of the strays" event_names_a_stray
eventually "status warns of the strays and names their user" has_warning "processes of user 1001 belong to no job"
check "no event names a stray of bob" [ -z "$(pids_in_events 1002)" ]
rm /etc/cron.d/stray

scancel "$one" "$two"
for job in $one $two; do eventually "the cancelled job $job is no longer in the status" has_no_job "slurm:$job"; done
eventually "the stray that ssh started has its mask again" has_mask 6004 0-15
eventually "the stray that systemd-run started has its mask again" has_mask 6006 0-15
eventually "the stray that cron started has its mask again" has_mask 6007 0-15
check "the stray with a mask of its own still has it" has_mask 6005 15
check "bob's job holds the same cores" within "$(cpus "slurm:$other")" "$grants"
