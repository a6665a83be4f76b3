# Lent cores under systemd and cgroup v2. The configuration provisions cores for a unit. A besteffort job borrows those that the unit
# leaves idle, at idle priority, and loses them when the unit computes. A borrower of a plain user gets the revocation signal. A
# frozen borrower runs again after pjwd was killed. A release undoes everything.
# deadline: 960
# alone
. /cases/functions

lent() { field manual:web lent; }
is_lent() { within "$(lent)" "$web_cpus"; }
buffer_is_kept() { [ "$(each_cpu "$(lent)" | wc -l)" -le 6 ]; }
is_returned() { holds manual:web && [ -z "$(lent)" ]; }
# whole_cores LIST: whether the list has only whole cores. The cores of the guest are the pairs 0-1, 2-3 and so on.
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
explain_has() { pjwctl explain web | tr '\n' ' ' | tr -s ' ' | grep -q "$1"; }
batch_is_restored() { [ "$(cgroup_of "$batch")" = "$before" ] && [ "$(masks $(process_tree "$batch"))" = 0-15 ]; }
no_borrower_left() { [ -z "$(find /sys/fs/cgroup/pjw_besteffort.slice -mindepth 1 -type d 2>/dev/null)" ]; }
has_signal() { [ -s /home/alice/signal ]; }
has_no_warning() { local status; status=$(pjwctl status --json) && ! grep -q "$1" <<<"$status"; }
has_warning() { pjwctl status --json | grep -q "$1"; }
frozen_is() { [ "$(sed -n 's/^frozen //p' "/sys/fs/cgroup$(cgroup_of "$notified")/cgroup.events")" = "$1" ]; }
ticks_of() { sed 's/.*) //' "/proc/$1/stat" | cut -d' ' -f12; }
has_run_since() { [ "$(ticks_of "$notified")" -gt "$1" ]; }
daemon_is_killed() { [ "$(property pjwd.service ActiveState)" = failed ]; }
web_is_restored() { [ "$(masks $(process_tree "$web"))" = 0-15 ]; }

# The unit waits for a line in a pipe. Then four of its processes compute while the file /run/work exists.
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
# systemd must not restart pjwd after it was killed below, because the next daemon would freeze the borrower again.
mkdir -p /etc/systemd/system/pjwd.service.d
printf '[Service]\nRestart=no\n' >/etc/systemd/system/pjwd.service.d/once.conf
systemctl daemon-reload
start_pjw '[lending]' 'enabled = true' 'buffer = 1' 'lend_after = "500ms"' 'revocation_signal = "SIGWINCH"' 'starved = "freeze"' \
    '[[provision]]' 'name = "web"' 'cores = 4' 'match = "unit=web.service"'
check "the unit's cores are provisioned before it runs" holds manual:web
web_cpus=$(cpus manual:web)
check "the provisioned cores are four whole cores" [ "$(each_cpu "$web_cpus" | wc -l)" = 8 ]
check "the provisioned cores are in one NUMA node" in_one_node "$web_cpus"
check "status warns of a rule that matches no process" sh -c 'pjwctl status --json | grep -q unmatched-rule'
systemctl start web.service
web=$(main_pid web.service)
eventually "the unit is recognised without a command" web_has 1
eventually "the unit runs on its cores" web_is_on "$web_cpus"

# Six processes that always compute, and one that computes for 10 to 20 ms, again and again: until the time since the boot, which has
# hundredths of a second, has changed twice. So its share of a core depends little on the speed of the machine.
cat >/usr/local/bin/short-bursts <<'END'
#!/bin/sh
while :; do
    for change in 1 2; do
        read -r before _ </proc/uptime
        now=$before
        while [ "$now" = "$before" ]; do read -r now _ </proc/uptime; done
    done
    sleep 0.1
done
END
chmod +x /usr/local/bin/short-bursts
before=$(cgroup_of $$)
pjwctl run --job batch --cores 8 --class besteffort -- \
    sh -c '/usr/local/bin/short-bursts & for n in 1 2 3 4 5 6; do sh -c "while :; do :; done" & done; wait' >&2 &
