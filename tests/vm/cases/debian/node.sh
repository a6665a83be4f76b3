# The machine has the properties that the other cases rely on.
# without pjw
. /cases/functions

check "the guest has two NUMA nodes" [ "$(cat /sys/devices/system/node/online)" = "0-1" ]
check "CPUs 0 and 1 are the threads of one core" [ "$(cat /sys/devices/system/cpu/cpu0/topology/thread_siblings_list)" = "0-1" ]
check "Slurm has every CPU" [ "$(sinfo -h -o %c)" = "$(nproc)" ]
check "only cgroup v2 is mounted" [ "$(stat -f -c %T /sys/fs/cgroup)" = cgroup2fs ]
is_running() { [ "$(systemctl is-system-running)" = running ]; }
eventually "systemd has started and no unit has failed" is_running
eventually "Slurm is idle" is_idle
check "Slurm's configuration binds no tasks" grep -qx TaskPlugin=task/none /etc/slurm/slurm.conf
check "a user can run a command through Slurm" [ "$(as alice srun -n1 id -un)" = alice ]
check "the environment of a user's command is that of the user" [ "$(as bob sh -c 'echo $USER:$PWD')" = bob:/home/bob ]
check "ssh reaches this node" [ "$(as alice ssh alice@node1 id -un)" = alice ]
linger alice
check "systemd-run --user works for a user with linger" user_run alice --wait true
check "mpirun of Open MPI and of MPICH are installed" sh -c 'command -v mpirun.openmpi && command -v mpirun.mpich'

# The dumps are compared after `release --all`. So they must not change by themselves. The units that the commands above have started
# leave cgroups behind for a moment.
dump_later() { sleep 3; dump_node "$1"; }
eventually "two dumps of a node without changes are equal" is_same_twice dump_later /tmp/before
