# Grid Engine itself, with the hooks as they are shipped: a job has its cores before its first instruction, is told them
# and gives them back, and whatever becomes of the warden, jobs run and the queue stays open. Without hooks its jobs are
# found.
# deadline: 360
. /cases/functions

hooks=/usr/share/pjw/hooks/sge
hooked=("prolog root@$hooks/prolog.sh \$job_owner" "epilog root@$hooks/epilog.sh" "starter_method $hooks/starter.sh")
# What a job's shell reads of itself before it starts anything, and what it was told.
first_words='while read -r name value; do [ "$name" != Cpus_allowed_list: ] || mask=$value; done </proc/$$/status
echo "$mask" >/tmp/said.$JOB_ID.$SGE_TASK_ID
env | grep -E "^(PJW|OMP)_" >/tmp/told.$JOB_ID.$SGE_TASK_ID
echo "by $(tr "\0" " " </proc/$$/cmdline)" >>/tmp/told.$JOB_ID.$SGE_TASK_ID
echo end >>/tmp/told.$JOB_ID.$SGE_TASK_ID'
# One process with 64 threads that sleep, one that has left its session and its parent, and one that computes.
crowd='python3 -c "
import threading, time
for _ in range(63): threading.Thread(target=time.sleep, args=(1000,)).start()
" &
(setsid sleep 1000 &)
(while :; do :; done) &
wait'
has_spoken() { grep -qsx end "/tmp/told.$1"; }
was_told() { grep -qx "$2" "/tmp/told.$1"; }
was_told_nothing() { has_spoken "$1" && ! grep -q PJW "/tmp/told.$1"; }
grown() { [ "$(pids_of_grid_job "$1" | wc -l)" -ge "$2" ]; }
is_on_cores() { [ "$(each_cpu "$(cpus "sge:$1")" | wc -l)" = $((2 * $2)) ]; }
is_gone() { [ -z "$(grid_state "$1")" ]; }
goes_back() { [[ $(grid_state "$1") == *[Rq]* ]] && [ ! -e "/tmp/told.$1.undefined" ]; }

start_pjw
start_grid_engine "${hooked[@]}"
a=$(qsubmit alice -pe smp 4 <<<"$first_words; $crowd")
b=$(qsubmit bob -pe smp 4 -S /bin/bash -v OMP_NUM_THREADS=3 <<<"$first_words; $crowd")
for job in "$a" "$b"; do
    eventually "job $job has spoken" has_spoken "$job.undefined" || exit 1
    eventually "job $job has grown" grown "$job.1" 4
done
a_cpus=$(cpus "sge:$a.1") b_cpus=$(cpus "sge:$b.1")
check "no CPU belongs to both" disjoint "$a_cpus" "$b_cpus"
for job in "$a:$a_cpus:1001:4:sh" "$b:$b_cpus:1002:3:bash"; do
    IFS=: read -r job grant owner threads shell <<<"$job"
    check "four slots are four whole cores for job $job" is_on_cores "$job.1" 4
    check "in one NUMA node" in_one_node "$grant"
    check "its user owns it" [ "$(field "sge:$job.1" owner)" = "$owner" ]
    check "its shell was inside at its first instruction" within "$(cat "/tmp/said.$job.undefined")" "$grant"
    check "and knew its cores" was_told "$job.undefined" "PJW_CPUS=$grant"
    check "and how many" was_told "$job.undefined" PJW_NCORES=4
    check "and has $threads threads for OpenMP" was_told "$job.undefined" "OMP_NUM_THREADS=$threads"
    check "the shell is the one that Grid Engine would have started" was_told "$job.undefined" "by -$shell .*/job_scripts/$job *"
    eventually "every thread is inside, also of who has left" grid_job_is_confined "$job.1"
done
check "the doctor says that its configuration is in no file" sh -c \
    "pjwctl doctor --all | tr -s ' \n' ' ' | grep -q 'Grid Engine: how it binds jobs is not known (its configuration is in no file'"
# shellcheck disable=SC2046 # one word a process
check "Grid Engine's own processes are not bound" [ "$(masks $(pgrep 'sge_(execd|shepherd)'))" = 0-15 ]
qdel "$a" "$b" >&2
eventually "with the epilog alice's cores are free" has_no_job "sge:$a.1"
eventually "with the epilog bob's cores are free" has_no_job "sge:$b.1"
check "all cores are free" is_free 0-15

