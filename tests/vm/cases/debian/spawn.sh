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
# pjwctl spawn does not wait for a cgroup that systemd makes too late: masks confine the instances then. So it may start again.
spawn_in_group() {
    has_no_job manual:here && pjwctl spawn -n 4 --cores 2 --job here --proxy "$1" -- cat /proc/self/cgroup >/tmp/groups &&
        cgroups_are '/.*pjw.*here.*' 4
}
for proxy in never always; do
    eventually "each instance is in the cgroup of its job from the start (--proxy $proxy)" spawn_in_group $proxy
done
# alice's command is in a job of Slurm. So pjwd refuses her another job, and pjwctl uses the cores of the step and stays in its cgroup.
for option in --local ''; do
    # shellcheck disable=SC2086 # an empty option is no word
    as alice srun -n1 -c4 pjwctl spawn $option -n 4 -- cat /proc/self/cgroup >/tmp/groups
    check "the instances are in the cgroup of the step of Slurm (${option:-with the daemon})" cgroups_are '/.*/job_[0-9]+/step_0/.*' 4
done
check "the node was never drained" never_drained
