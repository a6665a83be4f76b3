# Groups of processes: from a parent whose memory the kernel would not copy, and with each instance on its own NUMA node.
. /cases/words

install_pjw

# Strict accounting: a fork promises the child as much memory as its parent has. The parent is Python with most of what
# can be promised. It starts 100 processes by libpjw_spawn.so, and the same process can't fork.
cat >/tmp/large.py <<'PYTHON'
import ctypes, os, re

def kib(name):
    return int(re.search(name + r":\s+(\d+)", open("/proc/meminfo").read()).group(1))

open("/proc/sys/vm/overcommit_memory", "w").write("2")
ballast = bytearray(int((kib("CommitLimit") - kib("Committed_AS")) * 0.6) * 1024)
library = ctypes.CDLL("libpjw_spawn.so.0", use_errno=True)
argv = (ctypes.c_char_p * 2)(b"/bin/true", None)
pids = (ctypes.c_int * 100)()
begun = library.pspawn_v(b"/bin/true", argv, None, 100, 0, None, 0, pids)
print("begun", begun, "ended", sum(os.waitpid(pid, 0)[1] == 0 for pid in pids if pid > 0))
try:
    if os.fork() == 0:
        os._exit(0)
    print("fork works")
except OSError as error:
    print("fork", error.errno)
open("/proc/sys/vm/overcommit_memory", "w").write("0")
PYTHON
large=$(python3 /tmp/large.py)
check "a parent with 60 % of what the kernel promises starts 100 processes" [ "${large%%$'\n'*}" = "begun 100 ended 100" ]
check "the same parent can't fork" [ "${large##*$'\n'}" = "fork 12" ]
