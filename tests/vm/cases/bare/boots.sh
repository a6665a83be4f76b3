# The machine is what the other cases count on.
. /cases/functions

check "the guest has 16 CPUs" [ "$(nproc)" = 16 ]
check "the guest has two NUMA nodes" [ "$(cat /sys/devices/system/node/online)" = "0-1" ]
check "the second node is the second package" within 8-15 "$(cat /sys/devices/system/node/node1/cpulist)"
check "CPUs 0 and 1 are one core" [ "$(cat /sys/devices/system/cpu/cpu0/topology/thread_siblings_list)" = "0-1" ]
check "cgroups are version 2" [ -f /sys/fs/cgroup/cgroup.controllers ]
check "lists are understood" within 2-3,8 0-4,8-9
check "lists that don't fit are noticed" [ "$(within 2-5 0-4 && echo fits)" = "" ]
check "lists that meet are noticed" [ "$(disjoint 0-3,8 3 && echo apart)" = "" ]
