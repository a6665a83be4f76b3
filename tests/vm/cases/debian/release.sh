# Jobs of all kinds are confined and released. After `pjwctl release --all` a dump of the node is the same as before. It is the same,
# too, after the package was removed while jobs were confined.
# without pjw
# deadline: 840
. /cases/functions

job_has_processes() { pgrep -u alice -f '^sleep 1001' && pgrep -u alice -f '^sleep 1002' && [ "$(pgrep -cu bob -x sleep)" -ge 5 ]; } >/dev/null
sleep_pids() { pgrep -u bob -f "^[^ ]*sleep $1\$"; }
is_on() { confined "$(cpus "$1")" $(sleep_pids "$2"); }
may_run_everywhere() { [ "$(masks "$1")" = 0-15 ]; }
has_changed() { ! diff /tmp/before "$1" >&2; }
scopes() { systemctl list-units --all --plain --no-legend -t scope,slice | awk '{ print $1, $2, $3, $4 }'; }
no_scopes() { ! scopes | grep -E 'pjw-.*scope' >&2; }
# The kernel does not accept an empty cpuset in a cgroup with processes. There, all CPUs have the same effect as an empty cpuset.
dump() {
    dump_threads "$1.threads"
    dump_node "$1"
    sed -i 's|\(/job_[0-9]*/cpuset.cpus\):0-15$|\1:|' "$1"
    { scopes; print_watched; } >>"$1"
}
print_watched() { for pid in $watched; do echo "$pid $(masks "$pid") $(cat "/proc/$pid/cgroup")"; done; }
watched_are_as_before() { print_watched | diff /tmp/watched -; }
# is_as_before FILE: dumps the node, and compares the dump with the first one. systemd removes an empty slice some time after its last
# scope.
is_as_before() {
    dump "$1"
    diff /tmp/before "$1"
}
# confine: assigns cores to jobs of all kinds, with cpusets and without.
confine() {
    start_pjw 'user_max_cores = 1'
    pjwctl assign session --cores 1 $(printf ' --pid %s' $(sleep_pids 1003)) >&2
    pjwctl assign some --cores 1 --pid "$(sleep_pids 1004 | head -n 1)" >&2
    pjwctl assign service --cores 1 --pid "$(sleep_pids 1005)" >&2
    pjwctl run --cores 1 --bind-memory --job command -- sleep 1006 >&2 &
    command=$!
    # A scope ends with its last process. So the process of this scope cannot be moved back.
    systemd-run --quiet --scope --unit run-lone --uid bob sleep 1007 >&2 &
    eventually "a scope with one process runs" sleep_pids 1007
    pjwctl assign lone --cores 1 --pid "$(sleep_pids 1007)" >&2
    eventually "Slurm's job holds cores" holds "slurm:$job"
    eventually "Slurm's job is on its cores" job_is_confined "$job"
    eventually "the processes of a session are on the cores of their job" is_on manual:session 1003
    eventually "one of the two processes of a session is on its cores" confined "$(cpus manual:some)" "$(sleep_pids 1004 | head -n 1)"
    eventually "the process of a service is on its cores" is_on manual:service 1005
    eventually "the command is on its cores" confined "$(cpus manual:command)" $command
    eventually "Slurm's job is confined by a cpuset" is_by_cpuset "slurm:$job"
    eventually "the process of a session is confined by a cpuset" is_by_cpuset manual:some
    check "the process of a service is confined by masks" [ "$(field manual:service enforcement)" = affinity ]
}

if has_deb; then install_deb; else install_pjw; fi
begin_job() {
    job=$(submit alice -n1 -c4 <<<'taskset -c 5 sleep 1001 & sleep 1002')
    eventually "Slurm's job has its processes" job_has_processes
    watched="$(sleep_pids 1003) $(sleep_pids 1004) $(sleep_pids 1005) $(pgrep -u alice sleep)"
    eventually "two dumps of the node before the jobs are confined are equal" is_same_twice dump /tmp/before
    print_watched >/tmp/watched
}
# Sessions and commands as systemd makes them: a session that is assigned as a whole, one of which one process is assigned, a service.
bobs() { systemd-run --quiet --uid bob "$@"; }
runuser -u bob -- sleep 0
systemd-run --quiet --scope --unit run-whole --uid bob bash -c 'taskset -c 9 sleep 1003 & sleep 1003 & wait' &
systemd-run --quiet --scope --unit run-part --uid bob bash -c 'sleep 1004 & sleep 1004 & wait' &
bobs --unit bobs sleep 1005
begin_job

confine
dump /tmp/now
check "the dump of the node has changed while jobs are confined" has_changed /tmp/now
check "pjwctl release --all succeeds" pjwctl release --all
# A release is answered after 5 s even if systemd has not yet removed the limits of all cgroups. pjwd must not be stopped before.
eventually "the command may run on all CPUs after the release" may_run_everywhere $command
eventually "the process whose scope has ended may run on all CPUs after the release" may_run_everywhere "$(sleep_pids 1007)"
eventually "the processes of all other jobs are in their former cgroups, with their former masks" watched_are_as_before
kill $command $(sleep_pids 1007)
eventually "the scopes of pjw end with their last processes" no_scopes
systemctl disable --now pjwd.service pjwd.socket >&2
eventually "the node is as before" is_as_before /tmp/released
check "every thread in both dumps has its former mask" same_threads /tmp/before.threads /tmp/released.threads
check "masks had changed while jobs were confined" eval '! same_threads /tmp/before.threads /tmp/now.threads'

if ! has_deb; then echo "ok no package was built: its removal is not tested # skipped"; exit 0; fi
# A released job is not confined again. So a new job is submitted.
scancel "$job"
eventually "Slurm's first job has ended" is_over "$job"
begin_job
confine
dump /tmp/now
check "the dump of the node has changed before the removal of the package" has_changed /tmp/now
check "the package is removed while jobs are confined" dpkg -r pjw
check "the command may run on all CPUs after the removal" may_run_everywhere $command
check "the process whose scope has ended may run on all CPUs after the removal" may_run_everywhere "$(sleep_pids 1007)"
kill $command $(sleep_pids 1007)
eventually "the scopes of pjw end after the removal" no_scopes
eventually "the node is as before the package" is_as_before /tmp/removed
check "every thread in both dumps has its former mask after the removal" same_threads /tmp/before.threads /tmp/removed.threads
check "after the removal no pjwd runs and its program is gone" sh -c '! pgrep -x pjwd && ! [ -e /usr/bin/pjwd ]'
