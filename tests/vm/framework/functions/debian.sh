# Functions for the cases on the Debian machine, in bash: systemd, Slurm, Grid Engine, users. They follow those of common.sh.

# --- pjw ----------------------------------------------------------------------------------------------------------

# install_pjw [LINE]...: installs programs, units and configuration as `make install` does. The LINEs become pjwd.toml.
# install_deb does the same from the package. has_deb tells whether the package was built.
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

# configure_pjw [LINE]...: writes the LINEs to pjwd.toml. All other keys have their defaults.
configure_pjw() {
    mkdir -p /etc/pjw
    if [ $# -gt 0 ]; then printf '%s\n' "$@" >/etc/pjw/pjwd.toml; fi
}

answers() { pjwctl status --json >/dev/null 2>&1; }
does_not_answer() { ! answers; }

# start_pjw [LINE]...: installs pjw if it is not installed, starts it under systemd, and waits until it answers. The unit is
# enabled only if it is not yet: each `systemctl enable` makes systemd read all unit files again.
start_pjw() {
    if [ -e /usr/bin/pjwd ]; then configure_pjw "$@"; else install_pjw "$@"; fi
    systemctl is-enabled --quiet pjwd.service || systemctl enable pjwd.service >&2
    systemctl start pjwd.service >&2
    eventually "the daemon answers" answers || exit 1
}

# without_watchdog: systemd no longer ends a pjwd that has not answered for 30 s. For cases that stop pjwd by SIGSTOP. It is called
# before start_pjw.
without_watchdog() {
    mkdir -p /etc/systemd/system/pjwd.service.d
    printf '[Service]\nWatchdogSec=0\n' >/etc/systemd/system/pjwd.service.d/without-watchdog.conf
    systemctl daemon-reload
}

# give_hooks_time DIRECTORY: the hooks of pjw in the directory wait for pjwd for 30 s instead of 1.2 s. After this time the job goes on
# without its cores and variables, and the emulated machine may stand still for longer than 1.2 s. Fails if a hook is not changed.
give_hooks_time() {
    sed -i 's/" hook [a-z-]*/& --timeout 30/' "$1"/*.sh
    ! grep -L -- ' --timeout 30' "$1"/*.sh | grep .
}

main_pid() { systemctl show -P MainPID "${1:-pjwd.service}"; }
property() { systemctl show -P "$2" "$1"; }

# --- users --------------------------------------------------------------------------------------------------------

# as USER COMMAND...: runs the command as the user, in the user's home, with no other environment than the user's.
as() {
    local user=$1
    shift
    (cd "/home/$user" && exec runuser -u "$user" -- env -i HOME="/home/$user" USER="$user" LOGNAME="$user" \
        SHELL=/bin/bash PATH=/usr/local/bin:/usr/bin:/bin LANG=C.UTF-8 "$@")
}

# linger USER: starts a systemd instance of the user, as a login does. user_run USER COMMAND... is `systemd-run --user`.
linger() {
    loginctl enable-linger "$1"
    eventually "the systemd instance of $1 runs" has_instance "$(id -u "$1")"
}
# has_instance UID: whether the systemd instance of the user has started its basic units. Its own socket is there before the one of
# D-Bus, which `systemd-run --wait` needs.
has_instance() { systemctl is-active --quiet "user@$1.service" && [ -S "/run/user/$1/bus" ]; }
user_run() {
    local user=$1
    shift
    as "$user" env XDG_RUNTIME_DIR="/run/user/$(id -u "$user")" systemd-run --user --quiet "$@"
}

# run_cron_now: cron starts its every-minute entries within seconds. It starts them at full minutes only. So it is started when the
# clock is a few seconds before a full minute. If its start takes longer than that, it is started again with more seconds.
run_cron_now() {
    local ahead minute
    for ahead in 3 6 12; do
        systemctl stop cron
        minute=$((($(date +%s) / 60 + 1) * 60))
        date -s "@$((minute - ahead))" >&2
        systemctl start cron
        [ "$(date +%s)" -ge "$minute" ] || break
    done
}

# --- run time ------------------------------------------------------------------------------------------------------

# sched_times PID...: prints how many milliseconds these processes ran, how many they waited for a CPU, and the sum of the times since
# the boot at which each of them was read. It starts no program, because that takes seconds while the CPUs compute.
sched_times() {
    local pid ran waited up all_ran=0 all_waited=0 all_up=0
    for pid in "$@"; do
        read -r ran waited _ <"/proc/$pid/schedstat" || continue
        read -r up _ </proc/uptime
        all_ran=$((all_ran + ran)) all_waited=$((all_waited + waited)) all_up=$((all_up + 10#${up/./}))
    done
    echo "$((all_ran / 1000000)) $((all_waited / 1000000)) $((all_up * 10))"
}
# sched_difference BEFORE AFTER: compares two outputs of sched_times. Prints the milliseconds of run time between them, the wait time
# in permille of run time and wait time, and the mean share of a CPU that a process got, in permille. Each process has a time of its
# own for this share, because the shell may stand still between two processes.
sched_difference() {
    echo "$1 $2" | awk '{
        ran = $4 - $1; waited = $5 - $2; passed = $6 - $3
        printf "%d %d %d\n", ran, 1000 * waited / (ran + waited + 1), 1000 * ran / (passed + 1)
    }'
}

# is_in_state STATE PID: whether the process is in the state, such as R (runs, or waits for a CPU) or T (is stopped). It starts no
# program either.
is_in_state() {
    local stat
    { read -r stat <"/proc/$2/stat"; } 2>/dev/null || return 1
    # The name of the program is before the state, in parentheses.
    stat=${stat##*) }
    [ "${stat%% *}" = "$1" ]
}

# --- Slurm --------------------------------------------------------------------------------------------------------

is_idle() { [ "$(sinfo -h -o %T)" = idle ]; }
never_drained() {
    local states
    states=$(sinfo -h -o %T) && [ -n "$states" ] && ! echo "$states" | grep -Eq 'drain|down|fail'
}

# slurm_mode constrain-no|constrain-yes|linuxproc [LINE]...: restarts Slurm with this configuration. The LINEs are added to
# slurm.conf. The machine begins with constrain-no.
slurm_mode() {
    local was
    was=$(slurmd_start)
    slurm-mode "$@" || exit 1
    systemctl restart slurmctld slurmd
    eventually "Slurm is idle in the mode $*" is_idle_again "$was" || exit 1
}

# submit USER ARGUMENT...: runs sbatch with the job's commands from standard input. Prints the number of the job.
submit() {
    local user=$1
    shift
    { echo '#!/bin/bash'; cat; } | as "$user" sbatch --parsable --output="/tmp/%j.out" "$@"
}

# sbatch_sleep USER ARGUMENT...: submits a job that sleeps.
sbatch_sleep() { echo 'sleep 1000' | submit "$@"; }
# sbatch_busy USER THREADS ARGUMENT...: submits a job with this number of processes that compute.
sbatch_busy() {
    local user=$1 threads=$2
    shift 2
    echo "for i in \$(seq $threads); do (while :; do :; done) & done; wait" | submit "$user" "$@"
}

# slurmd_start: prints when slurmd started, as slurmctld knows it. A restarted slurmctld does not know it before slurmd has registered,
# but shows the state that the node had before. slurmd_has_restarted TIME: whether a later slurmd than that one has registered.
slurmd_start() { scontrol show node -o | sed -n 's/.*SlurmdStartTime=\([^ ]*\).*/\1/p'; }
slurmd_has_restarted() {
    local start
    start=$(slurmd_start)
    case $start in '' | None | Unknown | "$1") return 1 ;; esac
}
# slurmd_is_back TIME, is_idle_again TIME: whether it has, and the node has a running job and free CPUs, or no job.
slurmd_is_back() { slurmd_has_restarted "$1" && [ "$(sinfo -h -o %T)" = mixed ]; }
is_idle_again() { slurmd_has_restarted "$1" && is_idle; }

job_state() { scontrol show job "$1" -o | sed -n 's/.*JobState=\([A-Z]*\).*/\1/p' | head -n 1; }
is_state() { [ "$(job_state "$1")" = "$2" ]; }
is_over() { [ -z "$(squeue -h -j "$1" 2>/dev/null)" ]; }

# pids_of_job N [STEP]: prints the processes of the job, as Slurm lists them, except slurmstepd.
pids_of_job() {
    local pid step comm
    scontrol listpids "$1" 2>/dev/null | while read -r pid _ step _; do
        case $pid in '' | *[!0-9]* | 0) continue ;; esac
        [ -z "${2:-}" ] || [ "$step" = "$2" ] || continue
        { read -r comm <"/proc/$pid/comm"; } 2>/dev/null && [ "$comm" != slurmstepd ] && echo "$pid"
    done
    return 0
}
# pids_by_environ VARIABLE=VALUE: prints all processes that were started with it, including commands of Slurm.
pids_by_environ() { grep -lazxF "$1" /proc/[0-9]*/environ 2>/dev/null | cut -d/ -f3; }
pids_by_comm() { pgrep -x "$1"; }

