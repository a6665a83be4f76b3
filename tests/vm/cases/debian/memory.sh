# The memory of a job on a machine with cgroup v2 only: pages of forked workers, the estimate from the systemd scope that has the
# cpuset of the job, and the report of the job with its peak and its shared part.
. /cases/functions

# A parent with 120 MiB forks three workers with 8 MiB of their own each. When /tmp/go exists, each worker writes to 80 MiB of the memory
# that it shares with its parent, and so gets a copy. The workers end when all have written: all processes together have 384 MiB then. The
# parent ends when /tmp/end exists.
cat >/tmp/farm.py <<'END'
import glob, os, time
def make(mebibytes):
    block = bytearray(mebibytes << 20)
    for at in range(0, len(block), 4096):
        block[at] = 1
    return block
common = make(120)
is_worker = False
for _ in range(3):
    if os.fork() == 0:
        own = make(8)
        open(f"/tmp/ready.{os.getpid()}", "w")
        is_worker = True
        break
while not os.path.exists("/tmp/go"):
    time.sleep(0.1)
if is_worker:
    for at in range(0, 80 << 20, 4096):
        common[at] = 2
    open(f"/tmp/wrote.{os.getpid()}", "w")
while len(glob.glob("/tmp/wrote.*")) < 3:
    time.sleep(0.1)
if not is_worker:
    for _ in range(3):
        os.wait()
    while not os.path.exists("/tmp/end"):
        time.sleep(0.1)
END
workers_are_ready() { [ "$(ls /tmp/ready.* 2>/dev/null | wc -l)" = 3 ]; }
# json_value FILE KEY...: prints a value of a JSON file.
json_value() { python3 -c 'import json, sys
value = json.load(open(sys.argv[1]))
for key in sys.argv[2:]: value = value[key]
print(value)' "$@"; }
has_processes() { [ "$(field manual:farm processes)" = "$1" ]; }
read_memory() { pjwctl show manual:farm --json "$@" >/tmp/memory; }
has_report() { pjwctl report manual:farm --json >/tmp/report; }
# is_at_least A B: whether both are numbers and A >= B.
is_at_least() { [ "$1" -ge "$2" ] 2>/dev/null; }

start_pjw
check "no v1 controller is mounted" sh -c '! grep -q " cgroup " /proc/mounts'
# Memory counts for the cgroup in which a process was when it allocated the memory. So the parent starts when the scope of the job is
# complete.
pjwctl run --cores 2 --job farm -- sh -c 'until [ -e /tmp/begin ]; do sleep 0.1; done; exec python3 /tmp/farm.py' >&2 &
eventually "the job is confined by a cpuset before it allocates memory" is_by_cpuset manual:farm
touch /tmp/begin
eventually "the workers have allocated their memory" workers_are_ready
eventually "pjwd knows all processes of the job" has_processes 4
check "pjwctl show --memory succeeds" read_memory --memory
check "the source of the reading is the processes' smaps" [ "$(json_value /tmp/memory memory source)" = smaps ]
check "the job has four address spaces" [ "$(json_value /tmp/memory memory address_spaces)" = 4 ]
shared=$(json_value /tmp/memory memory shared_permille)
check "at least 750 permille of the memory is shared by workers that were forked late" is_at_least "$shared" 750
check "pjwctl show without --memory succeeds" read_memory
check "the source of the estimate is the cgroup of the job" [ "$(json_value /tmp/memory memory source)" = cgroup ]
estimated=$(json_value /tmp/memory memory shared_permille)
difference=$((estimated > shared ? estimated - shared : shared - estimated))
check "the estimated shared part differs from the reading by at most 5 %" is_at_least $((50 * shared)) $((1000 * difference))
peak=$(json_value /tmp/memory memory peak)
check "the estimate has the peak of memory" is_at_least "$peak" $((120 << 20))
check "the peak is less than what the workers write at their end" is_at_least $((300 << 20)) "$peak"

# pjwd reads the peak when it notices that a worker has ended. The cgroup, which has the peak, ends with the last process.
touch /tmp/go
eventually "pjwd knows that the workers have ended" has_processes 1
touch /tmp/end
eventually "the ended job has a report" has_report
check "the report has the peak of memory" is_at_least "$(json_value /tmp/report memory_peak)" $((120 << 20))
check "the peak in the report has what all workers wrote at their end" is_at_least "$(json_value /tmp/report memory_peak)" $((360 << 20))
check "the report has the shared part that was read last" [ "$(json_value /tmp/report shared_permille):$(json_value /tmp/report shared_source)" = "$shared:smaps" ]
