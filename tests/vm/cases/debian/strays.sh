# What a user with a job starts beside it, through ssh, cron and systemd-run --user, is reported as strays, and left
# alone unless strays are adopted.
. /cases/functions

runs() { pgrep -u "$1" -f "^[^ ]*sleep $2\$" >/dev/null; }
has_strays() { [ "$(field "slurm:$1" strays)" -ge "$2" ] 2>/dev/null; }
mask_of() { masks $(pgrep -u alice -f "^[^ ]*sleep $1\$"); }
is_on() { confined "$2" $(pgrep -u alice -f "^[^ ]*sleep $1\$"); }
warns() { pjwctl status --json | tr -d ' \n' | grep -o '"warnings":\[[^]]*' | grep -q "$1"; }
has_mask() { [ "$(mask_of "$1")" = "$2" ]; }

start_pjw 'interval = "500ms"' 'rescan_interval = "2s"'
job=$(sbatch_sleep alice -n1 -c4)
eventually "the job holds cores" holds "slurm:$job"
grant=$(cpus "slurm:$job")

linger alice
user_run alice sleep 6001
as alice ssh alice@node1 'sleep 6002 >/dev/null 2>&1 </dev/null &'
echo '* * * * * alice exec sleep 6003' >/etc/cron.d/stray
for seconds in 6001 6002; do eventually "sleep $seconds runs beside the job" runs alice $seconds; done
eventually "both are counted as strays" has_strays "$job" 2
eventually "status says so" warns stray
check "what systemd-run started is left alone" has_mask 6001 0-15
check "what ssh started is left alone" has_mask 6002 0-15
check "the job's cores are the same" [ "$(cpus "slurm:$job")" = "$grant" ]
run_cron_now
eventually "cron has started one too" runs alice 6003
eventually "it is counted" has_strays "$job" 3
check "and left alone" has_mask 6003 0-15
rm /etc/cron.d/stray

printf '%s\n' 'adopt_strays = true' 'interval = "500ms"' 'rescan_interval = "2s"' >/etc/pjw/pjwd.toml
check "the warden is told to adopt strays" pjwctl reload
for seconds in 6001 6002 6003; do eventually "sleep $seconds joins its user's only job" is_on $seconds "$grant"; done

scancel "$job"
eventually "its cores are free once strays have gone" eval 'pkill -u alice sleep; is_free 0-15'
