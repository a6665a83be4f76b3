//! Affinity masks of any size, by direct system calls.
//!
//! The mask types of libc, nix and rustix end at 1,024 CPUs. Such a type would drop the other CPUs of a
//! larger machine when a mask is written back. sched_setaffinity(2) takes any length. sched_getaffinity(2)
//! returns `EINVAL` for a buffer shorter than the kernel's own mask.

use std::io;

use nix::errno::Errno;
use nix::unistd::gettid;
use pjw_core::cpuset::{CpuSet, Pu};
use pjw_core::ids::Tid;

/// The number of 64-bit words of a usual mask: 8,192 CPUs, the largest `NR_CPUS`. A kernel with longer masks gets a
/// larger buffer.
const WORDS: usize = 128;
/// The maximum number of words of a mask.
const MAX_WORDS: usize = (Pu::MAX.0 as usize + 1) / 64;

/// Returns the effective affinity mask of the thread `tid`, read with sched_getaffinity(2). The mask contains
/// the PUs (logical CPUs) that the thread has requested, that are online, and that are in the thread's cpuset.
/// If there is no such PU, the mask is all online PUs of the cpuset.
///
/// # Errors
/// `ESRCH` if the thread has ended.
pub fn get_mask(tid: Tid) -> Result<CpuSet, Errno> {
    let mut words = [0u64; WORDS];
    match read_mask(tid, &mut words) {
        Err(Errno::EINVAL) => {}
        other => return other,
    }
    let mut words = vec![0u64; WORDS * 2];
    loop {
        match read_mask(tid, &mut words) {
            Err(Errno::EINVAL) if words.len() < MAX_WORDS => words.resize(words.len() * 2, 0),
            other => return other,
        }
    }
}

fn read_mask(tid: Tid, words: &mut [u64]) -> Result<CpuSet, Errno> {
    let pid = libc::pid_t::try_from(tid.0).map_err(|_| Errno::ESRCH)?;
    let bytes = size_of_val(words);
    // SAFETY: the kernel writes at most `bytes` bytes into `words`, which is that long and outlives the call.
    let written = unsafe { libc::syscall(libc::SYS_sched_getaffinity, pid, bytes, words.as_mut_ptr()) };
    let written = usize::try_from(Errno::result(written)?).unwrap_or(0);
    Ok(CpuSet::from_words(&words[..written.div_ceil(8).min(words.len())]))
}

/// Returns the id of the calling thread.
#[must_use]
pub fn own_thread() -> Tid {
    Tid(gettid().as_raw().cast_unsigned())
}

/// Returns the ids of all threads of this process, from /proc/self/task.
///
/// # Errors
/// If /proc can't be read.
pub fn own_threads() -> io::Result<Vec<Tid>> {
    let mut threads = Vec::new();
    for task in std::fs::read_dir("/proc/self/task")? {
        let name = task?.file_name();
        let tid = name.to_str().and_then(|name| name.parse().ok());
        threads.push(Tid(tid.ok_or_else(|| io::Error::other(format!("{} is no thread", name.display())))?));
    }
    Ok(threads)
}

/// Sets the affinity mask of the thread `tid` to the PUs (logical CPUs) `cpus`, with sched_setaffinity(2).
///
/// # Errors
/// `ESRCH` if the thread has ended. `EINVAL` if `cpus` and the thread's cpuset have no PU in common. `EINVAL`
/// also if the thread does not allow a change of its mask, such as some kernel threads. `EPERM` for a thread of
/// another user without `CAP_SYS_NICE`.
pub fn set_mask(tid: Tid, cpus: &CpuSet) -> Result<(), Errno> {
    set_words(tid, cpus.words())
}

/// Sets the affinity mask of the thread `tid` to every possible PU (logical CPU), so that the thread can use
/// all PUs of its cpuset.
///
/// Afterwards, the effective mask of the thread is the whole cpuset, also after each later change of the
/// cpuset. The reason depends on the kernel:
///
/// - Linux 6.2 and later: The kernel stores the requested mask. When the cpuset changes, the kernel intersects
///   this mask with the new cpuset.
/// - Before Linux 6.2: The kernel does not store the requested mask. When the cpuset changes, each thread gets
///   the whole cpuset as its mask.
///
/// # Errors
/// The errors of [`set_mask`].
pub fn set_full_mask(tid: Tid) -> Result<(), Errno> {
    set_words(tid, &[u64::MAX; WORDS])
}

fn set_words(tid: Tid, words: &[u64]) -> Result<(), Errno> {
    let pid = libc::pid_t::try_from(tid.0).map_err(|_| Errno::ESRCH)?;
    let bytes = size_of_val(words);
    // SAFETY: the kernel reads at most `bytes` bytes from `words`, which is that long and outlives the call.
    let done = unsafe { libc::syscall(libc::SYS_sched_setaffinity, pid, bytes, words.as_ptr()) };
    Errno::result(done).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::alone_with_cpusets;
    use std::process::{Child, Command};

    struct IdleProcess(Child);

    impl IdleProcess {
        fn start() -> Self {
            Self(Command::new("sleep").arg("1000").spawn().unwrap())
        }

        fn tid(&self) -> Tid {
            Tid(self.0.id())
        }
    }

    impl Drop for IdleProcess {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    #[test]
    fn a_mask_that_was_set_is_read_back() {
        let _alone = alone_with_cpusets();
        let idle_process = IdleProcess::start();
        let all = get_mask(idle_process.tid()).unwrap();
        let one = CpuSet::from(all.last().unwrap());
        set_mask(idle_process.tid(), &one).unwrap();
        assert_eq!(get_mask(idle_process.tid()).unwrap(), one);
        set_full_mask(idle_process.tid()).unwrap();
        assert!(all.is_subset(&get_mask(idle_process.tid()).unwrap()));
    }

    #[test]
    fn a_mask_may_name_pus_beyond_this_machine() {
        let idle_process = IdleProcess::start();
        let all = get_mask(idle_process.tid()).unwrap();
        set_mask(idle_process.tid(), &all.union(&CpuSet::from(Pu(5000)))).unwrap();
        assert_eq!(get_mask(idle_process.tid()).unwrap(), all);
    }

    #[test]
    fn a_mask_without_a_pu_of_this_machine_is_refused() {
        let idle_process = IdleProcess::start();
        assert_eq!(set_mask(idle_process.tid(), &CpuSet::from(Pu(8000))), Err(Errno::EINVAL));
        assert_eq!(set_mask(idle_process.tid(), &CpuSet::new()), Err(Errno::EINVAL));
    }

    #[test]
    fn an_ended_thread_gives_esrch() {
        let mut child = Command::new("true").spawn().unwrap();
        let tid = Tid(child.id());
        child.wait().unwrap();
        assert_eq!(get_mask(tid), Err(Errno::ESRCH));
        assert_eq!(set_mask(tid, &CpuSet::from(Pu(0))), Err(Errno::ESRCH));
    }
}