# Tasks of an array are jobs of their own; a job without a parallel environment has one slot.
many=$(qsubmit alice -t 1-2 -pe smp 2 <<<"$first_words; sleep 1000")
one=$(qsubmit bob <<<"$first_words; sleep 1000")
as bob qsub -b y -j y -o /dev/null 'echo $NSLOTS $PJW_NCORES >/tmp/line' >&2
for job in "$many.1:$many.1:2" "$many.2:$many.2:2" "$one.1:$one.undefined:1"; do
    IFS=: read -r job told cores <<<"$job"
    eventually "job $job has spoken" has_spoken "$told" || exit 1
    check "it has its cores: $cores" is_on_cores "$job" "$cores"
    check "was inside at its first instruction" within "$(cat "/tmp/said.$told")" "$(cpus "sge:$job")"
    check "and knew its cores" was_told "$told" "PJW_CPUS=$(cpus "sge:$job")"
done
eventually "a command line is one to a shell" grep -qsx "1 1" /tmp/line
check "tasks share no CPU" disjoint "$(cpus "sge:$many.1")" "$(cpus "sge:$many.2")"
check "nor with another's job" disjoint "$(cpus "sge:$many.1"),$(cpus "sge:$many.2")" "$(cpus "sge:$one.1")"
qdel "$many" -t 1 >&2
eventually "a task that was deleted is forgotten" has_no_job "sge:$many.1"
check "the other one stays" grid_job_is_confined "$many.2"
qdel "$many" "$one" >&2
eventually "all cores are free again" is_free 0-15

# A warden that hangs, and one that is not there.
daemon=$(main_pid)
kill -STOP "$daemon"
mute=$(qsubmit alice -pe smp 2 <<<"$first_words; sleep 1000")
eventually "with a warden that hangs a job runs" was_told_nothing "$mute.undefined"
kill -CONT "$daemon"
eventually "the warden finds it" holds "sge:$mute.1"
eventually "and confines it" grid_job_is_confined "$mute.1"
systemctl stop pjwd.service pjwd.socket
alone=$(qsubmit bob -pe smp 2 <<<"$first_words; sleep 1000")
eventually "without a warden a job runs" was_told_nothing "$alone.undefined"
check "on all CPUs" [ "$(cat "/tmp/said.$alone.undefined")" = 0-15 ]
qdel "$alone" >&2
eventually "and ends" is_gone "$alone"
check "the queue is open" is_open

# With --strict it goes back to the queue instead, and waits there.
sed 's/" hook /&--strict /' "$hooks/prolog.sh" >/usr/local/bin/strict-prolog
chmod 755 /usr/local/bin/strict-prolog
change_queue "prolog root@/usr/local/bin/strict-prolog \$job_owner" "${hooked[@]:1}"
strict=$(qsubmit bob -pe smp 2 <<<"$first_words; sleep 1000")
eventually "with --strict a job goes back to the queue" goes_back "$strict"
check "which is open all the same" is_open
start_pjw
eventually "with the warden it runs" has_spoken "$strict.undefined"
check "on cores of its own" within "$(cat "/tmp/said.$strict.undefined")" "$(cpus "sge:$strict.1")"
eventually "the job that was there is on its own again" grid_job_is_confined "$mute.1"
check "these are others" disjoint "$(cpus "sge:$strict.1")" "$(cpus "sge:$mute.1")"
qdel "$mute" "$strict" >&2
eventually "all is free once more" is_free 0-15

# Without any hook.
change_queue
a=$(qsubmit alice -pe smp 4 <<<"$first_words; $crowd")
b=$(qsubmit bob -t 3-4 -pe smp 2 <<<"$first_words; sleep 1000")
for job in "$a.1:4" "$b.3:2" "$b.4:2"; do
    eventually "without a hook job ${job%:*} is found" holds "sge:${job%:*}"
    eventually "and every thread of it is confined" grid_job_is_confined "${job%:*}"
    check "to its cores: ${job#*:}" is_on_cores "${job%:*}" "${job#*:}"
done
check "which are its own" disjoint "$(cpus "sge:$a.1")" "$(cpus "sge:$b.3"),$(cpus "sge:$b.4")"
check "in one NUMA node" in_one_node "$(cpus "sge:$a.1")"
check "it was told nothing" was_told_nothing "$a.undefined"
qdel "$a" "$b" >&2
eventually "their cores are free" is_free 0-15
eventually "they are forgotten" has_no_job "sge:$a.1"
check "the queue was never closed" is_open
