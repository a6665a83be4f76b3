#!/usr/bin/python3
"""Tries to leave its CPUs: by fork, setsid, a double fork and 64 threads. Each of them requests a mask of all CPUs.

Usage: escape.py OUT    writes one line for each attempt: HOW, and the mask of the thread right after the request. Then
                        writes "end". The processes stay until they are killed.
"""
import os
import sys
import threading
import time

out = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
all_cpus = range(os.cpu_count())


def request_all_cpus(how):
    try:
        os.sched_setaffinity(0, all_cpus)
    except OSError as error:
        how += f"({error.strerror.replace(' ', '-')})"
    mask = ",".join(str(cpu) for cpu in sorted(os.sched_getaffinity(0)))
    os.write(out, f"{how} {mask}\n".encode())


def child(how, *steps):
    """Starts a process that takes the steps, requests all CPUs, and sleeps."""
    if os.fork() == 0:
        for step in steps:
            step()
        request_all_cpus(how)
        time.sleep(1000)
        os._exit(0)


def orphan():
    if os.fork() != 0:
        os._exit(0)


request_all_cpus("plain")
child("fork")
child("setsid", os.setsid)
child("double-fork", os.setsid, orphan)


def thread():
    request_all_cpus("thread")
    time.sleep(1000)


for _ in range(64):
    threading.Thread(target=thread, daemon=True).start()
while True:
    with open(sys.argv[1]) as lines:
        if sum(1 for _ in lines) >= 68:
            break
    time.sleep(0.1)
os.write(out, b"end\n")
time.sleep(1000)
