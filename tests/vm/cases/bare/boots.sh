# The machine has the properties that the other cases rely on.
. /cases/functions

check "the guest has 16 CPUs" [ "$(nproc)" = 16 ]
check "the guest has two NUMA nodes" [ "$(cat /sys/devices/system/node/online)" = "0-1" ]
check "NUMA node 1 is CPUs 8-15" within 8-15 "$(cat /sys/devices/system/node/node1/cpulist)"
check "CPUs 0 and 1 are the threads of one core" [ "$(cat /sys/devices/system/cpu/cpu0/topology/thread_siblings_list)" = "0-1" ]
check "cgroup v2 is mounted" [ -f /sys/fs/cgroup/cgroup.controllers ]
check "within accepts a list inside another one" within 2-3,8 0-4,8-9
check "within refuses a list that is not inside the other one" [ "$(within 2-5 0-4 && echo fits)" = "" ]
check "disjoint refuses lists with a common CPU" [ "$(disjoint 0-3,8 3 && echo apart)" = "" ]
