#!/bin/sh
# Slurm's Prolog: gives the job its cores before its first process. Runs as root on each node of the job.
# Slurm drains a node whose prolog fails or hangs: this one ends with 0, within 2 seconds, whatever is wrong with pjw.
# To refuse the jobs that pjw can't serve, add --strict below.

pjwctl=/usr/bin/pjwctl
[ -x "$pjwctl" ] || pjwctl=$(command -v pjwctl) || exit 0

"$pjwctl" hook slurm-prolog
# The exit code 1 is a refusal, which needs --strict. No other exit code may drain the node.
[ $? -ne 1 ] || exit 1
exit 0
