# pjwd under the real systemd: it says when it is ready, starts when it is asked, and its hardening leaves it the power
# to do its work. Grants survive a restart and a kill.
# without pjw
. /cases/functions

is_active() { [ "$(systemctl is-active "$1")" = active ]; }
restarted() { [ "$(main_pid)" != "$1" ] && [ "$(main_pid)" != 0 ] && is_active pjwd.service; }
is_confined() { confined "$(cpus "$1")" $(process_tree "$2"); }
has_masks() { [ "$(masks $(process_tree "$1"))" = "$2" ]; }
in_journal() { journalctl -u pjwd -o json --no-pager "$@" | grep -q .; }

install_pjw
check "the units are in order" systemd-analyze verify /usr/lib/systemd/system/pjwd.service /usr/lib/systemd/system/pjwd.socket
systemctl start pjwd.socket
check "the daemon does not run before it is asked" [ "$(main_pid)" = 0 ]
check "a question starts it and is answered" answers
check "it is the service that answers" [ "$(pjwctl status --json | tr -d ' \n' | grep -o '"pid":[0-9]*' | cut -d: -f2)" = "$(main_pid)" ]
check "who may not change anything may look" as alice pjwctl status

systemctl stop pjwd.service pjwd.socket
systemctl enable --now pjwd.service >&2
check "systemd has heard that it is ready" is_active pjwd.service
check "it was ready when it said so" answers
eventually "the log has the start" in_journal
check "new processes are heard of, not looked for" sh -c 'pjwctl status --json | tr -d " \n" | grep -q "\"discovery\":\"netlink\""'

# Processes of other users, whose masks and environment root's daemon must reach through its hardening.
as alice sh -c 'sleep 1000 & sleep 1000 & wait' &
a=$!
as bob taskset -c 3 sleep 1000 &
b=$!
started() { [ "$(process_tree $a | wc -l)" -ge 3 ] && [ "$(masks "$(pgrep -u bob sleep)")" = 3 ]; }
eventually "the users' processes run" started
bobs=$(pgrep -u bob sleep)
check "alice's processes are assigned" pjwctl assign a --cores 3 $(process_tree $a | sed 's/^/--pid /')
check "bob's process is assigned" pjwctl assign b --cores 1 --pid "$bobs"
eventually "alice's are kept on their cores" is_confined manual:a $a
eventually "bob's is kept on its cores" is_confined manual:b "$bobs"
a_cpus=$(cpus manual:a) b_cpus=$(cpus manual:b)
check "no CPU belongs to both" disjoint "$a_cpus" "$b_cpus"
eventually "the journal's events carry what happened" in_journal PJW_EVENT=assigned
eventually "and to whom" in_journal PJW_JOB=manual:a
eventually "under the daemon's name" in_journal SYSLOG_IDENTIFIER=pjwd PJW_EVENT=assigned

was=$(main_pid)
systemctl restart pjwd.service
check "a restart makes another process" [ "$(main_pid)" != "$was" ]
check "alice's job kept its cores over the restart" [ "$(cpus manual:a)" = "$a_cpus" ]
check "bob's job kept its cores over the restart" [ "$(cpus manual:b)" = "$b_cpus" ]

was=$(main_pid)
kill -9 "$was"
check "alice's are where they were while nobody watches" confined "$a_cpus" $(process_tree $a)
eventually "systemd starts a killed daemon again" restarted "$was"
eventually "it answers" answers
check "alice's job kept its cores over the kill" [ "$(cpus manual:a)" = "$a_cpus" ]
check "bob's job kept its cores over the kill" [ "$(cpus manual:b)" = "$b_cpus" ]
eventually "alice's are still kept on them" is_confined manual:a $a

echo 'interval = "500ms"' >/etc/pjw/pjwd.toml
check "systemctl reload is heard" systemctl reload pjwd.service
eventually "it is in the events" sh -c 'pjwctl events --json | grep -q reloaded'
systemctl daemon-reload
check "a daemon-reload changes nothing" is_confined manual:a $a

check "everything is released" pjwctl release --all
eventually "alice's may run anywhere again" has_masks $a 0-15
eventually "bob's has its own mask again" has_masks "$bobs" 3
check "it stops when it is told to" systemctl stop pjwd.service pjwd.socket
check "and ended well" [ "$(property pjwd.service Result)" = success ]
