# Whatever happens to the daemons of the node, no thread of a job is outside its cores for a moment: a watcher looks at
# every thread and at the cpusets all the time, while systemd reloads, slurmd and pjwd are restarted, pjwd is killed,
# and the package is upgraded.
# without pjw
# deadline: 420
# alone
. /cases/functions

has_deb || { echo "ok no package was built: an upgrade can't be tried # skipped"; exit 0; }
# Threads that stay, and processes that come and go all the time.
script='python3 -c "import threading, time
for _ in range(7): threading.Thread(target=time.sleep, args=(1000,)).start()" &
(while :; do :; done) &
while :; do sleep 0.2; done'
# Whether another warden answers, which it does once its first look is done, and whether it has looked at everything again.
restarted() { read_status; value "$told" pid; [ -n "$value" ] && [ "$value" != "$1" ] && [ "$value" = "$(main_pid)" ]; }
full_looks() { metrics | sed -n 's/^pjw_cycles_total{cause="full"} //p'; }
metrics() { (exec 3<>/dev/tcp/127.0.0.1/9844 && printf 'GET /metrics HTTP/1.0\r\n\r\n' >&3 && cat <&3) 2>/dev/null; }
has_looked_again() { local looked; looked=$(full_looks); [ "${looked:-0}" -ge 2 ]; }
slurmd_start() { scontrol show node -o | sed -n 's/.*SlurmdStartTime=\([^ ]*\).*/\1/p'; }
# Slurm's answer is that of the new slurmd: it has registered, and its job is still on it.
slurmd_is_back() { [ "$(slurmd_start)" != "$1" ] && [ "$(sinfo -h -o %T)" = mixed ]; }
looks() { echo $(($(cat /tmp/watched.looks))); }
has_looked() { [ "$(looks)" -ge "$1" ]; }
# nobody_out: the look that is under way may have begun before what it is to see.
nobody_out() {
    eventually "the watcher looks once more" has_looked $(($(looks) + 2))
    check "$1" not_yet_outside
}
watches() { [ -s /tmp/watched ]; }
kept() {
    [ "$(cpus "slurm:$job")" = "$slurm_cpus" ] && [ "$(cpus manual:long)" = "$run_cpus" ] &&
        [ "$(cpuset_of_job "$job")" = "$slurm_cpus" ] && [ "$(cat "/sys/fs/cgroup/$scope/cpuset.cpus")" = "$run_cpus" ]
}
not_yet_outside() { ! grep outside /tmp/watched >&2; }
version() { dpkg-query -W -f='${Version}' pjw; }
is_confined() {
    local pids
    pids=$(pgrep -u "$1")
    [ "$(wc -l <<<"$pids")" -ge 3 ] && confined "$2" $pids || { echo "$1: $(masks $pids) of" $pids >&2; return 1; }
}
both_are_jailed() { is_confined alice "$slurm_cpus" && is_confined bob "$run_cpus"; }

mkdir /tmp/newer && dpkg-deb -R /pjw/*.deb /tmp/newer
sed -i 's/^Version: .*/&+newer/' /tmp/newer/DEBIAN/control
dpkg-deb -Znone -b /tmp/newer /tmp/newer.deb >&2
config=('user_max_cores = 3' 'rescan_interval = "2s"' '[metrics]' 'listen = ["9844"]')
install_deb "${config[@]}"
start_pjw "${config[@]}"
job=$(submit alice -n4 <<<"$script")
as bob pjwctl run --cores 3 --job long -- bash -c "$script" >&2 &
eventually "Slurm's job holds cores" holds "slurm:$job"
eventually "the command holds cores" holds manual:long
slurm_cpus=$(cpus "slurm:$job") run_cpus=$(cpus manual:long) scope=pjw.slice/pjw-long.scope
directory=$(cd /sys/fs/cgroup && ls -d system.slice/*slurmstepd.scope/job_"$job")
eventually "all of them are inside" both_are_jailed
python3 /cases/watch.py /tmp/watched "$slurm_cpus:alice:$directory" "$run_cpus:bob:$scope" &
watcher=$!
eventually "somebody watches" watches

was=$(slurmd_start)
systemctl daemon-reload
systemctl restart slurmd
eventually "slurmd is restarted and answers" slurmd_is_back "$was"
nobody_out "a reload of systemd and a restart of slurmd let nobody out"
was=$(main_pid)
systemctl restart pjwd.service
eventually "the warden is restarted, and has looked" restarted "$was"
eventually "and again" has_looked_again
nobody_out "which let nobody out"
check "grants and cpusets are the same" kept
was=$(main_pid)
kill -9 "$was"
systemctl daemon-reload
eventually "the warden is killed, and back, and has looked" restarted "$was"
eventually "and again" has_looked_again
nobody_out "which let nobody out"
check "grants and cpusets are the same" kept
was=$(main_pid)
check "the package is upgraded" dpkg -i /tmp/newer.deb
eventually "the newer warden runs, and has looked" restarted "$was"
check "it is the newer one" grep -q newer <<<"$(version)"
eventually "and has looked again" has_looked_again
nobody_out "which let nobody out"
check "grants and cpusets are the same" kept
systemctl daemon-reload
nobody_out "nor did another reload of systemd"
check "the job is still Slurm's" is_state "$job" RUNNING
check "every thread is where it was" both_are_jailed
check "the scope is still systemd's" [ "$(systemctl is-active pjw-long.scope)" = active ]

kill $watcher
wait $watcher
check "no thread was ever outside" not_yet_outside
figure "$(tail -n 1 /tmp/watched) seen, of two jobs"
check "there were looks enough to tell" [ "$(sed -n 's/^looks \([0-9]*\) .*/\1/p' /tmp/watched)" -ge 20 ]
scancel "$job"
kill $(pgrep -u bob)
eventually "all cores are free" is_free 0-15
check "the node was never drained" never_drained
