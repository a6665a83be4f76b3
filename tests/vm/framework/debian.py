#!/usr/bin/env python3
"""Runs the cases on the Debian machine. The node is booted once into a snapshot. Each case runs on a fresh resume of it.

Usage: debian.py cases CASE.sh...    runs these cases and prints their lines; exit code 1 if any line is not ok
       debian.py case SNAPSHOT INSTALLED CASE.sh   runs one case on existing snapshots
       debian.py shell               a root shell on a fresh machine, with the files of pjw in /pjw
       debian.py warm                only builds the disk and the snapshot, if they are missing
Environment: VM [target/vm]; TREE, a directory that is copied to /pjw in the guest, and then removed; CPUS, 16 or 8 [16];
MACHINES, the number of cases that run at the same time, each on its own machine [2];
ACCEL, tcg or kvm (used only if a kernel boots with it) [tcg]; KERNEL, see kernel.sh.
"""
import contextlib
import fcntl
import functools
import hashlib
import io
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time

from link import Lost, Stopped
from machine import QEMU, Machine, die_with_parent
from shell import run_terminal

HERE = pathlib.Path(__file__).resolve().parent
VM = pathlib.Path(os.environ.get("VM", "target/vm")).resolve()
CPUS = int(os.environ.get("CPUS", "16"))
FORM = "-".join(filter(None, ("snapshot", os.environ.get("KERNEL"), str(CPUS))))
BOOT_DEADLINE = 240
RESUME_DEADLINE = 30
# A case keeps one CPU of the host busy for most of its time.
MACHINES = int(os.environ.get("MACHINES", "2"))
CASE_DEADLINE = 480
# The seconds in which a check `eventually` has to pass, in a case that runs alone.
EVENTUALLY = 90
# The seconds without a line of a case after which its kernel counts as stopped. SILENCE applies if the kernel has reported that its
# CPUs wait for each other, LONG_SILENCE otherwise. No step of a case waits longer.
SILENCE, LONG_SILENCE = 45, EVENTUALLY * MACHINES + 60
TRIES = 3

# What is collected when a case fails: the name of the file, and the command in the guest.
EVIDENCE = {
    "journal.log": "journalctl --no-pager -o short-monotonic -b",
    "pjwd.journal": "journalctl --no-pager -o verbose -u pjwd",
    "kernel.log": "dmesg",
    "status.txt": "pjwctl status; pjwctl jobs; pjwctl plan; pjwctl events",
    "status.json": "pjwctl status --json",
    "doctor.txt": "pjwctl doctor",
    "slurm.txt": "cat /etc/slurm/*.conf; sinfo -Nl; scontrol -d show node; scontrol -d show job",
    "grid-engine.txt": "cd /var/spool/gridengine; tail -n 100 qmaster/messages execd/*/messages; qstat -f -u '*'",
    "processes.txt": "ps -eLo pid,tid,ppid,pgid,sid,uid,psr,stat,comm,cgroup,args",
    "node.txt": ". /cases/functions; dump_node /dev/stdout",
    "units.txt": "systemctl --no-pager --all list-units; systemctl --no-pager --failed; systemd-cgls --no-pager -a",
}


