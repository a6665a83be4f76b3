# Slurm's prolog beside a warden that is stopped, that hangs, or whose socket is gone: it ends with 0 in time, says why,
# and the node is never drained. Times are the guest's, which is emulated.
# first
. /cases/words

hooks=/usr/share/pjw/hooks/slurm
timed() {
    cat >"/tmp/$1.sh" <<END
#!/bin/bash
begin=\$EPOCHREALTIME
$hooks/$1.sh 2>/tmp/told
code=\$?
end=\$EPOCHREALTIME
cat /tmp/told >&2
echo "\$code \$(( (\${end/./} - \${begin/./}) / 1000 )) \$(wc -l </tmp/told)" >/tmp/$1.took
exit \$code
END
    chmod +x "/tmp/$1.sh"
}
ran() { [ -s "/tmp/$1.took" ]; }
runs() { [ -n "$(pids_of_job "$1")" ]; }
# try HOW: a job's prolog and epilog now.
try() {
    local how=$1 hook code milliseconds lines
    rm -f /tmp/*.took
    job=$(sbatch_sleep alice -n4)
    eventually "$how, the job starts" runs "$job"
    scancel "$job"
    eventually "$how, it ends" is_over "$job"
    for hook in prolog epilog; do
        eventually "$how, the $hook ran" ran $hook || continue
        read -r code milliseconds lines <"/tmp/$hook.took"
        figure "$how, the $hook took $milliseconds ms"
        check "$how, the $hook ends with 0" [ "$code" = 0 ]
        check "$how, the $hook ends in 2 seconds" [ "$milliseconds" -le 2000 ]
        check "$how, the $hook says why in a line" [ "$lines" = 1 ]
    done
    eventually "$how, the node is idle again" is_idle
}

start_pjw
timed prolog
timed epilog
slurm_mode constrain-no Prolog=/tmp/prolog.sh Epilog=/tmp/epilog.sh "TaskProlog=$hooks/task-prolog.sh" PrologFlags=Contain
warden=$(main_pid)
kill -STOP "$warden"
try "beside a warden that hangs"
kill -CONT "$warden"
systemctl stop pjwd.service pjwd.socket
try "beside a warden that is stopped"
rm -rf /run/pjwd
try "without a socket"
check "what it said is in slurmd's log" sh -c 'journalctl --no-pager -u slurmd | grep "hook slurm-prolog:"'
check "the node was never drained" never_drained
check "slurmctld has never thought of it" sh -c '! journalctl --no-pager -u slurmctld -u slurmd | grep -i drain'
