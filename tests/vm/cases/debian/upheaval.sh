# Whatever happens to the daemons of the node, no thread of a job is outside its cores for a moment: a watcher looks at
# every thread and at the cpusets all the time, while systemd reloads, slurmd and pjwd are restarted, pjwd is killed,
# and the package is upgraded.
# deadline: 300
# without pjw
# deadline: 420
# first
. /cases/words

has_deb || { echo "ok no package was built: an upgrade can't be tried # skipped"; exit 0; }
# Threads that stay, and processes that come and go all the time.
script='python3 -c "import threading, time
for _ in range(7): threading.Thread(target=time.sleep, args=(1000,)).start()" &
(while :; do :; done) &
while :; do sleep 0.2; done'
looks() { wc -l <"/tmp/watched"; }
restarted() { [ "$(main_pid)" != "$1" ] && [ "$(main_pid)" != 0 ] && answers; }
watches() { [ -s /tmp/watched ]; }
kept() {
    [ "$(cpus "slurm:$job")" = "$slurm_cpus" ] && [ "$(cpus manual:long)" = "$run_cpus" ] &&
        [ "$(cpuset_of_job "$job")" = "$slurm_cpus" ] && [ "$(cat "/sys/fs/cgroup/$scope/cpuset.cpus")" = "$run_cpus" ]
}
not_yet_outside() { ! grep outside /tmp/watched >&2; }
version() { dpkg-query -W -f='${Version}' pjw; }
is_jailed() {
    local pids
    pids=$(pgrep -u "$1")
    [ "$(wc -l <<<"$pids")" -ge 3 ] && confined "$2" $pids || { echo "$1: $(masks $pids) of" $pids >&2; return 1; }
}
both_are_jailed() { is_jailed alice "$slurm_cpus" && is_jailed bob "$run_cpus"; }

mkdir /tmp/newer && dpkg-deb -R /pjw/*.deb /tmp/newer
sed -i 's/^Version: .*/&+newer/' /tmp/newer/DEBIAN/control
dpkg-deb -Znone -b /tmp/newer /tmp/newer.deb >&2
install_deb 'user_max_cores = 3'
start_pjw 'user_max_cores = 3'
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

systemctl daemon-reload
systemctl restart slurmd
check "a reload of systemd and a restart of slurmd let nobody out" not_yet_outside
was=$(main_pid)
systemctl restart pjwd.service
eventually "the warden is restarted" restarted "$was"
check "which let nobody out" not_yet_outside
check "grants and cpusets are the same" kept
was=$(main_pid)
kill -9 "$was"
systemctl daemon-reload
eventually "the warden is killed, and back" restarted "$was"
check "which let nobody out" not_yet_outside
check "grants and cpusets are the same" kept
was=$(main_pid)
check "the package is upgraded" dpkg -i /tmp/newer.deb
eventually "the newer warden runs" restarted "$was"
check "it is the newer one" grep -q newer <<<"$(version)"
check "which let nobody out" not_yet_outside
check "grants and cpusets are the same" kept
# Time enough for a full look of the newer one.
eventually "it has looked at everything" sh -c 'pjwctl status --json | grep -q "\"jobs\""'
systemctl daemon-reload
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
