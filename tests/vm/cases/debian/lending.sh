# Lent cores under systemd and cgroup v2: the configuration promises cores to a unit, a besteffort job borrows those that the unit
# leaves idle, at idle priority, and loses them when the unit works. A borrower of a plain user gets the revocation signal. A
# frozen borrower runs again after pjwd was killed. A release undoes everything.
# deadline: 480
# alone
. /cases/functions

lent() { field manual:web lent; }
is_lent() { within "$(lent)" "$web_cpus"; }
keeps_a_buffer() { [ "$(each_cpu "$(lent)" | wc -l)" -le 6 ]; }
is_returned() { holds manual:web && [ -z "$(lent)" ]; }
# whole_cores LIST: the guest's cores are the pairs 0-1, 2-3 and so on.
whole_cores() {
    local cpu
    expand "$1"
    for cpu in $expanded; do
        case $expanded in *" $((cpu ^ 1)) "*) ;; *) return 1 ;; esac
    done
}
cgroup_of() { cut -d: -f3 "/proc/$1/cgroup"; }
in_slice() { case $(cgroup_of "$1") in /pjw_besteffort.slice/*) ;; *) return 1 ;; esac; }
web_has() { [ "$(field manual:web processes)" -ge "$1" ]; }
web_is_on() { confined "$1" $(process_tree "$web"); }
batch_has_what_is_lent() { within "$(lent)" "$(cpus manual:batch)"; }
batch_is_on_its_cores() { confined "$(cpus manual:batch)" $(process_tree "$batch"); }
batch_has_none_of() { holds_none_of manual:batch "$1" && batch_is_on_its_cores; }
has_event() { pjwctl events --json | tr -d ' ' | grep -q "\"event\":\"$1\""; }
explains() { pjwctl explain web | tr '\n' ' ' | tr -s ' ' | grep -q "$1"; }
is_back() { [ "$(cgroup_of "$batch")" = "$before" ] && [ "$(masks $(process_tree "$batch"))" = 0-15 ]; }
no_borrower_left() { [ -z "$(find /sys/fs/cgroup/pjw_besteffort.slice -mindepth 1 -type d 2>/dev/null)" ]; }
has_noted() { [ -s /home/alice/told ]; }
has_no_warning() { local status; status=$(pjwctl status --json) && ! grep -q "$1" <<<"$status"; }
has_warning() { pjwctl status --json | grep -q "$1"; }
is_in_state() { [ "$(sed -n 's/^frozen //p' "/sys/fs/cgroup$(cgroup_of "$noter")/cgroup.events")" = "$1" ]; }
ticks_of() { sed 's/.*) //' "/proc/$1/stat" | cut -d' ' -f12; }
has_run_since() { [ "$(ticks_of "$noter")" -gt "$1" ]; }
daemon_is_killed() { [ "$(property pjwd.service ActiveState)" = failed ]; }
web_is_free() { [ "$(masks $(process_tree "$web"))" = 0-15 ]; }

# The unit reads a line from a pipe, and then four of its processes compute as long as a file is there.
cat >/usr/local/bin/web <<'END'
#!/bin/sh
while read -r _ </run/web.pipe; do
    for n in 1 2 3 4; do while [ -e /run/work ]; do :; done & done
    wait
done
END
mkfifo /run/web.pipe
chmod +x /usr/local/bin/web
printf '[Service]\nExecStart=/usr/local/bin/web\n' >/etc/systemd/system/web.service
systemctl daemon-reload
start_pjw '[lending]' 'enabled = true' 'buffer = 1' 'lend_after = "500ms"' 'revocation_signal = "SIGWINCH"' 'starved = "freeze"' \
    '[[provision]]' 'name = "web"' 'cores = 4' 'match = "unit=web.service"'
check "the cores are promised before the unit runs" holds manual:web
web_cpus=$(cpus manual:web)
check "they are four whole cores" [ "$(each_cpu "$web_cpus" | wc -l)" = 8 ]
check "of one NUMA node" in_one_node "$web_cpus"
check "a rule without a process is told" sh -c 'pjwctl status --json | grep -q unmatched-rule'
systemctl start web.service
web=$(main_pid web.service)
eventually "the unit is recognised without a command" web_has 1
eventually "it runs on its cores" web_is_on "$web_cpus"

# Six processes that always run, and one that runs for a short time, again and again.
cat >/usr/local/bin/now-and-then <<'END'
#!/bin/sh
while :; do
    n=0
    while [ $n -lt 500 ]; do n=$((n + 1)); done
    sleep 0.1
done
END
chmod +x /usr/local/bin/now-and-then
before=$(cgroup_of $$)
pjwctl run --job batch --cores 8 --class besteffort -- \
    sh -c '/usr/local/bin/now-and-then & for n in 1 2 3 4 5 6; do sh -c "while :; do :; done" & done; wait' >&2 &
batch=$!
eventually "a besteffort job runs on the free cores" holds manual:batch
# How many are lent changes with the daemons of the machine, which run on these cores too.
eventually "cores that the unit leaves idle are lent" is_lent
check "they are whole cores" whole_cores "$(lent)"
check "at least one core stays the buffer" keeps_a_buffer
eventually "the borrower may use them" batch_has_what_is_lent
eventually "and no others" batch_is_on_its_cores
check "the unit's processes may still use all of theirs" web_is_on "$web_cpus"
check "the borrower is in the slice of borrowers" in_slice "$batch"
check "which has idle priority" [ "$(cat /sys/fs/cgroup/pjw_besteffort.slice/cpu.idle)" = 1 ]
check "and holds only the cgroups of borrowers" prints_nothing cat /sys/fs/cgroup/pjw_besteffort.slice/cgroup.procs
eventually "explain says to which job they are lent" explains 'lent to manual:batch'

touch /run/work
echo >/run/web.pipe
eventually "the cores are back when the unit works" is_returned
eventually "no thread of the borrower may use them" batch_has_none_of "$web_cpus"
eventually "the events say that they were taken back" has_event revoked
eventually "and that the unit has them" has_event returned
rm /run/work
eventually "they are lent again when the unit is idle" is_lent

# No thread of this process is hot.
part=$(pgrep -x now-and-then)
check "a process of the borrower takes a real-time priority" chrt -r -p 1 "$part"
eventually "status warns of the priority" has_warning realtime-borrower
eventually "nothing is lent to it" is_returned
check "it gives the priority up" chrt -o -p 0 "$part"

check "the borrower is released" pjwctl release batch
check "nothing is lent" is_returned
eventually "its processes are where they were, with their masks" is_back
eventually "no cgroup of a borrower is left" no_borrower_left

pjwctl run --job noter --cores 8 --class besteffort -- setpriv --reuid=alice --regid=alice --clear-groups \
    sh -c 'cd /home/alice; trap "echo told >>told" WINCH; echo $$ >pid; while :; do :; done' >&2 &
eventually "a program of a user begins as a borrower" test -s /home/alice/pid
noter=$(cat /home/alice/pid)
eventually "cores of the unit are lent to it" is_lent
touch /run/work
echo >/run/web.pipe
eventually "the user's program gets the signal when the unit works" has_noted
eventually "the unit has its cores again" is_returned
check "pjwd was allowed to send the signal" has_no_warning revocation-signal
rm /run/work

check "the unit wants all its cores" pjwctl want web 4
sleep 1000 &
rest=$!
check "another job has all others" pjwctl assign rest --cores all --pid "$rest"
eventually "the borrower without a core is frozen" is_in_state 1
# No other daemon may freeze it again.
mkdir -p /etc/systemd/system/pjwd.service.d
printf '[Service]\nRestart=no\n' >/etc/systemd/system/pjwd.service.d/once.conf
systemctl daemon-reload
ran=$(ticks_of "$noter")
kill -KILL "$(main_pid)"
eventually "pjwd is killed" daemon_is_killed
eventually "the borrower is not frozen after that" is_in_state 0
eventually "it runs" has_run_since "$ran"
check "no daemon has thawed it" daemon_is_killed
systemctl start pjwd.service
eventually "the next daemon freezes it again" is_in_state 1
check "it is released" pjwctl release noter
check "so is the other job" pjwctl release rest
check "the unit wants no number of cores" pjwctl want web default
kill "$noter" "$rest"
check "the unit keeps its cores" [ "$(cpus manual:web)" = "$web_cpus" ]
check "the unit thaws borrowers after its end" sh -c 'systemctl show pjwd.service -p ExecStopPost | grep -q -e --thaw'
systemctl stop pjwd.service
check "which succeeds" sh -c 'systemctl show pjwd.service -p ExecStopPost | grep -q "status=0"'
check "release-all undoes the rest" pjwd --release-all
eventually "the unit may run everywhere" web_is_free
kill $(process_tree "$batch")
