#!/usr/bin/env python3
"""The cases on the Debian machine: one snapshot of a booted node, and a fresh resume of it for each case.

Usage: debian.py cases CASE.sh...    runs them; prints their ok and not ok lines; exit 1 if any is not ok
       debian.py case SNAPSHOT INSTALLED CASE.sh   runs one on snapshots that are there
       debian.py shell               a root shell on such a machine, our programs at hand
       debian.py warm                builds what is missing of disk and snapshot, and no more
In the environment: VM [target/vm], TREE (what is copied to /pjw in the guest, and removed here), CPUS (16 or 8),
MACHINES (cases that run at the same time, each on its own machine) [2],
ACCEL (tcg, or kvm: taken if a kernel really boots with it), KERNEL (see kernel.sh).
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
from shell import converse

HERE = pathlib.Path(__file__).resolve().parent
VM = pathlib.Path(os.environ.get("VM", "target/vm")).resolve()
CPUS = int(os.environ.get("CPUS", "16"))
FORM = "-".join(filter(None, ("snapshot", os.environ.get("KERNEL"), str(CPUS))))
BOOT_DEADLINE = 240
RESUME_DEADLINE = 30
# Seconds without a line of a case after which its kernel has stopped: if it says that its CPUs wait for each other, and in any
# case. No step of a case waits for longer.
SILENCE, LONG_SILENCE = 45, 200
# A case keeps one CPU of the host busy for most of its time.
MACHINES = int(os.environ.get("MACHINES", "2"))
CASE_DEADLINE = 240
# Seconds in which a check `eventually` of a case alone has to hold.
EVENTUALLY = 60
TRIES = 3

# What is looked at when a case fails: a name, and what the guest is asked.
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
    """Held alone while disk or snapshot are made, together while machines run on them."""
    (VM / "debian").mkdir(parents=True, exist_ok=True)
    with open(VM / "debian/lock", "w") as file:
        kind = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another run of the virtual machine")
            fcntl.flock(file, kind)
        yield


def sweep():
    """What a run left that was killed; nothing if a machine runs."""
    with open(VM / "debian/lock", "w") as file, contextlib.suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for place in (VM / "debian").glob("running-*"):
            shutil.rmtree(place)


def accelerator():
    """KVM only if asked for, and only if a kernel boots with it: a /dev/kvm alone says nothing."""
    if os.environ.get("ACCEL", "tcg") == "kvm":
        try:
            with Machine(VM, CPUS, "kvm") as machine:
                if machine.agent.run(["true"], 40) == 0:
                    return "kvm"
        except Lost as lost:
            say(f"KVM does not boot here ({lost}): emulating")
    return "tcg,thread=multi"


def snapshot_path():
    """A snapshot fits the disk it was taken on, the QEMU that took it, and the machine's form."""
    version = subprocess.run([QEMU, "--version"], stdout=subprocess.PIPE, check=True).stdout
    machine = (HERE / "machine.py").read_bytes()
    key = hashlib.sha256(version + machine + (VM / "debian/key").read_bytes() + str(VM).encode()).hexdigest()[:12]
    return VM / "debian" / f"{FORM}-{os.environ.get('ACCEL', 'tcg')}-{key}"


def wait_for_node(agent):
    """Until systemd has started everything and Slurm would take a job."""
    ready = (
        "until systemctl is-system-running | grep -Eq 'running|degraded'; do sleep 0.2; done; "
        "systemctl is-failed --quiet '*' && systemctl --no-pager --failed; "
        "until sinfo -h -o %T 2>/dev/null | grep -qx idle; do sleep 0.2; done"
    )
    words = []
    ended = agent.run(["bash", "-c", ready], BOOT_DEADLINE, out=words.append, err=words.append)
    if ended != 0:
        raise Lost(f"Slurm is not idle ({ended}) {b''.join(words).decode(errors='replace')}")
    if words:
        say(b"".join(words).decode(errors="replace"))


