"""One run of the Debian machine under QEMU: started, frozen into a snapshot, resumed from one, ended.

Two packages of cores with two threads each, a NUMA node for each package. A snapshot is a directory: the two memory
files, the disk's layer, the devices' state. What resumes from it writes to none of them.
"""
import ctypes
import os
import pathlib
import shutil
import signal
import subprocess
import tempfile

from link import Agent, Lost, Monitor

QEMU = "qemu-system-x86_64"
MEMORY_OF_NODE = 1 << 30
EMULATED = pathlib.Path(__file__).resolve().parent / "emulated"
SNAPSHOT_FILES = ("memory0", "memory1", "disk.qcow2", "state")


def emulated(name):
    """Returns a variable of the file `emulated`."""
    read = f'. "{EMULATED}"; printf %s "${name}"'
    return subprocess.run(["bash", "-euc", read], stdout=subprocess.PIPE, text=True, check=True).stdout


def die_with_parent():
    """Ends QEMU with this process, for any reason of its end."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class Machine:
    """A QEMU process. Use it in a `with`: its process and files are removed at the end."""

    def __init__(self, vm, cpus, accelerator="tcg,thread=multi", snapshot=None, to_freeze=False):
        """`to_freeze`: a machine that resumes from a snapshot, and is then frozen into another one."""
        self.vm, self.cpus, self.accelerator, self.snapshot = vm, cpus, accelerator, snapshot
        self.kernel = vm / os.environ.get("KERNEL", "")
        self.own_memory = to_freeze or snapshot is None
        self.place = pathlib.Path(tempfile.mkdtemp(prefix="running-", dir=vm / "debian"))
        self.process = None

    def __enter__(self):
        try:
            self.start()
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(self, *_):
        self.end()

    def start(self):
        """Resumes from the snapshot if there is one. Boots the kernel otherwise."""
        base = (self.snapshot / "disk.qcow2", "qcow2") if self.snapshot else (self.vm / "debian/disk.ext4", "raw")
        subprocess.run(
            ["qemu-img", "create", "-q", "-f", "qcow2", "-b", base[0].resolve(), "-F", base[1], self.place / "disk.qcow2"],
            check=True,
        )
        if self.snapshot and self.own_memory:
            memories = [self.snapshot / f"memory{node}" for node in (0, 1)]
            subprocess.run(["cp", "--sparse=always", "--reflink=auto", *memories, self.place], check=True)
        console = open(self.place / "console.log", "wb")
        self.process = subprocess.Popen(
            self.command(), stdin=subprocess.DEVNULL, stdout=console, stderr=console, preexec_fn=die_with_parent
        )
        console.close()
        self.monitor = Monitor(self.socket("monitor"))
        if self.snapshot:
            self.leave_memory_out()
            self.monitor.execute("migrate-incoming", uri=f"exec:cat {self.snapshot / 'state'}")
            self.monitor.wait_for_migration(30)
            self.monitor.execute("cont")
        self.agent = Agent(self.socket("agent"))

    def socket(self, name):
        """Returns a path that is short enough for a socket in any directory of the project."""
        return f"/proc/{os.getpid()}/fd/{self.directory()}/{name}"

    def directory(self):
        if not hasattr(self, "handle"):
            self.handle = os.open(self.place, os.O_PATH | os.O_DIRECTORY)
        return self.handle

    def command(self):
        half = self.cpus // 2
        memory = self.place if self.own_memory else self.snapshot
        share = "on" if self.own_memory else "off"
        nodes = []
        for node in (0, 1):
            nodes += [
                "-object", f"memory-backend-file,id=m{node},size={MEMORY_OF_NODE},mem-path={memory}/memory{node},share={share}",
                "-numa", f"node,nodeid={node},cpus={node * half}-{node * half + half - 1},memdev=m{node}",
            ]
        return [
            QEMU, "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
            "-machine", "q35,smbus=off,sata=off,usb=off,vmport=off,hpet=off", "-accel", self.accelerator,
            "-cpu", emulated("CPU"),
            "-smp", f"{self.cpus},sockets=2,cores={self.cpus // 4},threads=2", "-m", str(2 * MEMORY_OF_NODE >> 20),
            *nodes, "-numa", "dist,src=0,dst=1,val=21",
            "-drive", f"if=none,id=disk,file={self.place}/disk.qcow2,format=qcow2,cache=unsafe",
            "-device", "virtio-blk-pci,drive=disk", "-device", "virtio-serial-pci",
            "-chardev", f"socket,id=agent,path={self.socket('agent')},server=on,wait=off",
            "-device", "virtserialport,chardev=agent,name=org.pjw.agent",
            "-chardev", f"socket,id=shell,path={self.socket('shell')},server=on,wait=off",
            "-device", "virtconsole,chardev=shell",
            "-chardev", f"socket,id=monitor,path={self.socket('monitor')},server=on,wait=off", "-mon", "chardev=monitor,mode=control",
            "-serial", f"file:{self.place}/kernel.log",
            "-kernel", self.kernel / "vmlinuz", "-initrd", self.kernel / "initrd", "-append", emulated("KERNEL_LINE") + " systemd.show_status=no net.ifnames=0",
            *(["-incoming", "defer"] if self.snapshot else []),
        ]  # fmt: skip

    def leave_memory_out(self):
        """Leaves the memory out of the state: it is in files already."""
        capability = {"capability": "x-ignore-shared", "state": True}
        self.monitor.execute("migrate-set-capabilities", capabilities=[capability])

    def freeze(self, to):
        """Ends the machine and saves its state in a new directory."""
        self.agent.run(["sh", "-c", "sync; echo 3 >/proc/sys/vm/drop_caches"], 60)
        self.monitor.execute("stop")
        self.leave_memory_out()
        self.monitor.execute("migrate", uri=f"exec:cat >{self.place}/state")
        self.monitor.wait_for_migration(60)
        self.monitor.execute("quit")
        self.process.wait(30)
        new = to.with_name(to.name + ".new")
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir()
        for name in SNAPSHOT_FILES:
            (self.place / name).rename(new / name)
        new.rename(to)

    def last_log_lines(self):
        """Returns the last lines of the kernel's log and of QEMU's output."""
        text = b""
        for name in ("kernel.log", "console.log"):
            path = self.place / name
            text += path.read_bytes() if path.exists() else b""
        return "\n".join(text.decode(errors="replace").splitlines()[-20:])

    def end(self):
        if self.process:
            self.process.kill()
            self.process.wait()
        if hasattr(self, "handle"):
            os.close(self.handle)
        shutil.rmtree(self.place, ignore_errors=True)


__all__ = ["Lost", "Machine", "die_with_parent"]
