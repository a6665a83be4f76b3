# A job tries to leave its cores: forks, new sessions, double forks and 64 threads, each of which requests a mask of all CPUs. In a
# cpuset none of them leaves the cores at any time, whether pjwd runs or not. Without one, pjwd restores the masks and reports it.
. /cases/functions

attempt="python3 /cases/escape.py"
# A job begins its attempts when its cpuset is complete: it starts on masks, because systemd may take long to make a scope.
twice="until [ -e /tmp/begin ]; do sleep 0.1; done; $attempt /tmp/NAME.first & until [ -e /tmp/stopped ]; do sleep 0.1; done; $attempt /tmp/NAME.second & wait"
attempts_are_done() { grep -qx end "/tmp/$1"; }
# Whether all attempts are in the file, each with a mask inside the list right after the request for all CPUs.
never_left() {
    [ "$(grep -c ' ' "/tmp/$1")" = 68 ] || return 1
    local how mask
    grep ' ' "/tmp/$1" | sort -u | while read -r how mask; do
        within "$mask" "$2" || { echo "$how: $mask is not in $2" >&2; return 1; }
    done
}
has_event() { pjwctl events --json | grep "\"event\":\"$1\"" | grep -q "\"job\":\"$2\""; }
of_user() { pgrep -u "$1" -f escape.py; }
user_is_on() { local pids; pids=$(of_user "$1"); [ -n "$pids" ] && confined "$2" $pids; }
in_scope() { grep -q "/pjw.slice/pjw-$1.scope\$" "/proc/$(cut -d' ' -f1 <<<"$2")/cgroup"; }

start_pjw 'user_max_cores = 2'
job=$(submit bob -n4 <<<"${twice//NAME/slurm}")
as alice pjwctl run --cores 2 --job users -- bash -c "${twice//NAME/users}" >&2 &
users=$!
pjwctl run --cores 1 --job roots -- bash -c "${twice//NAME/roots}" >&2 &
roots=$!
for each in "slurm:$job" manual:users manual:roots; do eventually "$each holds cores before its attempts" holds "$each"; done
slurm_cpus=$(cpus "slurm:$job") users_cpus=$(cpus manual:users) roots_cpus=$(cpus manual:roots)
eventually "Slurm's job is confined by a cpuset" is_by_cpuset "slurm:$job"
cpuset_is_grant() { [ "$(cpuset_of_job "$job")" = "$slurm_cpus" ]; }
eventually "the cgroup of Slurm's job has the CPUs of the grant" cpuset_is_grant
for each in users roots; do
    eventually "job $each is confined by a cpuset" is_by_cpuset manual:$each
    check "the systemd scope of job $each has the CPUs of the job" [ "$(cat "/sys/fs/cgroup/pjw.slice/pjw-$each.scope/cpuset.cpus.effective")" = "$(cpus manual:$each)" ]
done
touch /tmp/begin
for each in slurm users roots; do eventually "all attempts of job $each are done" attempts_are_done $each.first; done
check "Slurm's job never left its cores" never_left slurm.first "$slurm_cpus"
check "alice's command never left its cores" never_left users.first "$users_cpus"
check "root's command never left its cores" never_left roots.first "$roots_cpus"
eventually "every thread of Slurm's job is on its cores" job_is_confined "$job"
for each in "slurm:$job" manual:users manual:roots; do eventually "the attempts of $each are reported as a violation" has_event violation "$each"; done

daemon=$(main_pid)
kill -STOP "$daemon"
touch /tmp/stopped
for each in slurm users roots; do eventually "all attempts of job $each are done while pjwd is stopped" attempts_are_done $each.second; done
check "Slurm's job never left its cores while pjwd was stopped" never_left slurm.second "$slurm_cpus"
check "alice's command never left its cores while pjwd was stopped" never_left users.second "$users_cpus"
check "root's command never left its cores while pjwd was stopped" never_left roots.second "$roots_cpus"
check "every thread of Slurm's job is on the same cores" job_is_on "$job" "$slurm_cpus"
kill -CONT "$daemon"

# Root can move a process of its job out of the cgroup. pjwd moves it back and reports it.
moved=$(pgrep -u root -f 'escape.py /tmp/roots.first' | head -n 1)
echo "$moved" >/sys/fs/cgroup/cgroup.procs
eventually "a process that was moved out of the cgroup is moved back" grep -q pjw-roots.scope "/proc/$moved/cgroup"
eventually "the moved process is reported as a stray" has_event stray manual:roots
eventually "the threads of the moved process are on the cores of the job" confined "$roots_cpus" "$moved"

# Without cpusets, a thread leaves its cores for a short time. pjwd restores its mask and reports a violation.
scancel "$job"
kill $(process_tree $users) $(process_tree $roots) $(pgrep -f escape.py)
eventually "all cores are free after the jobs with cpusets" is_free 0-15
printf '%s\n' 'enforcement = "affinity"' 'user_max_cores = 2' >/etc/pjw/pjwd.toml
check "pjwctl reload accepts enforcement by masks" pjwctl reload
job=$(submit bob -n4 <<<"until [ -e /tmp/go ]; do sleep 0.1; done; $attempt /tmp/slurm.third")
as alice pjwctl run --cores 2 --job masked -- bash -c "until [ -e /tmp/go ]; do sleep 0.1; done; $attempt /tmp/masked.third" >&2 &
eventually "Slurm's job holds cores" holds "slurm:$job"
eventually "alice's command holds cores" holds manual:masked
check "alice's command is confined by masks" [ "$(field manual:masked enforcement)" = affinity ]
check "Slurm's job is confined by masks" [ "$(field "slurm:$job" enforcement)" = affinity ]
eventually "every thread of Slurm's job is on its cores with masks" job_is_confined "$job"
touch /tmp/go
for each in slurm masked; do eventually "all attempts of job $each are done without a cpuset" attempts_are_done $each.third; done
eventually "the attempts of alice's command are reported as a violation" has_event violation manual:masked
eventually "the attempts of Slurm's job are reported as a violation" has_event violation "slurm:$job"
eventually "alice's command is on its cores again" user_is_on alice "$(cpus manual:masked)"
eventually "Slurm's job is on its cores again" job_is_confined "$job"
