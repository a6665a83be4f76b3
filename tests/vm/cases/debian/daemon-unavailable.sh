# Slurm's prologs and epilog beside a warden that is stopped, that hangs, or whose socket is gone: they end with 0 in
# time, say why, the job's task runs, and the node is never drained. Times are the guest's: what the emulator takes just
# to start a shell and pjwctl, 10 ms on a real machine, is measured right before and does not count.
# alone
. /cases/functions

hooks=/usr/share/pjw/hooks/slurm
timed() {
    cat >"/tmp/$1.sh" <<END
#!/bin/bash
first=\$EPOCHREALTIME
/bin/sh -c '/usr/bin/pjwctl --version; :' >/dev/null
begin=\$EPOCHREALTIME
$hooks/$1.sh 2>/tmp/$1.told
code=\$?
end=\$EPOCHREALTIME
cat /tmp/$1.told >&2
echo "\$code \$(( (\${end/./} - \${begin/./}) / 1000 )) \$(( (\${begin/./} - \${first/./}) / 1000 )) \$(wc -l </tmp/$1.told)" >/tmp/$1.took
exit \$code
END
    chmod +x "/tmp/$1.sh"
}
ran() { [ -s "/tmp/$1.took" ]; }
# The batch script's task, behind the task prolog.
runs() { pgrep -u alice -f '^sleep 1000' >/dev/null; }
# try HOW: a job's prolog and epilog now.
try() {
    local how=$1 hook code milliseconds start lines
    rm -f /tmp/*.took
    job=$(sbatch_sleep alice -n4)
    eventually "$how, the job's task runs" runs
    scancel "$job"
    eventually "$how, it ends" is_over "$job"
    for hook in prolog task-prolog epilog; do
        eventually "$how, the $hook ran" ran $hook || continue
        read -r code milliseconds start lines <"/tmp/$hook.took"
        figure "$how, the $hook took $milliseconds ms; just to start took $start ms before"
        check "$how, the $hook ends with 0" [ "$code" = 0 ]
        check "$how, the $hook ends in 2 seconds" [ $((milliseconds - start)) -le 2000 ]
        check "$how, the $hook says why in a line" [ "$lines" = 1 ]
    done
    eventually "$how, the node is idle again" is_idle
}

start_pjw
timed prolog
timed epilog
timed task-prolog
slurm_mode constrain-no Prolog=/tmp/prolog.sh Epilog=/tmp/epilog.sh TaskProlog=/tmp/task-prolog.sh PrologFlags=Contain
daemon=$(main_pid)
kill -STOP "$daemon"
try "beside a warden that hangs"
kill -CONT "$daemon"
systemctl stop pjwd.service pjwd.socket
try "beside a warden that is stopped"
rm -rf /run/pjwd
try "without a socket"
eventually "what it said is in slurmd's log" sh -c 'journalctl --no-pager -u slurmd | grep "hook slurm-prolog:"'
check "the node was never drained" never_drained
check "slurmctld has never thought of it" sh -c '! journalctl --no-pager -u slurmctld -u slurmd | grep -i drain'
