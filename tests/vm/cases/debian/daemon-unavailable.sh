# The prolog, task prolog and epilog of Slurm while pjwd is stopped by SIGSTOP, is not running, or has no socket. Each exits with 0
# within its time limit and writes the reason. The task of the job runs, and the node is never drained. The times are those of the
# guest. The emulator needs some time to start a shell and pjwctl (10 ms on a real machine). This time is measured before each hook
# and does not count. Nor does the time for which the CPU of the hook stood still, because the host was busy.
# alone
. /cases/functions

hooks=/usr/share/pjw/hooks/slurm
# measure_standstill: until the end of standard input, to which nothing is written, adds up by how many milliseconds waits of 100 ms
# took too long. Prints the sum. The status of read is greater than 128 after a timeout.
cat >/tmp/standstill <<'END'
measure_standstill() {
    local total=0 last=${EPOCHREALTIME/./} now status=142
    while [ "$status" -gt 128 ]; do
        read -r -t 0.1
        status=$? now=${EPOCHREALTIME/./}
        [ $((now - last)) -lt 300000 ] || total=$((total + now - last - 100000))
        last=$now
    done
    echo $((total / 1000))
}
END
wrap_hook() {
    cat >"/tmp/$1.sh" <<END
#!/bin/bash
. /tmp/standstill
taskset -pc 15 \$\$ >/dev/null
first=\$EPOCHREALTIME
/bin/sh -c '/usr/bin/pjwctl --version; :' >/dev/null
exec 9> >(measure_standstill >/tmp/$1.stood 2>/dev/null)
standstill=\$!
begin=\$EPOCHREALTIME
$hooks/$1.sh 2>/tmp/$1.output 9>&-
code=\$?
end=\$EPOCHREALTIME
exec 9>&-
wait \$standstill
cat /tmp/$1.output >&2
echo "\$code \$(( (\${end/./} - \${begin/./}) / 1000 )) \$(( (\${begin/./} - \${first/./}) / 1000 )) \$(wc -l </tmp/$1.output) \$(cat /tmp/$1.stood || echo 0)" >/tmp/$1.took
exit \$code
END
    chmod +x "/tmp/$1.sh"
}
ran() { [ -s "/tmp/$1.took" ]; }
# Whether the task of the batch script runs. The task prolog runs before it.
runs() { pgrep -u alice -f '^sleep 1000' >/dev/null; }
# try SITUATION: runs a job with its prologs and its epilog.
try() {
    local situation=$1 hook code milliseconds start lines stood
    rm -f /tmp/*.took /tmp/*.stood
    job=$(sbatch_sleep alice -n4)
    eventually "$situation: the task of the job runs" runs
    scancel "$job"
    eventually "$situation: the job ends" is_over "$job"
    for hook in prolog task-prolog epilog; do
        eventually "$situation: the $hook ran" ran $hook || continue
        read -r code milliseconds start lines stood <"/tmp/$hook.took"
        figure "$situation: the $hook took $milliseconds ms; starting a shell and pjwctl took $start ms before, and the CPU stood still for $stood ms"
        check "$situation: the $hook exits with 0" [ "$code" = 0 ]
        check "$situation: the $hook ends within 2 seconds" [ $((milliseconds - start - stood)) -le 2000 ]
        check "$situation: the $hook writes one line with the reason" [ "$lines" = 1 ]
    done
    eventually "$situation: the node is idle again" is_idle
}

without_watchdog
start_pjw
wrap_hook prolog
wrap_hook epilog
wrap_hook task-prolog
slurm_mode constrain-no Prolog=/tmp/prolog.sh Epilog=/tmp/epilog.sh TaskProlog=/tmp/task-prolog.sh PrologFlags=Contain
daemon=$(main_pid)
kill -STOP "$daemon"
try "pjwd stopped by SIGSTOP"
kill -CONT "$daemon"
systemctl stop pjwd.service pjwd.socket
try "pjwd not running"
rm -rf /run/pjwd
try "no socket"
eventually "the output of the prolog is in slurmd's log" sh -c 'journalctl --no-pager -u slurmd | grep "hook slurm-prolog:"'
check "the node was never drained" never_drained
check "no daemon of Slurm has logged a drain" sh -c '! journalctl --no-pager -u slurmctld -u slurmd | grep -i drain'
