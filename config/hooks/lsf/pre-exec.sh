#!/bin/sh
# LSF's HOST_PRE_EXEC or PRE_EXEC: gives the job its cores. Does nothing unless it runs as root.
# Ends with 0, within 2 seconds, whatever is wrong with pjw. With --strict below, what pjw can't serve is requeued.
# As root it may be given the job's own environment: the hook uses neither its PATH nor its PJW_SOCKET.

pjwctl=/usr/bin/pjwctl
[ -x "$pjwctl" ] || exit 0
unset PJW_SOCKET

"$pjwctl" hook lsf-pre-exec
# 1 is a refusal, which only --strict makes.
[ $? -ne 1 ] || exit 1
exit 0
