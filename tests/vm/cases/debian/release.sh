# Everything that was changed is put back, for jobs of every kind: a dump of the node after `release --all` is that of
# before, and so is one after the package was removed while jobs were confined.
# without pjw
# deadline: 420
. /cases/functions

settled() { pgrep -u alice -f '^sleep 1001' && pgrep -u alice -f '^sleep 1002' && [ "$(pgrep -cu bob -x sleep)" -ge 4 ]; } >/dev/null
sessions() { pgrep -u bob -f "^[^ ]*sleep $1\$"; }
is_on() { confined "$(cpus "$1")" $(sessions "$2"); }
changed() { ! diff /tmp/before "$1" >&2; }
scopes() { systemctl list-units --all --plain --no-legend -t scope,slice | awk '{ print $1, $2, $3, $4 }'; }
no_scopes() { ! scopes | grep -E 'pjw-.*scope' >&2; }
# The kernel lets nobody empty a cpuset that has processes: all CPUs mean the same there.
dump() {
    dump_threads "$1.threads"
    dump_node "$1"
    sed -i 's|\(/job_[0-9]*/cpuset.cpus\):0-15$|\1:|' "$1"
    { scopes; for pid in $watched; do echo "$pid $(masks "$pid") $(cat "/proc/$pid/cgroup")"; done; } >>"$1"
}
# confine: jobs of all kinds, with walls and without.
confine() {
    start_pjw 'user_max_cores = 1'
    pjwctl assign session --cores 1 $(printf ' --pid %s' $(sessions 1003)) >&2
    pjwctl assign some --cores 1 --pid "$(sessions 1004 | head -n 1)" >&2
    pjwctl assign service --cores 1 --pid "$(sessions 1005)" >&2
    pjwctl run --cores 1 --bind-memory --job command -- sleep 1006 >&2 &
    command=$!
    # A scope that loses its last process ends: there is no way back for that one.
    systemd-run --quiet --scope --unit run-lone --uid bob sleep 1007 >&2 &
    eventually "a scope of one process runs" sessions 1007
    pjwctl assign lone --cores 1 --pid "$(sessions 1007)" >&2
    eventually "Slurm's job holds cores" holds "slurm:$job"
    eventually "it is on them" job_is_confined "$job"
    eventually "a session's processes are on the cores they were assigned" is_on manual:session 1003
    eventually "one of two is" confined "$(cpus manual:some)" "$(sessions 1004 | head -n 1)"
    eventually "one of a service is" is_on manual:service 1005
    eventually "a command is on its own" confined "$(cpus manual:command)" $command
    check "Slurm's job by a cpuset" [ "$(field "slurm:$job" enforcement)" = cpuset ]
    check "who is in a session by a cpuset" [ "$(field manual:some enforcement)" = cpuset ]
    check "who is in a service by masks" [ "$(field manual:service enforcement)" = affinity ]
}

if has_deb; then install_deb; else install_pjw; fi
begin_job() {
    job=$(submit alice -n1 -c4 <<<'taskset -c 5 sleep 1001 & sleep 1002')
    eventually "Slurm's job has its processes" settled
    watched="$(sessions 1003) $(sessions 1004) $(sessions 1005) $(pgrep -u alice sleep)"
    dump /tmp/before
}
# Sessions and commands as systemd makes them: one that is assigned whole, one of which one process is, a service.
bobs() { systemd-run --quiet --uid bob "$@"; }
runuser -u bob -- sleep 0
systemd-run --quiet --scope --unit run-whole --uid bob bash -c 'taskset -c 9 sleep 1003 & sleep 1003 & wait' &
systemd-run --quiet --scope --unit run-part --uid bob bash -c 'sleep 1004 & sleep 1004 & wait' &
bobs --unit bobs sleep 1005
begin_job

confine
dump /tmp/now
check "the node is not as it was" changed /tmp/now
check "everything is released" pjwctl release --all
check "the command may run anywhere" [ "$(masks $command)" = 0-15 ]
check "who has nowhere to go back to may, too" [ "$(masks $(sessions 1007))" = 0-15 ]
kill $command $(sessions 1007)
eventually "their scopes end" no_scopes
systemctl disable --now pjwd.service pjwd.socket >&2
dump /tmp/released
check "the node is as before" diff /tmp/before /tmp/released
check "every thread that lived through it has its mask" same_threads /tmp/before.threads /tmp/released.threads
check "and had lost some" eval '! same_threads /tmp/before.threads /tmp/now.threads'

if ! has_deb; then echo "ok no package was built: its removal can't be tried # skipped"; exit 0; fi
# A job that was released stays released.
scancel "$job"
eventually "Slurm's first job is over" is_over "$job"
begin_job
confine
dump /tmp/now
check "the node is not as it was, again" changed /tmp/now
check "the package is removed while jobs are confined" dpkg -r pjw
check "the second command may run anywhere" [ "$(masks $command)" = 0-15 ]
check "who has nowhere to go back to may, again" [ "$(masks $(sessions 1007))" = 0-15 ]
kill $command $(sessions 1007)
eventually "their scopes end again" no_scopes
dump /tmp/removed
check "the node is as before the package" diff /tmp/before /tmp/removed
check "every thread that lived through that has its mask" same_threads /tmp/before.threads /tmp/removed.threads
check "nothing of it runs or is there" sh -c '! pgrep -x pjwd && ! [ -e /usr/bin/pjwd ]'
