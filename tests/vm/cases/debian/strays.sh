# A user with a job starts processes outside it: through ssh, cron and systemd-run --user. They are reported as strays, and their masks
# are not changed, unless strays are adopted.
. /cases/functions

runs() { pgrep -u "$1" -f "^[^ ]*sleep $2\$" >/dev/null; }
has_strays() { [ "$(field "slurm:$1" strays)" -ge "$2" ] 2>/dev/null; }
mask_of() { masks $(pgrep -u alice -f "^[^ ]*sleep $1\$"); }
is_on() { confined "$2" $(pgrep -u alice -f "^[^ ]*sleep $1\$"); }
has_warning() { pjwctl status --json | tr -d ' \n' | grep -o '"warnings":\[[^]]*' | grep -q "$1"; }
has_mask() { [ "$(mask_of "$1")" = "$2" ]; }

start_pjw 'interval = "500ms"' 'rescan_interval = "2s"'
job=$(sbatch_sleep alice -n1 -c4)
eventually "the job holds cores" holds "slurm:$job"
grant=$(cpus "slurm:$job")

linger alice
user_run alice sleep 6001
as alice ssh alice@node1 'sleep 6002 >/dev/null 2>&1 </dev/null &'
echo '* * * * * alice exec sleep 6003' >/etc/cron.d/stray
for seconds in 6001 6002; do eventually "sleep $seconds runs outside the job" runs alice $seconds; done
eventually "both are counted as strays" has_strays "$job" 2
eventually "status warns of strays" has_warning stray
check "the mask of the process that systemd-run started is not changed" has_mask 6001 0-15
check "the mask of the process that ssh started is not changed" has_mask 6002 0-15
check "the job holds the same cores" [ "$(cpus "slurm:$job")" = "$grant" ]
run_cron_now
eventually "the process that cron starts runs" runs alice 6003
eventually "the process that cron started is counted as a stray" has_strays "$job" 3
check "the mask of the process that cron started is not changed" has_mask 6003 0-15
rm /etc/cron.d/stray

printf '%s\n' 'adopt_strays = true' 'interval = "500ms"' 'rescan_interval = "2s"' >/etc/pjw/pjwd.toml
check "pjwctl reload accepts adopt_strays" pjwctl reload
for seconds in 6001 6002 6003; do eventually "sleep $seconds is adopted by the only job of its user" is_on $seconds "$grant"; done

scancel "$job"
eventually "the cores of the job are free after its end and that of the strays" eval 'pkill -u alice sleep; is_free 0-15'
