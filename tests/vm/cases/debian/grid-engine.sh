# Grid Engine with the hooks of the package. A job has its cores before its first instruction, gets them in variables, and frees
# them at its end. If pjwd does not answer, jobs run and the queue stays open. Without hooks, pjwd finds the jobs.
# deadline: 720
. /cases/functions

hooks=/usr/share/pjw/hooks/sge
hooked=("prolog root@$hooks/prolog.sh \$job_owner" "epilog root@$hooks/epilog.sh" "starter_method $hooks/starter.sh")
# The shell of a job writes its own mask and its variables before it starts anything.
write_report='while read -r name value; do [ "$name" != Cpus_allowed_list: ] || mask=$value; done </proc/$$/status
echo "$mask" >/tmp/mask.$JOB_ID.$SGE_TASK_ID
env | grep -E "^(PJW|OMP)_" >/tmp/report.$JOB_ID.$SGE_TASK_ID
echo "by $(tr "\0" " " </proc/$$/cmdline)" >>/tmp/report.$JOB_ID.$SGE_TASK_ID
echo end >>/tmp/report.$JOB_ID.$SGE_TASK_ID'
# One process with 64 threads that sleep, one in a session of its own whose parent has ended, and one that computes.
processes='python3 -c "
import threading, time
for _ in range(63): threading.Thread(target=time.sleep, args=(1000,)).start()
" &
(setsid sleep 1000 &)
(while :; do :; done) &
wait'
has_report() { grep -qsx end "/tmp/report.$1"; }
report_has() { grep -qx "$2" "/tmp/report.$1"; }
report_has_no_pjw() { has_report "$1" && ! grep -q PJW "/tmp/report.$1"; }
has_processes() { [ "$(pids_of_grid_job "$1" | wc -l)" -ge "$2" ]; }
is_on_cores() { [ "$(each_cpu "$(cpus "sge:$1")" | wc -l)" = $((2 * $2)) ]; }
is_gone() { [ -z "$(grid_state "$1")" ]; }
# Whether the job waits in the queue after its strict prolog ran. It waits there before, too.
is_requeued() { [ -e /tmp/strict-prolog-ran ] && [[ $(grid_state "$1") == *[Rq]* ]] && [ ! -e "/tmp/report.$1.undefined" ]; }

without_watchdog
start_pjw
cp -r "$hooks" /tmp/shipped
check "the hooks have more time for this machine" give_hooks_time "$hooks"
start_grid_engine "${hooked[@]}"
a=$(qsubmit alice -pe smp 4 <<<"$write_report; $processes")
b=$(qsubmit bob -pe smp 4 -S /bin/bash -v OMP_NUM_THREADS=3 <<<"$write_report; $processes")
for job in "$a" "$b"; do
    eventually "job $job has written its report" has_report "$job.undefined" || exit 1
    eventually "job $job has all its processes" has_processes "$job.1" 4
done
a_cpus=$(cpus "sge:$a.1") b_cpus=$(cpus "sge:$b.1")
check "no CPU belongs to both jobs" disjoint "$a_cpus" "$b_cpus"
for job in "$a:$a_cpus:1001:4:sh" "$b:$b_cpus:1002:3:bash"; do
    IFS=: read -r job grant owner threads shell <<<"$job"
    check "four slots of job $job are four whole cores" is_on_cores "$job.1" 4
    check "the cores of job $job are in one NUMA node" in_one_node "$grant"
    check "the owner of job $job is its user" [ "$(field "sge:$job.1" owner)" = "$owner" ]
    check "the shell of job $job was on its cores at its first instruction" within "$(cat "/tmp/mask.$job.undefined")" "$grant"
    check "job $job has its cores in PJW_CPUS" report_has "$job.undefined" "PJW_CPUS=$grant"
    check "job $job has its number of cores in PJW_NCORES" report_has "$job.undefined" PJW_NCORES=4
    check "job $job has OMP_NUM_THREADS=$threads" report_has "$job.undefined" "OMP_NUM_THREADS=$threads"
    check "the shell of job $job is the one that Grid Engine would have started" report_has "$job.undefined" "by -$shell .*/job_scripts/$job *"
    eventually "every thread of job $job is on its cores, including those in other sessions" grid_job_is_confined "$job.1"
done
check "doctor reports that the configuration of Grid Engine is in no file" sh -c \
    "pjwctl doctor --all | tr -s ' \n' ' ' | grep -q 'Grid Engine: how it binds jobs is not known (its configuration is in no file'"
# shellcheck disable=SC2046 # one word for each process
check "the daemons of Grid Engine are not bound" [ "$(masks $(pgrep 'sge_(execd|shepherd)'))" = 0-15 ]
qdel "$a" "$b" >&2
eventually "the epilog freed the cores of alice's job" has_no_job "sge:$a.1"
eventually "the epilog freed the cores of bob's job" has_no_job "sge:$b.1"
eventually "all cores are free" is_free 0-15

