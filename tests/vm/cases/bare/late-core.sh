# A core that was off when the daemon started is the machine's as soon as it is on, without a restart.
. /cases/functions

answers() { pjwctl status --json >/dev/null 2>&1; }
stopped() { [ ! -d "/proc/$1" ] || grep -q '^State:.Z' "/proc/$1/status"; }
all_cores_hold() { [ "$(pjwctl topology --json | tr -d ' \n' | grep -o '"pus":[0-9]*' | head -n 1)" = "\"pus\":$1" ]; }

core=$(cat /sys/devices/system/cpu/cpu15/topology/thread_siblings_list)
switch 0 "$core"
pjwd 2>>/dev/ttyS0 &
warden=$!
eventually "the daemon answers on a smaller machine" answers || exit 1
check "the machine has no core that is off" all_cores_hold 14
sleep 1000 &
sleeper=$!
pjwctl assign early --cores 2 --pid $sleeper >&2
was=$(cpus manual:early)

switch 1 "$core"
eventually "the core that came late is free" is_free "$core"
check "topology knows it" all_cores_hold 16
check "a job that was there stays where it is" [ "$(cpus manual:early)" = "$was" ]
if pjwctl assign late --cpus "$core" >&2; then ok "a job gets it"; else not_ok "a job gets it" "exit $?"; fi

pjwctl release --all >&2
kill $sleeper $warden
eventually "the daemon stops after the latecomers" stopped $warden
