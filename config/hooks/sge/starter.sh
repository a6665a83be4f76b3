#!/bin/sh
# Grid Engine's starter_method: starts the job with PJW_CPUS, PJW_NCORES, PJW_JOB_DIR and, if unset, OMP_NUM_THREADS and others.
# Runs as the job's user. The command runs in any case, as it would without a starter method, within 2 seconds.
# Without a pjwctl that works it runs at once.

pjwctl=/usr/bin/pjwctl
shell=${SGE_STARTER_SHELL_PATH-}

# Whether a command is to be started without a shell (`qsub -shell n`), which only the job's configuration tells.
no_shell() {
    [ -r "${SGE_JOB_SPOOL_DIR-}/config" ] || return 1
    while IFS= read -r line; do [ "$line" != no_shell=1 ] || return 0; done <"$SGE_JOB_SPOOL_DIR/config"
    return 1
}

# Beside a starter method Grid Engine runs no shell: that a job's script, or its command line, is run by the shell that
# job or queue name is left to the starter. It is a login shell if its own name begins with a dash, and of all shells bash
# can give it one.
case ${shell:+${SGE_STARTER_SHELL_START_MODE-}}:${1-} in
    posix_compliant:*/job_scripts/* | script_from_stdin:-s) set -- "$shell" "$@" ;;
    unix_behavior:*/job_scripts/*) shell= ;;
    posix_compliant:* | unix_behavior:*) if no_shell; then shell=; else set -- "$shell" -c "$*"; fi ;;
    *) shell= ;;
esac
if [ "${shell:+${SGE_STARTER_USE_LOGIN_SHELL-}}" = true ] && [ -x /bin/bash ]; then
    set -- /bin/bash -c 'exec -a "-${0##*/}" "$0" "$@"' "$@"
fi

"$pjwctl" --version >/dev/null 2>&1 || exec "$@"

exec "$pjwctl" hook sge-starter -- "$@"