# job_is_on N LIST: whether the job has processes, and the mask of each of their threads has only CPUs of the list.
job_is_on() {
    local pids
    pids=$(pids_of_job "$1")
    # shellcheck disable=SC2086 # one word for each process
    [ -n "$pids" ] && confined "$2" $pids
}
# job_is_confined N: the same for the CPUs that the job holds in the status of pjwd.
job_is_confined() { job_is_on "$1" "$(cpus "slurm:$1")"; }
# has_job JOB, has_no_job JOB: whether `pjwctl status` shows the job.
has_job() { [ -n "$(field "$1" id)" ]; }
has_no_job() { ! has_job "$1"; }

# cpuset_of_job N: prints the cpuset in the job's cgroup, which Slurm made. It is empty if nothing was written.
cpuset_of_job() { cat /sys/fs/cgroup/system.slice/*slurmstepd.scope/job_"$1"/cpuset.cpus 2>/dev/null; }

# --- Grid Engine --------------------------------------------------------------------------------------------------

# start_grid_engine [LINE]...: starts the daemons of Grid Engine, which do not run before. Makes a parallel environment `smp` of
# one host, and a queue `main` with one slot for each core. The LINEs are settings of the queue, such as `prolog root@…`.
start_grid_engine() {
    systemctl start gridengine-master || exit 1
    eventually "Grid Engine's master answers" qconf -sh || exit 1
    systemctl start gridengine-exec || exit 1
    qconf -as "$(hostname)" >&2
    run_qconf -Ap <<'END'
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
    queue_settings "$@" | run_qconf -Aq
    # Without this, a job waits for the next run of the scheduler, and for the load that it expects from earlier jobs.
    qconf -ssconf | sed 's/^\(flush_[a-z]*_sec\).*/\1 1/; s/^\(job_load_adjustments\).*/\1 NONE/' | run_qconf -Msconf
    eventually "Grid Engine's queue is open" is_open || exit 1
}
# run_qconf OPTION: changes Grid Engine's configuration, from standard input. It needs a file, because qconf reads no pipes.
run_qconf() { cat >/tmp/run_qconf && qconf "$1" /tmp/run_qconf >&2; }

