#!/usr/bin/python3
"""Checks jobs in an endless loop: whether the mask of a thread, or the effective cpuset of the job, has a CPU outside the job.

Usage: watch.py OUT LIST:USER:CGROUP...    LIST: the CPUs of a job. USER: all processes of this user belong to the job.
                                           CGROUP: the cgroup of the job below /sys/fs/cgroup.
OUT gets one line for each thread or cpuset outside. After SIGTERM it ends with the line "passes N threads M". OUT.passes has the
number of completed passes at any time.
"""
import os
import pwd
import signal
import sys

ended = False


def end(*_):
    global ended
    ended = True


def parse_list(text):
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
    """Returns the masks of the threads of a process. Threads that have ended are left out."""
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
    jobs.append((parse_list(cpus), pwd.getpwnam(user).pw_uid, cgroup))
passes = threads = 0
with open(sys.argv[1], "w") as out, open(sys.argv[1] + ".passes", "w") as done:
    while not ended:
        for cpus, uid, cgroup in jobs:
            effective = read(f"/sys/fs/cgroup/{cgroup}/cpuset.cpus.effective")
            if effective is None or not parse_list(effective) <= cpus:
                print(f"outside: {cgroup} has {effective}", file=out, flush=True)
            for pid in processes(uid):
                for tid, mask, name in masks(pid):
                    threads += 1
                    if not parse_list(mask) <= cpus:
                        print(f"outside: thread {tid} of {pid} ({name}) on {mask}", file=out, flush=True)
        passes += 1
        # One write of constant length: a reader gets a complete number.
        done.seek(0)
        print(f"{passes:8d}", file=done, flush=True)
        if passes == 1:
            print("begun", file=out, flush=True)
    print(f"passes {passes} threads {threads}", file=out)