def say(text):
    print(f"vm: {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def lock(exclusive):
    """Holds the lock: exclusively while disk or snapshot are made, shared while machines use them."""
    (VM / "debian").mkdir(parents=True, exist_ok=True)
    with open(VM / "debian/lock", "w") as file:
        kind = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another run of the virtual machine")
            fcntl.flock(file, kind)
        yield


def remove_leftovers():
    """Removes the files of killed runs. Does nothing while a machine runs."""
    with open(VM / "debian/lock", "w") as file, contextlib.suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for place in (VM / "debian").glob("running-*"):
            shutil.rmtree(place)


def accelerator():
    """KVM only with ACCEL=kvm, and only if a kernel boots with it. The existence of /dev/kvm does not show this."""
    if os.environ.get("ACCEL", "tcg") == "kvm":
        try:
            with Machine(VM, CPUS, "kvm") as machine:
                if machine.agent.run(["true"], 40) == 0:
                    return "kvm"
        except Lost as lost:
            say(f"KVM does not boot here ({lost}): emulating")
    return "tcg,thread=multi"


def snapshot_path():
    """Returns the path of the snapshot. It depends on the disk, the version of QEMU, and the configuration of the machine."""
    version = subprocess.run([QEMU, "--version"], stdout=subprocess.PIPE, check=True).stdout
    machine = (HERE / "machine.py").read_bytes() + (HERE / "emulated").read_bytes()
    key = hashlib.sha256(version + machine + (VM / "debian/key").read_bytes() + str(VM).encode()).hexdigest()[:12]
    return VM / "debian" / f"{FORM}-{os.environ.get('ACCEL', 'tcg')}-{key}"


def wait_for_node(agent, accepts_failed_units):
    """Waits until systemd has started all units and Slurm is idle. A unit that has failed is an error, or only a message."""
    ready = (
        "until systemctl is-system-running | grep -Eq 'running|degraded'; do sleep 0.2; done; "
        "systemctl is-failed --quiet '*' && systemctl --no-pager --failed; "
        "until sinfo -h -o %T 2>/dev/null | grep -qx idle; do sleep 0.2; done"
    )
    output = []
    ended = agent.run(["bash", "-c", ready], BOOT_DEADLINE, out=output.append, err=output.append)
    if ended != 0:
        raise Lost(f"Slurm is not idle ({ended}) {b''.join(output).decode(errors='replace')}")
    if output:
        say(b"".join(output).decode(errors="replace"))
    if not accepts_failed_units and agent.run(["systemctl", "is-failed", "--quiet", "*"], 60) == 0:
        raise Lost("units have failed at the boot")


def boot_and_freeze(path, accepts_failed_units):
    begin = time.monotonic()
    with Machine(VM, CPUS, accelerator()) as machine:
        try:
            machine.agent.run(["true"], BOOT_DEADLINE)
            wait_for_node(machine.agent, accepts_failed_units)
            idle = time.monotonic()
            machine.freeze(path)
        except Lost as lost:
            raise Lost(f"{lost}; the machine's last log lines:\n{machine.last_log_lines()}") from lost
    say(f"booted to an idle Slurm in {idle - begin:.0f} s, frozen in {time.monotonic() - idle:.1f} s")


def warm():
    """Returns the path of the snapshot. Makes it if it is missing."""
    with lock(exclusive=False):
        disk = subprocess.run([HERE / "image.sh", "is_fresh"], check=False)
        if disk.returncode == 0 and snapshot_path().exists():
            return snapshot_path()
    with lock(exclusive=True):
        subprocess.run([HERE / "image.sh"], check=True)
        path = snapshot_path()
        for attempt in range(1, TRIES + 1):
            if path.exists():
                break
            for old in (VM / "debian").glob(f"{FORM}-*"):
                shutil.rmtree(old)
            try:
                # No file of pjw is on the machine yet. A unit that fails at each boot is found by the case `node`.
                boot_and_freeze(path, accepts_failed_units=attempt == TRIES)
            except Lost as lost:
                say(f"try {attempt} of {TRIES}: {lost}")
        if not path.exists():
            raise Lost("the Debian machine does not boot")
    return path


@functools.lru_cache(maxsize=None)
def programs():
    """Returns the files of pjw as a tar archive without its end mark."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        tar.add(os.environ["TREE"], arcname="pjw")
        length = tar.offset
    return buffer.getvalue()[:length]


def move_tree(place):
    """Moves TREE into the directory of the snapshot, which is removed at the end of the run."""
    os.environ["TREE"] = shutil.move(os.environ["TREE"], str(place / "tree"))


def tree(case=None, with_programs=True):
    """Returns the files that the guest gets under /, as a tar archive: those of pjw, the functions, the case."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        functions = b"".join((HERE / "functions" / name).read_bytes() for name in ("common.sh", "debian.sh"))
        entries = [("cases/functions", functions)]
        entries += [(f"cases/{path.name}", path.read_bytes()) for path in sorted((HERE / "functions").glob("*.py"))]
        if case:
            entries.append((f"cases/{case.name}", case.read_bytes()))
        for name, data in entries:
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), 0o755
            tar.addfile(entry, io.BytesIO(data))
    return (programs() if with_programs else b"") + buffer.getvalue()


