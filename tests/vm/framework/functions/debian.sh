# The words of the Debian machine, for bash: systemd, Slurm, Grid Engine, users. See common.sh for the others.

# --- our programs -------------------------------------------------------------------------------------------------

# install_pjw [LINE]...: our programs, units and configuration as `make install` lays them out; LINEs are put before
# the keys of pjwd.toml. install_deb does the same from the package, if one was built.
install_pjw() {
    cp -a /pjw/tree/. /
    configure_pjw "$@"
    systemd-sysusers && systemd-tmpfiles --create pjw.conf
    systemctl daemon-reload
}

has_deb() { ls /pjw/*.deb >/dev/null 2>&1; }
install_deb() {
    dpkg -i /pjw/*.deb >&2 || return
    configure_pjw "$@"
}

# configure_pjw [LINE]...: these keys, and else all defaults.
configure_pjw() {
    mkdir -p /etc/pjw
    if [ $# -gt 0 ]; then printf '%s\n' "$@" >/etc/pjw/pjwd.toml; fi
}

answers() { pjwctl status --json >/dev/null 2>&1; }
silent() { ! answers; }

# start_pjw [LINE]...: installed, if it is not yet, and running under systemd. Each word of systemctl's that writes unit
# files makes systemd read all of them again.
start_pjw() {
    if [ -e /usr/bin/pjwd ]; then configure_pjw "$@"; else install_pjw "$@"; fi
    systemctl is-enabled --quiet pjwd.service || systemctl enable pjwd.service >&2
    systemctl start pjwd.service >&2
    eventually "the daemon answers" answers || exit 1
}

main_pid() { systemctl show -P MainPID "${1:-pjwd.service}"; }
property() { systemctl show -P "$2" "$1"; }

# --- users --------------------------------------------------------------------------------------------------------

# as USER COMMAND...: in the user's home, with the user's environment and nobody else's.
as() {
    local user=$1
    shift
    (cd "/home/$user" && exec runuser -u "$user" -- env -i HOME="/home/$user" USER="$user" LOGNAME="$user" \
        SHELL=/bin/bash PATH=/usr/local/bin:/usr/bin:/bin LANG=C.UTF-8 "$@")
}

# linger USER: a systemd of the user's own, as a login would start it, so that `as USER systemd-run --user` works.
linger() {
    loginctl enable-linger "$1"
    eventually "$1 has a systemd of their own" test -S "/run/user/$(id -u "$1")/systemd/private"
}
user_run() {
    local user=$1
    shift
    as "$user" env XDG_RUNTIME_DIR="/run/user/$(id -u "$user")" systemd-run --user --quiet "$@"
}

# cron_is_due: what cron is to start every minute is started within seconds: the clock goes on to the minute's end.
cron_is_due() {
    date -s "@$((($(date +%s) / 60 + 1) * 60 - 2))" >&2
    systemctl restart cron
}

# --- run time ------------------------------------------------------------------------------------------------------

# counted PID...: milliseconds run and waited, of all of them.
counted() { cat $(printf '/proc/%s/schedstat ' "$@") | awk '{ ran += $1; waited += $2 } END { printf "%d %d\n", ran / 1e6, waited / 1e6 }'; }
# share BEFORE AFTER: of two outputs of `counted`, milliseconds run meanwhile, and the permille of the wish that was waited.
share() { echo "$1 $2" | awk '{ ran = $3 - $1; waited = $4 - $2; printf "%d %d\n", ran, 1000 * waited / (ran + waited + 1) }'; }

# --- Slurm --------------------------------------------------------------------------------------------------------

is_idle() { [ "$(sinfo -h -o %T)" = idle ]; }
never_drained() {
    local states
    states=$(sinfo -h -o %T) && [ -n "$states" ] && ! echo "$states" | grep -Eq 'drain|down|fail'
}

# slurm_mode constrain-no|constrain-yes|linuxproc [LINE]...: another configuration of Slurm, with LINEs at the end of
# slurm.conf, in force. The machine begins with constrain-no.
slurm_mode() {
    slurm-mode "$@" || exit 1
    systemctl restart slurmctld slurmd
    eventually "Slurm is idle as $*" is_idle || exit 1
}

# submit USER ARGUMENT...: sbatch with the job's commands on standard input; prints the number.
submit() {
    local user=$1
    shift
    { echo '#!/bin/bash'; cat; } | as "$user" sbatch --parsable --output="/tmp/%j.out" "$@"
}

# sbatch_sleep USER ARGUMENT...: a job that sleeps.
sbatch_sleep() { echo 'sleep 1000' | submit "$@"; }
# sbatch_busy USER THREADS ARGUMENT...: one that keeps so many CPUs busy.
sbatch_busy() {
    local user=$1 threads=$2
    shift 2
    echo "for i in \$(seq $threads); do (while :; do :; done) & done; wait" | submit "$user" "$@"
}

job_state() { scontrol show job "$1" -o | sed -n 's/.*JobState=\([A-Z]*\).*/\1/p' | head -n 1; }
is_state() { [ "$(job_state "$1")" = "$2" ]; }
is_over() { [ -z "$(squeue -h -j "$1" 2>/dev/null)" ]; }

# pids_of_job N [STEP]: the job's processes by what Slurm knows of them, without its own.
pids_of_job() {
    local pid step comm
    scontrol listpids "$1" 2>/dev/null | while read -r pid _ step _; do
        case $pid in '' | *[!0-9]* | 0) continue ;; esac
        [ -z "${2:-}" ] || [ "$step" = "$2" ] || continue
        { read -r comm <"/proc/$pid/comm"; } 2>/dev/null && [ "$comm" != slurmstepd ] && echo "$pid"
    done
    return 0
}
# pids_by_environ VARIABLE=VALUE: every process that was started with it; Slurm's own clients are among them.
pids_by_environ() { grep -lazxF "$1" /proc/[0-9]*/environ 2>/dev/null | cut -d/ -f3; }
pids_by_comm() { pgrep -x "$1"; }

