# A core that comes online after the start of pjwd can be assigned without a restart.
. /cases/functions

answers() { pjwctl status --json >/dev/null 2>&1; }
stopped() { [ ! -d "/proc/$1" ] || grep -q '^State:.Z' "/proc/$1/status"; }
topology_has() { [ "$(pjwctl topology --json | tr -d ' \n' | grep -o '"pus":[0-9]*' | head -n 1)" = "\"pus\":$1" ]; }

core=$(cat /sys/devices/system/cpu/cpu15/topology/thread_siblings_list)
set_online 0 "$core"
pjwd 2>>/dev/ttyS0 &
daemon=$!
eventually "pjwd answers with one core offline" answers || exit 1
check "the topology has 14 PUs while a core is offline" topology_has 14
sleep 1000 &
sleeper=$!
pjwctl assign early --cores 2 --pid $sleeper >&2
was=$(cpus manual:early)

set_online 1 "$core"
eventually "the core that came online is free" is_free "$core"
check "the topology has 16 PUs after that" topology_has 16
check "the job keeps its cores" [ "$(cpus manual:early)" = "$was" ]
if pjwctl assign late --cpus "$core" >&2; then ok "the core can be assigned to a job"; else not_ok "the core can be assigned to a job" "exit $?"; fi

pjwctl release --all >&2
kill $sleeper $daemon
eventually "pjwd stops after a core came online" stopped $daemon
