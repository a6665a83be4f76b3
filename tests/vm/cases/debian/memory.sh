# The memory of a job on a pure cgroup v2 machine: the pages of a farm, the estimate from the scope that systemd makes for the
# job's cpuset, and the report of the job with its peak and its shared part.
. /cases/functions

# A master with 120 MiB and three forked workers with 8 MiB of their own each. The file /tmp/go ends it.
cat >/tmp/farm.py <<'END'
import os, time
def make(mebibytes):
    block = bytearray(mebibytes << 20)
    for at in range(0, len(block), 4096):
        block[at] = 1
    return block
common = make(120)
for _ in range(3):
    if os.fork() == 0:
        own = make(8)
        open(f"/tmp/ready.{os.getpid()}", "w")
        break
while not os.path.exists("/tmp/go"):
    time.sleep(0.1)
END
is_ready() { [ "$(ls /tmp/ready.* 2>/dev/null | wc -l)" = 3 ]; }
# value FILE WORD...: a value in a JSON file.
value() { python3 -c 'import json, sys
value = json.load(open(sys.argv[1]))
for word in sys.argv[2:]: value = value[word]
print(value)' "$@"; }
read_memory() { pjwctl show manual:farm --json "$@" >/tmp/memory; }
is_over() { pjwctl report manual:farm --json >/tmp/report; }
# is_at_least A B: whether both are numbers, and A is not less.
is_at_least() { [ "$1" -ge "$2" ] 2>/dev/null; }

start_pjw
check "no controller of v1 is mounted" sh -c '! grep -q " cgroup " /proc/mounts'
pjwctl run --cores 2 --job farm -- python3 /tmp/farm.py >&2 &
eventually "the workers have their memory" is_ready
check "the pages are read" read_memory --memory
check "from the processes" [ "$(value /tmp/memory memory source)" = smaps ]
check "four address spaces" [ "$(value /tmp/memory memory address_spaces)" = 4 ]
shared=$(value /tmp/memory memory shared_permille)
check "a late fork shares most pages" is_at_least "$shared" 750
check "an estimate needs no look at pages" read_memory
check "from the scope of the job" [ "$(value /tmp/memory memory source)" = cgroup ]
estimated=$(value /tmp/memory memory shared_permille)
check "it agrees with the pages within 50 permille" is_at_least 50 "$((estimated > shared ? estimated - shared : shared - estimated))"
check "and has the peak" is_at_least "$(value /tmp/memory memory peak)" $((120 << 20))

touch /tmp/go
eventually "the job leaves a report" is_over
check "with its peak of memory" is_at_least "$(value /tmp/report memory_peak)" $((120 << 20))
check "with its shared part" [ "$(value /tmp/report shared_permille):$(value /tmp/report shared_source)" = "$shared:smaps" ]
