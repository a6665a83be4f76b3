#!/usr/bin/python3
"""Tries to leave the CPUs it was given: fork, setsid, a double fork, 64 threads, and a mask of all CPUs in each.

Usage: escape.py OUT    writes one line for each try: HOW, the mask that its thread has right after it asked for all
                        CPUs; then "end", and the processes stay until they are killed.
"""
import os
import sys
import threading
import time

out = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
everything = range(os.cpu_count())


def flee(how):
    try:
        os.sched_setaffinity(0, everything)
    except OSError as error:
        how += f"({error.strerror.replace(' ', '-')})"
    mask = ",".join(str(cpu) for cpu in sorted(os.sched_getaffinity(0)))
    os.write(out, f"{how} {mask}\n".encode())


def child(how, *steps):
    """A process that takes the steps, flees, and stays."""
    if os.fork() == 0:
        for step in steps:
            step()
        flee(how)
        time.sleep(1000)
        os._exit(0)


def orphan():
    if os.fork() != 0:
        os._exit(0)


flee("plain")
child("fork")
child("setsid", os.setsid)
child("double-fork", os.setsid, orphan)


def thread():
    flee("thread")
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
