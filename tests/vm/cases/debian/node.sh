# The machine is what the other cases count on.
# without pjw
. /cases/functions

check "the guest has two NUMA nodes" [ "$(cat /sys/devices/system/node/online)" = "0-1" ]
check "CPUs 0 and 1 are one core" [ "$(cat /sys/devices/system/cpu/cpu0/topology/thread_siblings_list)" = "0-1" ]
check "Slurm knows every CPU" [ "$(sinfo -h -o %c)" = "$(nproc)" ]
check "cgroups are version 2 alone" [ "$(stat -f -c %T /sys/fs/cgroup)" = cgroup2fs ]
check "systemd is up and nothing has failed" [ "$(systemctl is-system-running)" = running ]
eventually "Slurm would take a job" is_idle
check "no command of Slurm's binds" grep -qx TaskPlugin=task/none /etc/slurm/slurm.conf
check "a user runs a command through Slurm" [ "$(as alice srun -n1 id -un)" = alice ]
check "who owns a command has nothing of root's" [ "$(as bob sh -c 'echo $USER:$PWD')" = bob:/home/bob ]
check "ssh reaches this node" [ "$(as alice ssh alice@node1 id -un)" = alice ]
linger alice
check "users have a systemd of their own" user_run alice --wait true
check "both kinds of mpirun are there" sh -c 'command -v mpirun.openmpi && command -v mpirun.mpich'

# What `release --all` is compared with must not change by itself.
dump_node /tmp/before
sleep 3
dump_node /tmp/after
check "two dumps of an undisturbed node are equal" diff /tmp/before /tmp/after
