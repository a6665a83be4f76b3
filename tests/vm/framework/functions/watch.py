#!/usr/bin/python3
"""Watches jobs all the time: whether a thread is outside its CPUs, or its cgroup's effective cpuset is.

Usage: watch.py OUT LIST:USER:CGROUP...    LIST are the CPUs of a job, USER whose processes are all the job's, CGROUP the
                                           job's below /sys/fs/cgroup.
Until SIGTERM; then OUT ends with the line "looks N threads M", after one line for each thing that was outside. How many
looks are done is in OUT.looks all the time.
"""
import os
import pwd
import signal
import sys

ended = False


def end(*_):
    global ended
    ended = True


def members(text):
    cpus = set()
    for part in text.strip().split(","):
        if part:
            low, _, high = part.partition("-")
            cpus.update(range(int(low), int(high or low) + 1))
    return cpus


def read(path):
    try:
        with open(path) as file:
            return file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None


def masks(pid):
    """The masks of a process's threads; of one that vanished, nothing."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except (FileNotFoundError, ProcessLookupError):
        return
    for tid in threads:
        status = read(f"/proc/{pid}/task/{tid}/status")
        if status and "Cpus_allowed_list:" in status:
            yield tid, status.split("Cpus_allowed_list:")[1].split("\n")[0].strip(), status.split("\n")[0].split()[1]


def processes(uid):
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if os.stat(f"/proc/{name}").st_uid == uid:
                    yield name
            except FileNotFoundError:
                pass


signal.signal(signal.SIGTERM, end)
jobs = []
for word in sys.argv[2:]:
    cpus, user, cgroup = word.split(":", 2)
    jobs.append((members(cpus), pwd.getpwnam(user).pw_uid, cgroup))
looks = threads = 0
with open(sys.argv[1], "w") as out, open(sys.argv[1] + ".looks", "w") as done:
    while not ended:
        for cpus, uid, cgroup in jobs:
            effective = read(f"/sys/fs/cgroup/{cgroup}/cpuset.cpus.effective")
            if effective is None or not members(effective) <= cpus:
                print(f"outside: {cgroup} has {effective}", file=out, flush=True)
            for pid in processes(uid):
                for tid, mask, name in masks(pid):
                    threads += 1
                    if not members(mask) <= cpus:
                        print(f"outside: thread {tid} of {pid} ({name}) on {mask}", file=out, flush=True)
        looks += 1
        # In one write of always the same length: a reader finds a whole number.
        done.seek(0)
        print(f"{looks:8d}", file=done, flush=True)
        if looks == 1:
            print("begun", file=out, flush=True)
    print(f"looks {looks} threads {threads}", file=out)