def boot_and_freeze(path):
    begin = time.monotonic()
    with Machine(VM, CPUS, accelerator()) as machine:
        try:
            machine.agent.run(["true"], BOOT_DEADLINE)
            wait_for_node(machine.agent)
            idle = time.monotonic()
            machine.freeze(path)
        except Lost as lost:
            raise Lost(f"{lost}; the machine's last words:\n{machine.last_words()}") from lost
    say(f"booted to an idle Slurm in {idle - begin:.0f} s, frozen in {time.monotonic() - idle:.1f} s")


def warm():
    """The snapshot's path; makes what is missing of it."""
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
                boot_and_freeze(path)
            except Lost as lost:
                say(f"try {attempt} of {TRIES}: {lost}")
        if not path.exists():
            raise Lost("the Debian machine does not boot")
    return path


@functools.lru_cache(maxsize=None)
def programs():
    """Our programs as a tar without its end."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        tar.add(os.environ["TREE"], arcname="pjw")
        length = tar.offset
    return buffer.getvalue()[:length]


def move_tree(place):
    """What is copied to the guests becomes a part of a snapshot, which is removed at the end of the run."""
    os.environ["TREE"] = shutil.move(os.environ["TREE"], str(place / "tree"))


def tree(case=None, with_programs=True):
    """What the guest gets under /, as a tar: our programs, the words, the case."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        words = b"".join((HERE / "functions" / name).read_bytes() for name in ("common.sh", "debian.sh"))
        entries = [("cases/functions", words)]
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
    """A machine that just became idle, with our files on it; its console goes to the results. A resume that hangs is
    tried again: nothing of ours has run by then."""
    for attempt in range(1, TRIES + 1):
        machine = Machine(VM, CPUS, "kvm" if "-kvm-" in snapshot.name else "tcg,thread=multi", snapshot)
        try:
            machine.__enter__()
            if machine.agent.run(["tar", "-xf", "-", "-C", "/"], RESUME_DEADLINE, stdin=tree(case, with_programs)) != 0:
                raise Lost("the files could not be copied in")
            break
        except Lost as lost:
            say(f"the machine did not resume (try {attempt} of {TRIES}): {lost}\n{machine.last_words()}")
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
    """The same node with our programs installed and not started, for this run only: most cases begin there."""
    path = VM / "debian" / f"running-installed-{os.getpid()}"
    accelerated = "kvm" if "-kvm-" in snapshot.name else "tcg,thread=multi"
    for attempt in range(1, TRIES + 1):
        try:
            with Machine(VM, CPUS, accelerated, snapshot, to_freeze=True) as machine:
                run = machine.agent.run
                if run(["tar", "-xf", "-", "-C", "/"], RESUME_DEADLINE, stdin=tree()) != 0:
                    raise Lost("the files could not be copied in")
                install = ". /cases/functions; install_pjw && systemctl enable pjwd.service"
                if run(["bash", "-c", install], BOOT_DEADLINE) != 0:
                    raise Lost("our programs could not be installed")
                machine.freeze(path)
            break
        except Lost as lost:
            say(f"the programs were not installed (try {attempt} of {TRIES}): {lost}")
            if attempt == TRIES:
                raise
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


class Report:
    """The lines of a case as they come; whole ones are printed and counted, and their times kept."""

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


def bring_out(agent, results):
    for name, question in EVIDENCE.items():
        with open(results / name, "wb") as file:
            agent.run(["bash", "-c", question], 30, out=file.write, err=file.write)


def deadline_of(case):
    asked = re.search(r"^# deadline: (\d+)", case.read_text(), re.MULTILINE)
    return float(asked.group(1)) if asked else CASE_DEADLINE


def says(case, line):
    """Whether the case has this line of its own."""
    return re.search(f"^# {line}", case.read_text(), re.MULTILINE) is not None


def begins_bare(case):
    """Whether the case begins on a node that knows nothing of pjw."""
    return says(case, "without pjw")


def died_of_emulation(console):
    """Whether the kernel met a breakpoint in its own code that was not there any more: bare.sh tells why. Or whether CPUs
    wait for each other for ever since the kernel changed its own code, which happens when a BPF program is attached: then
    the kernel's own thread for RCU gets no CPU for 20 s and more."""
    text = console.read_bytes() if console.exists() else b""
    return b"int3: 0000 [#" in text or b"rcu_preempt kthread starved" in text


