# pjwd under systemd: it reports when it is ready, a connection to its socket starts it, and the hardening of the unit does not prevent
# its work. Grants stay after a restart and after a kill.
# without pjw
. /cases/functions

is_active() { [ "$(systemctl is-active "$1")" = active ]; }
restarted() { [ "$(main_pid)" != "$1" ] && [ "$(main_pid)" != 0 ] && is_active pjwd.service; }
is_confined() { confined "$(cpus "$1")" $(process_tree "$2"); }
has_masks() { [ "$(masks $(process_tree "$1"))" = "$2" ]; }
lacks() { ! "$@"; }
in_journal() { journalctl -u pjwd -o json --no-pager "$@" | grep -q .; }

install_pjw
check "systemd-analyze verify accepts the units" systemd-analyze verify /usr/lib/systemd/system/pjwd.service /usr/lib/systemd/system/pjwd.socket
systemctl start pjwd.socket
check "pjwd does not run before a connection to its socket" [ "$(main_pid)" = 0 ]
check "a connection starts pjwd and is answered" answers
check "the answering pjwd is the service" [ "$(pjwctl status --json | tr -d ' \n' | grep -o '"pid":[0-9]*' | cut -d: -f2)" = "$(main_pid)" ]
check "a user without the right to change anything can read the status" as alice pjwctl status

systemctl stop pjwd.service pjwd.socket
systemctl enable --now pjwd.service >&2
check "the service is active" is_active pjwd.service
check "pjwd answers as soon as the service is active" answers
eventually "the journal has entries of pjwd" in_journal
check "pjwd gets process events by netlink" sh -c 'pjwctl status --json | tr -d " \n" | grep -q "\"discovery\":\"netlink\""'

# pjwd changes the masks of other users' processes and reads their environment. The hardening must allow this.
as alice sh -c 'sleep 1000 & sleep 1000 & wait' &
a=$!
as bob taskset -c 3 sleep 1000 &
b=$!
started() { [ "$(process_tree $a | wc -l)" -ge 3 ] && [ "$(masks "$(pgrep -u bob sleep)")" = 3 ]; }
eventually "the users' processes run" started
bob_pid=$(pgrep -u bob sleep)
check "pjwctl assign of alice's processes succeeds" pjwctl assign a --cores 3 $(process_tree $a | sed 's/^/--pid /')
check "pjwctl assign of bob's process succeeds" pjwctl assign b --cores 1 --pid "$bob_pid"
eventually "every thread of alice's processes is on the cores of their job" is_confined manual:a $a
eventually "bob's process is on the cores of its job" is_confined manual:b "$bob_pid"
a_cpus=$(cpus manual:a) b_cpus=$(cpus manual:b)
check "no CPU belongs to both jobs" disjoint "$a_cpus" "$b_cpus"
eventually "the journal has the kind of an event" in_journal PJW_EVENT=assigned
eventually "the journal has the job of an event" in_journal PJW_JOB=manual:a
eventually "events in the journal have the identifier of pjwd" in_journal SYSLOG_IDENTIFIER=pjwd PJW_EVENT=assigned

was=$(main_pid)
systemctl restart pjwd.service
check "the restarted service is another process" [ "$(main_pid)" != "$was" ]
check "alice's job holds the same cores after the restart" [ "$(cpus manual:a)" = "$a_cpus" ]
check "bob's job holds the same cores after the restart" [ "$(cpus manual:b)" = "$b_cpus" ]

was=$(main_pid)
kill -9 "$was"
check "alice's processes stay on their cores while no pjwd runs" confined "$a_cpus" $(process_tree $a)
eventually "systemd starts pjwd again after a kill" restarted "$was"
eventually "pjwd answers after the kill" answers
check "alice's job holds the same cores after the kill" [ "$(cpus manual:a)" = "$a_cpus" ]
check "bob's job holds the same cores after the kill" [ "$(cpus manual:b)" = "$b_cpus" ]
eventually "alice's processes are on the cores of their job after the kill" is_confined manual:a $a

echo 'interval = "500ms"' >/etc/pjw/pjwd.toml
check "systemctl reload succeeds" systemctl reload pjwd.service
eventually "an event reports the reload" sh -c 'pjwctl events --json | grep -q reloaded'
systemctl daemon-reload
check "systemctl daemon-reload does not move alice's processes" is_confined manual:a $a

# Another program removes the files of pjwd in /run. pjwd makes them again, also the socket of systemd, and the hardening must allow
# this. pjwd is stopped by a signal meanwhile: it would make files again in a directory that is being removed.
has_socket_warning() { pjwctl status --json | grep -q '"socket-removed"'; }
rm /run/pjwd/pjwd.sock
eventually "pjwd answers after its socket was removed" answers
sleep 1000 &
c=$!
was=$(main_pid)
kill -STOP "$was"
rm -rf /run/pjwd /run/pjwd-lock
kill -CONT "$was"
eventually "pjwd answers after its directories were removed" answers
eventually "a process can be assigned after the removal" pjwctl assign c --cores 1 --pid $c
eventually "the files are there again" sh -c "[ -s /run/pjwd/state.json ] && [ -s /run/pjwd-lock/warden.lock ]"
check "pjwd has not been restarted" [ "$(main_pid)" = "$was" ]
eventually "a warning says that systemd does not know the socket" has_socket_warning
c_cpus=$(cpus manual:c)
kill -9 "$was"
eventually "systemd starts pjwd again after the removal and a kill" restarted "$was"
eventually "pjwd answers after the removal and a kill" answers
check "alice's job holds the same cores after the removal and a kill" [ "$(cpus manual:a)" = "$a_cpus" ]
check "the later job holds the same cores after the kill" [ "$(cpus manual:c)" = "$c_cpus" ]
systemctl stop pjwd.service pjwd.socket && systemctl start pjwd.service
check "pjwd answers at the new socket of systemd" answers
check "the warning is gone with the new socket of systemd" lacks has_socket_warning
# The socket has the users that its unit says, also if pjwd makes it again. A stop of the unit is not undone.
chmod 0600 /run/pjwd/pjwd.sock
was=$(main_pid)
systemctl restart pjwd.service
eventually "systemd restarts pjwd with the same socket" restarted "$was"
rm /run/pjwd/pjwd.sock
eventually "pjwd answers after its socket was removed once more" answers
check "the new socket has the mode of the earlier one" [ "$(stat -c %a /run/pjwd/pjwd.sock)" = 600 ]
systemctl stop pjwd.socket
eventually "pjwd notices that its socket unit was stopped" sh -c 'journalctl --no-pager -u pjwd.service | grep -q "the socket unit was stopped"'
check "the socket is not made again" [ ! -e /run/pjwd/pjwd.sock ]
systemctl stop pjwd.service && systemctl start pjwd.service
check "pjwd answers at the socket after both units were started" answers
check "pjwctl release of the later job succeeds" pjwctl release c
eventually "its process may run on all CPUs after the release" has_masks $c 0-15
kill $c

check "pjwctl release --all succeeds" pjwctl release --all
eventually "alice's processes may run on all CPUs after the release" has_masks $a 0-15
eventually "bob's process has its own mask after the release" has_masks "$bob_pid" 3
check "systemctl stop succeeds" systemctl stop pjwd.service pjwd.socket
check "the service has ended without an error" [ "$(property pjwd.service Result)" = success ]
