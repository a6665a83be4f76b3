# Daemons of the node are restarted, and no thread of a job is outside its cores at any time. A watcher reads the masks of all threads
# and the cpusets of the jobs repeatedly. Meanwhile systemd reloads, slurmd and pjwd are restarted, pjwd is killed, and the package is
# upgraded.
# without pjw
# deadline: 1200
# alone
. /cases/functions

has_deb || { echo "ok no package was built: an upgrade is not tested # skipped"; exit 0; }
# Threads that stay, and processes that start and end all the time. In Slurm's job, also a thread that runs all the time: it is pinned.
# A second one would take the time of the emulated machine from the daemons that start again.
script='python3 -c "import threading, time
for _ in range(7): threading.Thread(target=time.sleep, args=(1000,)).start()" &
while :; do sleep 0.2; done'
hot_script="(while :; do :; done) & $script"
# Whether another pjwd answers. It answers after its first scan. has_rescanned: whether it has also done a second full scan.
restarted() { read_status; value "$status_json" pid; [ -n "$value" ] && [ "$value" != "$1" ] && [ "$value" = "$(main_pid)" ]; }
full_scans() { metrics | sed -n 's/^pjw_cycles_total{cause="full"} //p'; }
metrics() { (exec 3<>/dev/tcp/127.0.0.1/9844 && printf 'GET /metrics HTTP/1.0\r\n\r\n' >&3 && cat <&3) 2>/dev/null; }
has_rescanned() { local scans; scans=$(full_scans); [ "${scans:-0}" -ge 2 ]; }
passes() { echo $(($(cat /tmp/watched.passes))); }
has_passes() { [ "$(passes)" -ge "$1" ]; }
# check_none_outside NAME: waits for two more passes of the watcher, because the present pass may have begun too early.
check_none_outside() {
    eventually "the watcher completes two more passes" has_passes $(($(passes) + 2))
    check "$1" none_outside
}
watcher_runs() { [ -s /tmp/watched ]; }
grants_are_kept() {
    [ "$(cpus "slurm:$job")" = "$slurm_cpus" ] && [ "$(cpus manual:long)" = "$run_cpus" ] &&
        [ "$(cpuset_of_job "$job")" = "$slurm_cpus" ] && [ "$(cat "/sys/fs/cgroup/$scope/cpuset.cpus")" = "$run_cpus" ]
}
none_outside() { ! grep outside /tmp/watched >&2; }
version() { dpkg-query -W -f='${Version}' pjw; }
# is_confined USER LIST N: whether the user has at least N processes, and all their threads are on these CPUs.
is_confined() {
    local pids
    pids=$(pgrep -u "$1")
    [ "$(wc -l <<<"$pids")" -ge "$3" ] && confined "$2" $pids || { echo "$1: $(masks $pids) of" $pids >&2; return 1; }
}
both_are_confined() { is_confined alice "$slurm_cpus" 3 && is_confined bob "$run_cpus" 2; }

# The newer package is made while the other one is installed.
make_newer() {
    mkdir /tmp/newer && dpkg-deb -R /pjw/*.deb /tmp/newer
    sed -i 's/^Version: .*/&+newer/' /tmp/newer/DEBIAN/control
    dpkg-deb -Znone -b /tmp/newer /tmp/newer.deb >&2
}
make_newer &
newer=$!
# Every eighth rescan is a full scan.
config=('user_max_cores = 3' 'interval = "500ms"' 'rescan_interval = "500ms"' '[metrics]' 'listen = ["9844"]')
install_deb "${config[@]}"
start_pjw "${config[@]}"
wait $newer
job=$(submit alice -n4 <<<"$hot_script")
as bob pjwctl run --cores 3 --job long -- bash -c "$script" >&2 &
eventually "Slurm's job holds cores" holds "slurm:$job"
eventually "the command holds cores" holds manual:long
slurm_cpus=$(cpus "slurm:$job") run_cpus=$(cpus manual:long) scope=pjw.slice/pjw-long.scope
directory=$(cd /sys/fs/cgroup && ls -d system.slice/*slurmstepd.scope/job_"$job")
eventually "every thread of both jobs is on its cores" both_are_confined
# Masks confine a job until its cpuset is complete. The watcher expects the cpusets.
eventually "Slurm's job is confined by a cpuset" is_by_cpuset "slurm:$job"
eventually "the command is confined by a cpuset" is_by_cpuset manual:long
eventually "the cpusets of both jobs are their grants" grants_are_kept
python3 /cases/watch.py /tmp/watched "$slurm_cpus:alice:$directory" "$run_cpus:bob:$scope" &
watcher=$!
eventually "the watcher runs" watcher_runs

was=$(slurmd_start)
systemctl daemon-reload
systemctl restart slurmd
eventually "slurmd answers after its restart" slurmd_is_back "$was"
check_none_outside "no thread was outside its cores during a reload of systemd and a restart of slurmd"
was=$(main_pid)
systemctl restart pjwd.service
eventually "pjwd answers after its restart" restarted "$was"
eventually "pjwd has done a second full scan after its restart" has_rescanned
check_none_outside "no thread was outside its cores during a restart of pjwd"
check "grants and cpusets are the same after a restart of pjwd" grants_are_kept
was=$(main_pid)
kill -9 "$was"
systemctl daemon-reload
eventually "pjwd answers after it was killed" restarted "$was"
eventually "pjwd has done a second full scan after it was killed" has_rescanned
check_none_outside "no thread was outside its cores when pjwd was killed"
check "grants and cpusets are the same after pjwd was killed" grants_are_kept
was=$(main_pid)
check "the package is upgraded" dpkg -i /tmp/newer.deb
eventually "pjwd answers after the upgrade" restarted "$was"
check "the newer version of the package is installed" grep -q newer <<<"$(version)"
eventually "pjwd has done a second full scan after the upgrade" has_rescanned
check_none_outside "no thread was outside its cores during the upgrade"
check "grants and cpusets are the same after the upgrade" grants_are_kept
systemctl daemon-reload
check_none_outside "no thread was outside its cores during another reload of systemd"
check "Slurm's job still runs" is_state "$job" RUNNING
check "every thread of both jobs is still on its cores" both_are_confined
check "the scope of the command is still active" [ "$(systemctl is-active pjw-long.scope)" = active ]

kill $watcher
wait $watcher
check "no thread was ever outside its cores" none_outside
figure "the watcher has read: $(tail -n 1 /tmp/watched), of two jobs"
check "the watcher has done at least 20 passes" [ "$(sed -n 's/^passes \([0-9]*\) .*/\1/p' /tmp/watched)" -ge 20 ]
scancel "$job"
kill $(pgrep -u bob)
eventually "all cores are free" is_free 0-15
check "the node was never drained" never_drained