# Each task of an array is a job. A job without a parallel environment has one slot.
many=$(qsubmit alice -t 1-2 -pe smp 2 <<<"$write_report; sleep 1000")
one=$(qsubmit bob <<<"$write_report; sleep 1000")
as bob qsub -b y -j y -o /dev/null 'echo $NSLOTS $PJW_NCORES >/tmp/line' >&2
for job in "$many.1:$many.1:2" "$many.2:$many.2:2" "$one.1:$one.undefined:1"; do
    IFS=: read -r job report cores <<<"$job"
    eventually "job $job has written its report" has_report "$report" || exit 1
    check "job $job holds $cores cores" is_on_cores "$job" "$cores"
    check "the shell of job $job was on its cores at its first instruction" within "$(cat "/tmp/mask.$report")" "$(cpus "sge:$job")"
    check "job $job has its cores in PJW_CPUS" report_has "$report" "PJW_CPUS=$(cpus "sge:$job")"
done
eventually "a command line with qsub -b y runs in a shell" grep -qsx "1 1" /tmp/line
check "no CPU belongs to both tasks of the array" disjoint "$(cpus "sge:$many.1")" "$(cpus "sge:$many.2")"
check "no CPU belongs to a task of the array and to another job" disjoint "$(cpus "sge:$many.1"),$(cpus "sge:$many.2")" "$(cpus "sge:$one.1")"
qdel "$many" -t 1 >&2
eventually "a deleted task is no longer in the status" has_no_job "sge:$many.1"
check "the other task of the array is still on its cores" grid_job_is_confined "$many.2"
qdel "$many" "$one" >&2
eventually "all cores are free after the array" is_free 0-15

# pjwd is stopped by SIGSTOP. After that, pjwd is not running. The hooks have the time limit with which they are shipped.
cp --remove-destination /tmp/shipped/*.sh "$hooks/"
daemon=$(main_pid)
kill -STOP "$daemon"
during_stop=$(qsubmit alice -pe smp 2 <<<"$write_report; sleep 1000")
eventually "a job runs without cores of its own while pjwd is stopped by SIGSTOP" report_has_no_pjw "$during_stop.undefined"
kill -CONT "$daemon"
eventually "the job holds cores when pjwd runs again" holds "sge:$during_stop.1"
eventually "the job is on its cores when pjwd runs again" grid_job_is_confined "$during_stop.1"
systemctl stop pjwd.service pjwd.socket
without_daemon=$(qsubmit bob -pe smp 2 <<<"$write_report; sleep 1000")
eventually "a job runs without cores of its own while no pjwd runs" report_has_no_pjw "$without_daemon.undefined"
check "this job may run on all CPUs" [ "$(cat "/tmp/mask.$without_daemon.undefined")" = 0-15 ]
qdel "$without_daemon" >&2
eventually "this job ends" is_gone "$without_daemon"
check "the queue is open while no pjwd runs" is_open

# With --strict, the job goes back into the queue and waits there.
check "the hooks have more time again" give_hooks_time "$hooks"
sed -e '1a : >/tmp/strict-prolog-ran' -e 's/" hook /&--strict /' "$hooks/prolog.sh" >/usr/local/bin/strict-prolog
chmod 755 /usr/local/bin/strict-prolog
change_queue "prolog root@/usr/local/bin/strict-prolog \$job_owner" "${hooked[@]:1}"
strict=$(qsubmit bob -pe smp 2 <<<"$write_report; sleep 1000")
eventually "with --strict the job is requeued while no pjwd runs" is_requeued "$strict"
check "the queue is open with --strict" is_open
start_pjw
eventually "the requeued job runs when pjwd runs" has_report "$strict.undefined"
check "the shell of the requeued job was on its cores" within "$(cat "/tmp/mask.$strict.undefined")" "$(cpus "sge:$strict.1")"
eventually "the job that started while pjwd was stopped is on its cores again" grid_job_is_confined "$during_stop.1"
check "no CPU belongs to both of these jobs" disjoint "$(cpus "sge:$strict.1")" "$(cpus "sge:$during_stop.1")"
qdel "$during_stop" "$strict" >&2
eventually "all cores are free after the requeued job" is_free 0-15

# Without hooks.
change_queue
a=$(qsubmit alice -pe smp 4 <<<"$write_report; $processes")
b=$(qsubmit bob -t 3-4 -pe smp 2 <<<"$write_report; sleep 1000")
for job in "$a.1:4" "$b.3:2" "$b.4:2"; do
    eventually "without hooks job ${job%:*} holds cores" holds "sge:${job%:*}"
    eventually "without hooks job ${job%:*} is on its cores" grid_job_is_confined "${job%:*}"
    check "without hooks job ${job%:*} holds ${job#*:} cores" is_on_cores "${job%:*}" "${job#*:}"
done
check "without hooks no CPU belongs to two jobs" disjoint "$(cpus "sge:$a.1")" "$(cpus "sge:$b.3"),$(cpus "sge:$b.4")"
check "without hooks the cores of alice's job are in one NUMA node" in_one_node "$(cpus "sge:$a.1")"
eventually "without hooks the job has no variables of pjw" report_has_no_pjw "$a.undefined"
qdel "$a" "$b" >&2
eventually "all cores are free after the jobs without hooks" is_free 0-15
eventually "the jobs without hooks are no longer in the status" has_no_job "sge:$a.1"
check "the queue is still open at the end" is_open