# job_is_on N LIST: whether the job has processes, and every thread of them is inside the list.
job_is_on() {
    local pids
    pids=$(pids_of_job "$1")
    # shellcheck disable=SC2086 # one word a process
    [ -n "$pids" ] && confined "$2" $pids
}
# job_is_jailed N: the same, with what pjw says that it holds.
job_is_jailed() { job_is_on "$1" "$(cpus "slurm:$1")"; }
# knows JOB / forgot JOB: by `pjwctl status`.
knows() { [ -n "$(field "$1" id)" ]; }
forgot() { ! knows "$1"; }

# cpuset_of_job N: what Slurm wrote for it; empty if nothing.
cpuset_of_job() { cat /sys/fs/cgroup/system.slice/*slurmstepd.scope/job_"$1"/cpuset.cpus 2>/dev/null; }

# --- Grid Engine --------------------------------------------------------------------------------------------------

# start_grid_engine [LINE]...: its daemons, which do not run before, a parallel environment `smp` of one host, and the
# queue `main` with as many slots as the node has cores. LINEs are the queue's, such as `prolog root@…`.
start_grid_engine() {
    systemctl start gridengine-master || exit 1
    eventually "Grid Engine's master answers" qconf -sh || exit 1
    systemctl start gridengine-exec || exit 1
    qconf -as "$(hostname)" >&2
    by_qconf -Ap <<'END'
pe_name            smp
slots              999
user_lists         NONE
xuser_lists        NONE
start_proc_args    NONE
stop_proc_args     NONE
allocation_rule    $pe_slots
control_slaves     FALSE
job_is_first_task  TRUE
urgency_slots      min
accounting_summary FALSE
qsort_args         NONE
END
    queue_with "$@" | by_qconf -Aq
    # Else a job waits for the scheduler's next turn, and for the load that those before it are guessed to make.
    qconf -ssconf | sed 's/^\(flush_[a-z]*_sec\).*/\1 1/; s/^\(job_load_adjustments\).*/\1 NONE/' | by_qconf -Msconf
    eventually "Grid Engine's queue is open" is_open || exit 1
}
# by_qconf OPTION: a change of Grid Engine's configuration, which is read from standard input; qconf reads no pipes.
by_qconf() { cat >/tmp/by_qconf && qconf "$1" /tmp/by_qconf >&2; }

# change_queue [LINE]...: the queue with these lines, and with no other LINEs.
change_queue() { queue_with "$@" | by_qconf -Mq; }
queue_with() {
    local cores
    cores=$(cat /sys/devices/system/cpu/cpu[0-9]*/topology/thread_siblings_list | sort -u | wc -l)
    # As a queue is before anyone has changed it.
    qconf -sq | awk '
        BEGIN { for (at = 1; at < ARGC; at++) { name = ARGV[at]; sub(/ .*/, "", name); line[name] = ARGV[at] }; ARGC = 1 }
        { print $1 in line ? line[$1] : $0 }
        ' "qname main" "hostlist $(hostname)" "slots $cores" "pe_list smp" "load_thresholds NONE" "$@"
}

