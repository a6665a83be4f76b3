#!/bin/sh
# Flux's prolog, on each node: gives the job its cores. Flux doesn't tell how many: set CORES to what a job has here.
# Ends with 0, within 2 seconds, whatever is wrong with pjw. With --strict below, jobs that pjw can't serve fail.
# As root it may be given the job's own environment: the hook uses neither its PATH nor its PJW_SOCKET.

pjwctl=/usr/bin/pjwctl
[ -x "$pjwctl" ] || exit 0
unset PJW_SOCKET
# The cores that each job has on each node, where all have the same.
CORES=

"$pjwctl" hook flux-prolog ${CORES:+--cores "$CORES"}
# 1 is a refusal, which only --strict makes.
[ $? -ne 1 ] || exit 1
exit 0
