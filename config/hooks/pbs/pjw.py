"""OpenPBS's hook for pjw: a job has its cores before its first task, and its tasks are told them.

Runs in pbs_mom as root, on each node of the job. Whatever is wrong with pjw is one line in mom's log, and the job goes
on, within 2 seconds, or within 10 where not even pjwctl can be started. With STRICT = True a job that pjw can't serve is rejected, and requeued by PBS.
"""

import os
import subprocess

import pbs

PJWCTL = "/usr/bin/pjwctl"
STRICT = False
# pjwctl ends by itself long before; this is for a machine that can't start it.
PATIENCE_S = 10


def call(hook, words=(), environment=None):
    """Calls `pjwctl hook`; returns whether it did not refuse, and what it printed."""
    command = [PJWCTL, "hook", hook]
    if STRICT and hook == "pbs-begin":
        command.append("--strict")
    command += ["--"] + [str(word) for word in words]
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        universal_newlines=True,
        env=environment or {},
    )
    try:
        out, err = child.communicate(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.communicate()
        pbs.logmsg(pbs.LOG_WARNING, "pjw: %s has not ended; the job goes on" % hook)
        return True, ""
    for line in err.splitlines():
        pbs.logmsg(pbs.LOG_WARNING, "pjw: %s" % line)
    return child.returncode != 1, out


def begin(event):
    job = event.job
    words = [job.id, job.euser, job.exec_vnode, pbs.get_local_nodename()]
    fine, _ = call("pbs-begin", words)
    if not fine:
        event.reject("pjw can't give the job its cores: see the log of pbs_mom")


def launch(event):
    # The variables of the user are not passed on: this process runs as root.
    _, out = call("pbs-launch", environment={"PBS_JOBID": str(event.job.id)})
    # A job that was submitted in a job has the variables that pjw set there.
    record = str(event.env["PJW_VARIABLES"]) if "PJW_VARIABLES" in event.env else ""
    earlier = [entry.partition("=")[::2] for entry in record.split(":")]
    for line in out.splitlines():
        name, equals, value = line.partition("=")
        is_set = name in event.env and not name.startswith("PJW_")
        is_users = is_set and (name, str(event.env[name])) not in earlier
        if equals and not is_users:
            # PBS parts its list of variables at commas.
            event.env[name] = value.replace(",", "\\,")


def end(event):
    _, out = call("pbs-end", [event.job.id])
    # How the job used its cores: tracejob shows it.
    for line in out.splitlines():
        pbs.logjobmsg(event.job.id, line)


def main(event):
    handlers = {
        pbs.EXECJOB_BEGIN: begin,
        pbs.EXECJOB_LAUNCH: launch,
        pbs.EXECJOB_END: end,
        # Older versions don't have it.
        getattr(pbs, "EXECJOB_ABORT", None): end,
    }
    handler = handlers.get(event.type)
    if handler is not None and os.access(PJWCTL, os.X_OK):
        handler(event)


try:
    main(pbs.event())
except SystemExit:
    # This is how pbs.event().reject() and accept() end a hook.
    raise
except Exception as error:
    pbs.logmsg(pbs.LOG_WARNING, "pjw: %s: %s; the job goes on" % (type(error).__name__, error))
pbs.event().accept()