def run_case(snapshot, ready, case, repeats=4, beside=1):
    """Whether the case came to its end with ok lines only. What it leaves is in results/debian/CASE. If the emulated kernel
    stops, the case begins again, at most `repeats` times. `beside` is how many machines share the host: the deadline and
    the time limit of `eventually` are those of a case alone, times this number."""
    results = VM / "results" / "debian" / case.stem
    shutil.rmtree(results, ignore_errors=True)
    results.mkdir(parents=True)
    deadline = deadline_of(case) * beside
    report = Report(results)
    with open(results / "stderr.log", "wb") as stderr:
        try:
            bare = begins_bare(case)
            with resumed(snapshot if bare else ready, case, results, with_programs=bare) as machine:
                # A machine that is only slow may say so too, but does not stay silent.
                log = machine.place / "kernel.log"
                machine.agent.stream.has_stopped = lambda silent: silent > (
                    SILENCE if died_of_emulation(log) else LONG_SILENCE
                )
                words = ["env", f"time_limit={EVENTUALLY * beside}", "bash", f"/cases/{case.name}"]
                ended = machine.agent.run(words, deadline, out=report, err=stderr.write)
                if ended == "deadline":
                    report.line(f"not ok {case.stem}: came to its end: not within {deadline:.0f} s")
                elif ended != 0:
                    report.line(f"not ok {case.stem}: came to its end: exit {ended}")
                elif report.passed + report.failed == 0:
                    report.line(f"not ok {case.stem}: checked something: it has no line")
                if report.failed:
                    bring_out(machine.agent, results)
        except Lost as lost:
            emulated = "-kvm-" not in snapshot.name
            has_stopped = isinstance(lost, Stopped) or died_of_emulation(results / "console.log")
            if repeats and emulated and report.failed == 0 and has_stopped:
                say(f"{case.stem} begins again: the emulated kernel stopped after a change of its own code")
                return run_case(snapshot, ready, case, repeats - 1, beside)
            report.line(f"not ok {case.stem}: the machine was lost: {lost}")
        seconds = time.monotonic() - report.begin
        report.line(f"# debian/{case.stem}: {report.passed} ok, {report.failed} not ok, {seconds:.1f} s")
    if report.failed:
        tail = (results / "stderr.log").read_bytes()[-3000:].decode(errors="replace")
        say(f"{case.stem} failed; more in {results}; on its standard error at last:\n{tail}")
    return report.failed == 0


def run_together(snapshot, ready, cases):
    """Runs up to MACHINES cases at the same time, each by a process of its own; prints the lines of a case at its end.
    Whether all were good."""
    waiting, running, good = sorted(cases, key=deadline_of, reverse=True), {}, True
    try:
        while waiting or running:
            while waiting and len(running) < MACHINES:
                output = tempfile.TemporaryFile()
                words = [sys.executable, __file__, "case", snapshot, ready, waiting.pop(0)]
                process = subprocess.Popen(words, stdout=output, preexec_fn=die_with_parent)
                running[process.pid] = process, output
            pid = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT).si_pid
            process, output = running.pop(pid)
            good = process.wait() == 0 and good
            output.seek(0)
            print(output.read().decode(errors="replace"), end="", flush=True)
    finally:
        for process, _ in running.values():
            process.terminate()
            process.wait()
    return good


def run_cases(names):
    (VM / "debian").mkdir(parents=True, exist_ok=True)
    sweep()
    snapshot = warm()
    cases = [pathlib.Path(name) for name in names]
    alone = [case for case in cases if MACHINES == 1 or len(cases) == 1 or says(case, "alone")]
    with lock(exclusive=False), installed(snapshot) as ready:
        move_tree(ready)
        good = run_together(snapshot, ready, [case for case in cases if case not in alone])
        for case in alone:
            good = run_case(snapshot, ready, case) and good
    return 0 if good else 1


def run_shell():
    programs()
    shutil.rmtree(os.environ["TREE"])
    snapshot = warm()
    with lock(exclusive=False), resumed(snapshot) as machine:
        return converse(machine)


def main():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    command, *names = sys.argv[1:]
    try:
        if command == "cases":
            return run_cases(names)
        if command == "case":
            return 0 if run_case(*map(pathlib.Path, names), beside=MACHINES) else 1
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