# change_queue [LINE]...: changes the queue. It has these LINEs, and defaults otherwise.
change_queue() { queue_settings "$@" | run_qconf -Mq; }
queue_settings() {
    local cores
    cores=$(cat /sys/devices/system/cpu/cpu[0-9]*/topology/thread_siblings_list | sort -u | wc -l)
    # `qconf -sq` prints the defaults of a queue.
    qconf -sq | awk '
        BEGIN { for (at = 1; at < ARGC; at++) { name = ARGV[at]; sub(/ .*/, "", name); line[name] = ARGV[at] }; ARGC = 1 }
        { print $1 in line ? line[$1] : $0 }
        ' "qname main" "hostlist $(hostname)" "slots $cores" "pe_list smp" "load_thresholds NONE" "$@"
}

# is_open: whether the queue takes jobs: it is not in error (E), and its host has reported (u) its load (a).
is_open() { qstat -f -q main | awk '$1 ~ /^main@/ { found = 1; state = $6 } END { exit !found || state != "" }'; }

# qsubmit USER ARGUMENT...: runs qsub with the job's commands from standard input. Prints the number of the job.
qsubmit() {
    local user=$1 id
    shift
    id=$({ echo '#!/bin/bash'; cat; } | as "$user" qsub -terse -j y -o /dev/null "$@")
    echo "${id%%.*}"
}
# grid_state N: prints the state of the job in Grid Engine: r, qw, Rq, .... Prints nothing if the job has ended.
grid_state() { qstat -u '*' | awk -v job="$1" '$1 == job { print $5; exit }'; }

# pids_of_grid_job N.TASK: prints the processes of the job, by the group id that Grid Engine gave them.
pids_of_grid_job() {
    local group
    group=$(sed -n 's/^add_grp_id=//p' /var/spool/gridengine/execd/*/active_jobs/"$1"/config 2>/dev/null)
    [ -z "$group" ] || grep -lsE "^Groups:.*\<$group\>" /proc/[0-9]*/status | cut -d/ -f3
}
# grid_job_is_confined N.TASK: whether it has processes, and each of their threads is on the CPUs that the job holds in pjwd.
grid_job_is_confined() {
    local pids
    pids=$(pids_of_grid_job "$1")
    # shellcheck disable=SC2086 # one word for each process
    [ -n "$pids" ] && confined "$(cpus "sge:$1")" $pids
}

# --- the node -----------------------------------------------------------------------------------------------------

# dump_threads FILE: writes the mask of each thread, except kernel threads, one on each line.
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
# same_threads A B: whether the dumps have threads in common, and each of these has the same mask in both.
same_threads() {
    join "$1" "$2" | awk '{ both++ } $2 != $3 { print "mask changed: " $0; changed++ } END { print both + 0 " threads are in both"; exit !both || changed }'
}

# is_same_twice DUMP FILE: whether the command DUMP writes the same to FILE twice, one after the other. A dump with a thread or a cgroup
# that is there for a moment only is no state to compare with.
is_same_twice() {
    "$1" "$2.once"
    "$1" "$2"
    diff "$2.once" "$2"
}

# dump_node FILE: writes everything that pjw can change: the cpusets of all cgroups, the masks of all threads except kernel
# threads and this shell, and AllowedCPUs of units. Two dumps of a node on which nothing changes are equal. They contain
# no pids.
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
# Prints names and masks, each pair once: threads start and end, but their names stay.
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