batch=$!
eventually "the besteffort job holds free cores" holds manual:batch
# The number of lent cores changes: daemons of the machine run on these cores, too.
eventually "cores that the unit leaves idle are lent" is_lent
check "the lent cores are whole cores" whole_cores "$(lent)"
check "at least one core stays in the buffer" buffer_is_kept
eventually "the borrower holds the lent cores" batch_has_what_is_lent
eventually "every thread of the borrower is on the cores that it holds" batch_is_on_its_cores
check "the masks of the unit's processes still have all its cores" web_is_on "$web_cpus"
eventually "the borrower is in the slice of borrowers" in_slice "$batch"
check "the slice of borrowers has idle priority" [ "$(cat /sys/fs/cgroup/pjw_besteffort.slice/cpu.idle)" = 1 ]
check "the slice of borrowers has no processes of its own" prints_nothing cat /sys/fs/cgroup/pjw_besteffort.slice/cgroup.procs
eventually "explain shows to which job the cores are lent" explain_has 'lent to manual:batch'

touch /run/work
echo >/run/web.pipe
eventually "the cores are returned when the unit computes" is_returned
eventually "no thread of the borrower may use the returned cores" batch_has_none_of "$web_cpus"
eventually "an event reports that the cores were revoked" has_event revoked
eventually "an event reports that the cores were returned" has_event returned
rm /run/work
eventually "cores are lent again when the unit is idle" is_lent

# A process without a hot thread is chosen. The oldest one: a child that will execute sleep has the same name for a moment.
oldest_burst() { pgrep -o -x short-bursts; }
eventually "the borrower has a process without a hot thread" oldest_burst
part=$(oldest_burst)
check "a process of the borrower gets a real-time priority" chrt -r -p 1 "$part"
eventually "status warns of the real-time priority" has_warning realtime-borrower
eventually "no cores are lent to a borrower with a real-time priority" is_returned
check "the process has a normal priority again" chrt -o -p 0 "$part"

check "the borrower can be released" pjwctl release batch
eventually "no cores are lent after the release" is_returned
eventually "the processes of the borrower are in their former cgroup, with their masks" batch_is_restored
eventually "no cgroup of a borrower is left" no_borrower_left
# The released processes would compute until the end of the case, and everything else would be slow.
kill $(process_tree "$batch")

pjwctl run --job notified --cores 8 --class besteffort -- setpriv --reuid=alice --regid=alice --clear-groups \
    sh -c 'cd /home/alice; trap "echo signal >>signal" WINCH; echo $$ >pid; while :; do :; done' >&2 &
eventually "a user's program runs as a borrower" test -s /home/alice/pid
notified=$(cat /home/alice/pid)
eventually "cores of the unit are lent to the user's program" is_lent
touch /run/work
echo >/run/web.pipe
eventually "the user's program gets the signal when the unit computes" has_signal
eventually "the unit has its cores again after the signal" is_returned
check "status has no warning that the signal failed" has_no_warning revocation-signal
rm /run/work

check "pjwctl want sets the wanted cores of the unit to all its cores" pjwctl want web 4
sleep 1000 &
rest=$!
check "another job gets all free cores" pjwctl assign rest --cores all --pid "$rest"
eventually "a borrower without a core is frozen" frozen_is 1
ran=$(ticks_of "$notified")
kill -KILL "$(main_pid)"
eventually "pjwd is killed" daemon_is_killed
eventually "the borrower is thawed after pjwd was killed" frozen_is 0
eventually "the borrower runs after pjwd was killed" has_run_since "$ran"
check "pjwd was not started again meanwhile" daemon_is_killed
systemctl start pjwd.service
eventually "the next daemon freezes the borrower again" frozen_is 1
check "the frozen borrower can be released" pjwctl release notified
check "the other job can be released" pjwctl release rest
check "pjwctl want resets the wanted cores of the unit" pjwctl want web default
kill "$notified" "$rest"
check "the unit holds the same cores" [ "$(cpus manual:web)" = "$web_cpus" ]
check "the unit of pjwd thaws borrowers after its end" sh -c 'systemctl show pjwd.service -p ExecStopPost | grep -q -e --thaw'
systemctl stop pjwd.service
check "the thaw command succeeds" sh -c 'systemctl show pjwd.service -p ExecStopPost | grep -q "status=0"'
check "pjwd --release-all succeeds" pjwd --release-all
eventually "the unit may run on all CPUs" web_is_restored
