#!/bin/sh
# HTCondor's USER_JOB_WRAPPER: starts the job with PJW_CPUS, PJW_NCORES, PJW_JOB_DIR and, if unset, OMP_NUM_THREADS and others.
# Runs as the job's user. The command runs in any case, with its arguments as they are, within 2 seconds.
# Without a pjwctl that works it runs at once.

pjwctl=/usr/bin/pjwctl
"$pjwctl" --version >/dev/null 2>&1 || exec "$@"

exec "$pjwctl" hook condor-job-wrapper -- "$@"