# is_open: whether the queue takes jobs: not in error (E), and its host has reported (u) a load (a).
is_open() { qstat -f -q main | awk '$1 ~ /^main@/ { found = 1; state = $6 } END { exit !found || state != "" }'; }

# qsubmit USER ARGUMENT...: qsub with the job's commands on standard input; prints the number.
qsubmit() {
    local user=$1 id
    shift
    id=$({ echo '#!/bin/bash'; cat; } | as "$user" qsub -terse -j y -o /dev/null "$@")
    echo "${id%%.*}"
}
# grid_state N: what Grid Engine says of a job: r, qw, Rq, ...; nothing once it is over.
grid_state() { qstat -u '*' | awk -v job="$1" '$1 == job { print $5; exit }'; }

# pids_of_grid_job N.TASK: the job's processes, by the group that Grid Engine gives them.
pids_of_grid_job() {
    local group
    group=$(sed -n 's/^add_grp_id=//p' /var/spool/gridengine/execd/*/active_jobs/"$1"/config 2>/dev/null)
    [ -z "$group" ] || grep -lsE "^Groups:.*\<$group\>" /proc/[0-9]*/status | cut -d/ -f3
}
# grid_job_is_jailed N.TASK: whether it has processes, and every thread of them is on what pjw says that it holds.
grid_job_is_jailed() {
    local pids
    pids=$(pids_of_grid_job "$1")
    # shellcheck disable=SC2086 # one word a process
    [ -n "$pids" ] && confined "$(cpus "sge:$1")" $pids
}

# --- the node -----------------------------------------------------------------------------------------------------

# dump_threads FILE: the mask of every thread that is not the kernel's, a line each.
dump_threads() {
    awk '
        FNR == 1 { name = ""; parent = "" }
        $1 == "Name:" { name = $2 }
        $1 == "Tgid:" { process = $2 }
        $1 == "Pid:" { thread = $2 }
        $1 == "PPid:" { parent = $2 }
        $1 == "Cpus_allowed_list:" && parent != 2 && process != 2 { print process "/" thread "/" name, $2 }
        ' /proc/[0-9]*/task/*/status 2>/dev/null | sort >"$1"
}
# same_threads A B: whether every thread that is in both dumps has the same mask in both, and there are some.
same_threads() {
    join "$1" "$2" | awk '{ both++ } $2 != $3 { print "mask changed: " $0; changed++ } END { print both + 0 " threads are in both"; exit !both || changed }'
}

# dump_node FILE: all that pjw could have changed: cpusets of every cgroup that lasts, masks of every thread that is
# not the kernel's and not the asker's, AllowedCPUs of units. Two dumps of an undisturbed node are equal, whatever
# pids its processes have.
dump_node() {
    {
        cgroup_settings
        thread_masks
        systemctl show '*' -p Id -p AllowedCPUs -p AllowedMemoryNodes -p CPUAffinity 2>/dev/null |
            awk -v RS= '/=./ && /(AllowedCPUs|AllowedMemoryNodes|CPUAffinity)=[^\n]/ { gsub("\n", " "); print "unit " $0 }' | sort
    } >"$1"
}
cgroup_settings() {
    find /sys/fs/cgroup \( -name 'cpuset.cpus' -o -name 'cpuset.cpus.effective' -o -name 'cpuset.mems' \
        -o -name 'cpuset.cpus.partition' -o -name cgroup.subtree_control \) -exec grep -H '' {} + | sort
}
# Names and masks, each once: threads come and go, their kinds stay.
thread_masks() {
    awk -v self="$$" '
        FNR == 1 { name = ""; parent = "" }
        $1 == "Name:" { name = $2 }
        $1 == "PPid:" { parent = $2 }
        $1 == "Tgid:" { process = $2 }
        $1 == "Cpus_allowed_list:" && parent != 2 && process != 2 && process != self && parent != self {
            if (name !~ /^(awk|find|sort|bash|pjw|\(sd-)/) print "threads of " name " on " $2
        }' /proc/[0-9]*/task/*/status 2>/dev/null | sort | uniq
}
