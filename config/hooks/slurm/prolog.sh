#!/bin/sh
# Slurm's Prolog: gives the job its cores before its first process. Runs as root on each node of the job.
# Slurm drains a node whose prolog fails or hangs: this one ends with 0, within 2 seconds, whatever is wrong with pjw.
# To refuse jobs instead that pjw can't serve, add --strict below.

pjwctl=/usr/bin/pjwctl
[ -x "$pjwctl" ] || pjwctl=$(command -v pjwctl) || exit 0

"$pjwctl" hook slurm-prolog
# 1 is a refusal, which only --strict makes; anything else is no reason to drain a node.
[ $? -ne 1 ] || exit 1
exit 0
