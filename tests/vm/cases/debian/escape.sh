# A job that does what it can to leave its cores: forks, sessions, double forks, 64 threads, each with a mask of all
# CPUs. A wall doesn't let go for an instant, whether the warden runs or not; masks are put back, and that is told.
. /cases/functions

flee="python3 /cases/escape.py"
twice="$flee /tmp/NAME.first & until [ -e /tmp/stopped ]; do sleep 0.1; done; $flee /tmp/NAME.second & wait"
has_tried() { grep -qx end "/tmp/$1"; }
# Every try: its mask right after it asked for all CPUs.
never_left() {
    [ "$(grep -c ' ' "/tmp/$1")" = 68 ] || return 1
    local how mask
    grep ' ' "/tmp/$1" | sort -u | while read -r how mask; do
        within "$mask" "$2" || { echo "$how: $mask is not in $2" >&2; return 1; }
    done
}
tells() { pjwctl events --json | grep "\"event\":\"$1\"" | grep -q "\"job\":\"$2\""; }
of_user() { pgrep -u "$1" -f escape.py; }
user_is_on() { local pids; pids=$(of_user "$1"); [ -n "$pids" ] && confined "$2" $pids; }
in_scope() { grep -q "/pjw.slice/pjw-$1.scope\$" "/proc/$(cut -d' ' -f1 <<<"$2")/cgroup"; }

start_pjw 'user_max_cores = 2'
job=$(submit bob -n4 <<<"${twice//NAME/slurm}")
as alice pjwctl run --cores 2 --job users -- bash -c "${twice//NAME/users}" >&2 &
users=$!
pjwctl run --cores 1 --job roots -- bash -c "${twice//NAME/roots}" >&2 &
roots=$!
for who in slurm users roots; do eventually "all of $who has tried" has_tried $who.first; done
slurm_cpus=$(cpus "slurm:$job") users_cpus=$(cpus manual:users) roots_cpus=$(cpus manual:roots)
check "Slurm's job is kept by a cpuset" [ "$(field "slurm:$job" enforcement)" = cpuset ]
check "its directory has it" [ "$(cpuset_of_job "$job")" = "$slurm_cpus" ]
for who in users roots; do
    check "$who is kept by a cpuset" [ "$(field manual:$who enforcement)" = cpuset ]
    check "in a scope of systemd's" [ "$(cat "/sys/fs/cgroup/pjw.slice/pjw-$who.scope/cpuset.cpus.effective")" = "$(cpus manual:$who)" ]
done
check "alice's command never left" never_left users.first "$users_cpus"
check "root's command never left" never_left roots.first "$roots_cpus"
eventually "every thread of Slurm's job is inside" job_is_confined "$job"
for who in "slurm:$job" manual:users manual:roots; do eventually "that $who tried is told" tells violation "$who"; done

daemon=$(main_pid)
kill -STOP "$daemon"
touch /tmp/stopped
for who in slurm users roots; do eventually "beside a warden that hangs, all of $who has tried" has_tried $who.second; done
check "Slurm's job never left" never_left slurm.second "$slurm_cpus"
check "alice's command never left again" never_left users.second "$users_cpus"
check "root's command never left again" never_left roots.second "$roots_cpus"
check "every thread of Slurm's job is where it was" job_is_on "$job" "$slurm_cpus"
kill -CONT "$daemon"

# What root can do is to move its process out of the wall: it is fetched back, and told.
fled=$(pgrep -u root -f 'escape.py /tmp/roots.first' | head -n 1)
echo "$fled" >/sys/fs/cgroup/cgroup.procs
eventually "who was moved out of the wall is in it again" grep -q pjw-roots.scope "/proc/$fled/cgroup"
eventually "that is told" tells stray manual:roots
eventually "its threads are inside" confined "$roots_cpus" "$fled"

# Without walls: outside for a moment, and a violation.
scancel "$job"
kill $(process_tree $users) $(process_tree $roots) $(pgrep -f escape.py)
eventually "all is over" is_free 0-15
printf '%s\n' 'enforcement = "affinity"' 'user_max_cores = 2' >/etc/pjw/pjwd.toml
check "the warden is told to use masks" pjwctl reload
job=$(submit bob -n4 <<<"until [ -e /tmp/go ]; do sleep 0.1; done; $flee /tmp/slurm.third")
as alice pjwctl run --cores 2 --job masked -- bash -c "until [ -e /tmp/go ]; do sleep 0.1; done; $flee /tmp/masked.third" >&2 &
eventually "Slurm's job holds cores" holds "slurm:$job"
eventually "alice's command holds cores" holds manual:masked
check "by masks" [ "$(field manual:masked enforcement)" = affinity ]
check "also Slurm's" [ "$(field "slurm:$job" enforcement)" = affinity ]
eventually "Slurm's job is on its cores" job_is_confined "$job"
touch /tmp/go
for who in slurm masked; do eventually "all of $who has tried without a wall" has_tried $who.third; done
eventually "what left is told" tells violation manual:masked
eventually "also of Slurm's job" tells violation "slurm:$job"
eventually "alice's command is put back" user_is_on alice "$(cpus manual:masked)"
eventually "Slurm's job is put back" job_is_confined "$job"
