//! The CPU times of processes and of their ended children.

use std::collections::{BTreeMap, BTreeSet};

use pjw_core::ids::{Pid, Tid};
use pjw_core::snapshot::{Observed, ProcessCpuTimes};

use super::process_cache::ProcessCache;
use crate::sys::clock::process_cpu_time_ns;
use crate::sys::errno::is_gone;

impl ProcessCache {
    /// Reads the CPU times of the processes `pids` and of their ended children. Also works for zombies. If a process
    /// does not exist, its value is [`Observed::Gone`]. A process that can't be read for another reason is left out,
    /// for example if no file descriptor is free.
    ///
    /// First reads the times of the ended children of all processes. So if a child ends during this call, its time is
    /// not counted twice. It counts in the next call, as a time of its parent.
    pub(super) fn read_cpu_times(
        &mut self,
        pids: &BTreeSet<Pid>,
    ) -> BTreeMap<Pid, Observed<ProcessCpuTimes>> {
        let mut read = BTreeMap::new();
        for &pid in pids {
            // The file of the first thread: the kernel would sum over all threads for the file of the process.
            match self.proc.start_time_and_children_cpu_ticks(pid, Tid(pid.0)) {
                Ok((start, ticks)) => {
                    let children_ns = ticks.saturating_mul(self.ns_per_tick);
                    read.insert(pid, Observed::Present(ProcessCpuTimes { start, own_ns: 0, children_ns }));
                }
                Err(errno) if is_gone(errno) => {
                    read.insert(pid, Observed::Gone);
                }
                Err(_) => {}
            }
        }
        for (&pid, observed) in &mut read {
            let Observed::Present(times) = observed else { continue };
            // For pid 0, the kernel returns the CPU time of the calling process.
            match process_cpu_time_ns(pid).ok().filter(|_| pid.0 != 0) {
                Some(own_ns) => times.own_ns = own_ns,
                None => *observed = Observed::Gone,
            }
        }
        read
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;
    use crate::tests::until_true;

    fn times_of(pid: u32) -> Option<ProcessCpuTimes> {
        let mut cache = ProcessCache::new(BTreeSet::new()).unwrap();
        cache.read_cpu_times(&BTreeSet::from([Pid(pid)])).remove(&Pid(pid))?.present().copied()
    }

    /// A shell that runs for a while in a child, then for a while itself, and ends.
    fn shell(own: u32, child: u32) -> std::process::Child {
        let count = |times: u32| format!("i=0; while [ $i -lt {times} ]; do i=$((i+1)); done");
        let script = format!("( {} ); {}", count(child), count(own));
        Command::new("sh").args(["-c", &script]).spawn().unwrap()
    }

    #[test]
    fn a_zombie_still_tells_its_time_and_that_of_its_children() {
        // A stop of the machine may count as the run time of the process that runs, but does not come each time.
        until_true("the children of a shell used more time than the shell", || {
            let mut ended = shell(30_000, 300_000);
            let stat = format!("/proc/{}/stat", ended.id());
            until_true("it is a zombie", || std::fs::read_to_string(&stat).unwrap().contains(") Z "));
            let times = times_of(ended.id()).unwrap();
            ended.wait().unwrap();
            assert_eq!(times_of(ended.id()), None);
            assert!(times.own_ns > 0 && times.children_ns > 0, "{times:?}");
            times.children_ns > times.own_ns
        });
    }

    #[test]
    fn a_parent_gets_the_time_of_a_child_when_it_waits_for_the_child() {
        let before = times_of(std::process::id()).unwrap().children_ns;
        let mut child = shell(300_000, 0);
        let stat = format!("/proc/{}/stat", child.id());
        until_true("it is a zombie", || std::fs::read_to_string(&stat).unwrap().contains(") Z "));
        let of_child = times_of(child.id()).unwrap().own_ns;
        child.wait().unwrap();
        let growth = times_of(std::process::id()).unwrap().children_ns - before;
        // Other tests of this process may wait for children too.
        assert!(growth + 20_000_000 >= of_child, "{growth} {of_child}");
    }

    #[test]
    fn a_process_that_does_not_exist_has_no_times() {
        assert_eq!([0, u32::MAX, 4_194_305].map(times_of), [None; 3]);
    }
}