@contextlib.contextmanager
def resumed(snapshot, case=None, results=None, with_programs=True):
    """A machine that resumed from the snapshot, with the files of pjw. Its console is copied to the results. If the resume
    hangs, it is repeated: no program of a case has run yet."""
    for attempt in range(1, TRIES + 1):
        machine = Machine(VM, CPUS, "kvm" if "-kvm-" in snapshot.name else "tcg,thread=multi", snapshot)
        try:
            machine.__enter__()
            if machine.agent.run(["tar", "-xf", "-", "-C", "/"], RESUME_DEADLINE, stdin=tree(case, with_programs)) != 0:
                raise Lost("the files could not be copied to the guest")
            break
        except Lost as lost:
            say(f"the machine did not resume (try {attempt} of {TRIES}): {lost}\n{machine.last_log_lines()}")
            machine.end()
            if attempt == TRIES:
                raise
        except BaseException:
            machine.end()
            raise
    try:
        yield machine
    finally:
        if results:
            shutil.copy(machine.place / "kernel.log", results / "console.log")
        machine.end()


@contextlib.contextmanager
def installed(snapshot):
    """A snapshot of the node with pjw installed and not started, for this run only. Most cases begin with it."""
    path = VM / "debian" / f"running-installed-{os.getpid()}"
    accelerated = "kvm" if "-kvm-" in snapshot.name else "tcg,thread=multi"
    for attempt in range(1, TRIES + 1):
        try:
            with Machine(VM, CPUS, accelerated, snapshot, to_freeze=True) as machine:
                run = machine.agent.run
                if run(["tar", "-xf", "-", "-C", "/"], RESUME_DEADLINE, stdin=tree()) != 0:
                    raise Lost("the files could not be copied to the guest")
                install = ". /cases/functions; install_pjw && systemctl enable pjwd.service"
                if run(["bash", "-c", install], BOOT_DEADLINE) != 0:
                    raise Lost("pjw could not be installed")
                machine.freeze(path)
            break
        except Lost as lost:
            say(f"pjw was not installed (try {attempt} of {TRIES}): {lost}")
            if attempt == TRIES:
                raise
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


class Report:
    """Takes the output of a case. Prints and counts each complete line, and writes it with its time."""

    def __init__(self, results):
        self.lines, self.times = open(results / "lines", "w"), open(results / "times", "w")
        self.begin, self.rest, self.passed, self.failed = time.monotonic(), b"", 0, 0

    def __call__(self, data):
        *lines, self.rest = (self.rest + data).split(b"\n")
        for line in lines:
            self.line(line.decode(errors="replace"))

    def line(self, line):
        self.passed += line.startswith("ok ")
        self.failed += line.startswith("not ok ")
        print(line, flush=True)
        print(line, file=self.lines, flush=True)
        print(f"{time.monotonic() - self.begin:6.1f} {line}", file=self.times, flush=True)


def collect_evidence(agent, results):
    for name, command in EVIDENCE.items():
        with open(results / name, "wb") as file:
            agent.run(["bash", "-c", command], 30, out=file.write, err=file.write)


def deadline_of(case):
    header = re.search(r"^# deadline: (\d+)", case.read_text(), re.MULTILINE)
    return float(header.group(1)) if header else CASE_DEADLINE


def has_header(case, line):
    """Whether the case has this line, as a comment."""
    return re.search(f"^# {line}$", case.read_text(), re.MULTILINE) is not None


def begins_without_pjw(case):
    """Whether pjw is not installed when the case begins."""
    return has_header(case, "without pjw")


def has_emulation_fault(console):
    """Whether the kernel stopped at a breakpoint in its own code that was already removed (see bare.sh). Or whether CPUs wait for
    each other forever after the kernel changed its own code, which it does when a BPF program is attached: then the RCU thread
    of the kernel gets no CPU for 20 s and more."""
    text = console.read_bytes() if console.exists() else b""
    return b"int3: 0000 [#" in text or b"rcu_preempt kthread starved" in text


