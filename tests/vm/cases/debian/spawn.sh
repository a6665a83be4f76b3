# pjwctl spawn and libpjw_spawn start many instances: in the cgroup of their job from the start, in a step of Slurm, and from a large
# parent that cannot fork because the kernel does not overcommit memory.
. /cases/functions

# in_groups PATTERN COUNT <LINES: whether there are COUNT lines, and each is a cgroup that matches the pattern.
in_groups() {
    local lines
    lines=$(cat)
    echo "$lines"
    [ "$(grep -Ec "^0::$1\$" <<<"$lines")" = "$2" ] && [ "$(wc -l <<<"$lines")" = "$2" ]
}
cgroups_are() { in_groups "$@" </tmp/groups; }

install_pjw
# A fork of this parent needs 300 MB of committed memory, and the limit allows 100 MB more.
cat >/tmp/parent.py <<'END'
import ctypes, errno, os
library = ctypes.CDLL("libpjw_spawn.so.0", use_errno=True)
ballast = b"x" * (300 << 20)
def setting(name, value):
    with open("/proc/sys/vm/" + name, "w") as file:
        file.write(str(value))
with open("/proc/meminfo") as file:
    committed = next(int(line.split()[1]) for line in file if line.startswith("Committed_AS:"))
setting("overcommit_kbytes", committed + 100 * 1024)
setting("overcommit_memory", 2)
try:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    print("fork: done")
except OSError as error:
    print("fork:", errno.errorcode[error.errno])
context = ctypes.c_void_p()
arguments = (ctypes.c_char_p * 2)(b"true", None)
pids = (ctypes.c_int * 20)()
made = library.pspawn_context_create(ctypes.byref(context), b"/bin/true", -1)
begun = library.pspawn_n(pids, ctypes.byref(context), 20, arguments)
ends = [os.waitpid(pid, 0)[1] for pid in pids if pid > 0]
print("pspawn_n:", made, begun, ends.count(0))
setting("overcommit_memory", 0)
END
python3 /tmp/parent.py >/tmp/parent.out
sysctl -q vm.overcommit_memory=0 vm.overcommit_ratio=50
cat /tmp/parent.out >&2
check "a large parent cannot fork if the kernel does not overcommit memory" grep -qx 'fork: ENOMEM' /tmp/parent.out
check "it can start twenty processes by the library" grep -qx 'pspawn_n: 0 20 20' /tmp/parent.out

start_pjw
# The kernel reports each process that is moved to another cgroup. A process that is born in the cgroup of its parent is not moved.
trace=/sys/kernel/tracing
mountpoint -q $trace || mount -t tracefs tracefs $trace
moved='cgroup_attach_task: .*'
echo 1 >$trace/events/cgroup/cgroup_attach_task/enable
was_moved() { grep -q "$moved pid=$1 " $trace/trace; }

# born_in_group PROXY: whether a new group starts, whose instances are in the cgroup of their job and were never moved. pjwctl spawn
# does not wait for a cgroup that systemd makes too late: masks confine the instances then, and they are moved. So it may start again.
born_in_group() {
    local pid
    has_no_job manual:here || return 1
    : >$trace/trace
    # shellcheck disable=SC2016 # the shell of the instance expands them
    pjwctl spawn -n 4 --cores 2 --job here --proxy "$1" -- \
        sh -c 'read -r group </proc/self/cgroup; echo "$$ $group"' >/tmp/instances || return 1
    cut -d ' ' -f 2 /tmp/instances >/tmp/groups
    cgroups_are '/.*pjw.*here.*' 4 && grep -q "$moved comm=pjwctl" $trace/trace || return 1
    for pid in $(cut -d ' ' -f 1 /tmp/instances); do
        if was_moved "$pid"; then return 1; fi
    done
}
for proxy in never always; do
    eventually "each instance is born in the cgroup of its job (--proxy $proxy)" born_in_group $proxy
done
echo 0 >$trace/events/cgroup/cgroup_attach_task/enable
# alice's command is in a job of Slurm. So pjwd refuses her another job, and pjwctl uses the cores of the step and stays in its cgroup.
for option in --local ''; do
    # shellcheck disable=SC2086 # an empty option is no word
    as alice srun -n1 -c4 pjwctl spawn $option -n 4 -- cat /proc/self/cgroup >/tmp/groups
    check "the instances are in the cgroup of the step of Slurm (${option:-with the daemon})" cgroups_are '/.*/job_[0-9]+/step_0/.*' 4
done
# shellcheck disable=SC2016 # the shell of the instance expands it
as alice srun -n1 -c4 pjwctl spawn -n 2 --cores 1 -- sh -c 'echo "$PJW_CPUS"' >/tmp/parts
have_one_part() { [ "$(wc -l </tmp/parts)" = 2 ] && [ "$(sort -u /tmp/parts | wc -l)" = 1 ]; }
check "with --cores 1 both instances are on the first core of the job of Slurm" have_one_part
as alice srun -n1 -c4 pjwctl spawn -n 2 --class normal -- true 2>/tmp/refusal
check "--class is refused in a job of Slurm" grep -q -- '--class has no effect in slurm:' /tmp/refusal
check "the node was never drained" never_drained