def run_case(snapshot, ready, case, repeats=4, machines=1):
    """Runs a case. Returns whether it ran to its end with ok lines only. Its results are in results/debian/CASE. If the emulated
    kernel stops, the case begins again, at most `repeats` times. `machines` is the number of machines on the host. The deadline and
    the time limit of `eventually` are multiplied by it."""
    results = VM / "results" / "debian" / case.stem
    shutil.rmtree(results, ignore_errors=True)
    results.mkdir(parents=True)
    deadline = deadline_of(case) * machines
    report = Report(results)
    with open(results / "stderr.log", "wb") as stderr:
        try:
            bare = begins_without_pjw(case)
            with resumed(snapshot if bare else ready, case, results, with_programs=bare) as machine:
                # A slow machine may print the same message, but it continues to write lines.
                log = machine.place / "kernel.log"
                machine.agent.stream.has_stopped = lambda silent: silent > (
                    SILENCE if has_emulation_fault(log) else LONG_SILENCE
                )
                arguments = ["env", f"time_limit={EVENTUALLY * machines}", "bash", f"/cases/{case.name}"]
                ended = machine.agent.run(arguments, deadline, out=report, err=stderr.write)
                if ended == "deadline":
                    report.line(f"not ok {case.stem}: ran to its end: not within {deadline:.0f} s")
                elif ended != 0:
                    report.line(f"not ok {case.stem}: ran to its end: exit code {ended}")
                elif report.passed + report.failed == 0:
                    report.line(f"not ok {case.stem}: has a check: it wrote no line")
                if report.failed:
                    collect_evidence(machine.agent, results)
        except Lost as lost:
            emulated = "-kvm-" not in snapshot.name
            has_stopped = isinstance(lost, Stopped) or has_emulation_fault(results / "console.log")
            if repeats and emulated and report.failed == 0 and has_stopped:
                say(f"{case.stem} begins again: the emulated kernel stopped after a change of its own code")
                return run_case(snapshot, ready, case, repeats - 1, machines)
            report.line(f"not ok {case.stem}: the machine was lost: {lost}")
        seconds = time.monotonic() - report.begin
        report.line(f"# debian/{case.stem}: {report.passed} ok, {report.failed} not ok, {seconds:.1f} s")
    if report.failed:
        tail = (results / "stderr.log").read_bytes()[-3000:].decode(errors="replace")
        say(f"{case.stem} failed; more in {results}; its standard error ends with:\n{tail}")
    return report.failed == 0


def run_together(snapshot, ready, cases):
    """Runs up to MACHINES cases at the same time, each in a process of its own. Prints the lines of a case at its end. Returns
    whether all cases passed."""
    waiting, running, all_passed = sorted(cases, key=deadline_of, reverse=True), {}, True
    try:
        while waiting or running:
            while waiting and len(running) < MACHINES:
                output = tempfile.TemporaryFile()
                arguments = [sys.executable, __file__, "case", snapshot, ready, waiting.pop(0)]
                process = subprocess.Popen(arguments, stdout=output, preexec_fn=die_with_parent)
                running[process.pid] = process, output
            pid = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT).si_pid
            process, output = running.pop(pid)
            all_passed = process.wait() == 0 and all_passed
            output.seek(0)
            print(output.read().decode(errors="replace"), end="", flush=True)
    finally:
        for process, _ in running.values():
            process.terminate()
            process.wait()
    return all_passed


def run_cases(names):
    (VM / "debian").mkdir(parents=True, exist_ok=True)
    remove_leftovers()
    snapshot = warm()
    cases = [pathlib.Path(name) for name in names]
    alone = [case for case in cases if MACHINES == 1 or len(cases) == 1 or has_header(case, "alone")]
    with lock(exclusive=False), installed(snapshot) as ready:
        move_tree(ready)
        all_passed = run_together(snapshot, ready, [case for case in cases if case not in alone])
        for case in alone:
            all_passed = run_case(snapshot, ready, case) and all_passed
    return 0 if all_passed else 1


def run_shell():
    programs()
    shutil.rmtree(os.environ["TREE"])
    snapshot = warm()
    with lock(exclusive=False), resumed(snapshot) as machine:
        return run_terminal(machine)


def main():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    command, *names = sys.argv[1:]
    try:
        if command == "cases":
            return run_cases(names)
        if command == "case":
            return 0 if run_case(*map(pathlib.Path, names), machines=MACHINES) else 1
        if command == "shell":
            return run_shell()
        warm()
        return 0
    except (Lost, subprocess.CalledProcessError) as error:
        say(str(error))
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
