//! Affinity masks of any size, by the bare system calls.
//!
//! libc's, nix's and rustix's mask types end at 1,024 CPUs; writing one back on a larger machine would drop the
//! others. The kernel takes any length (sched_setaffinity(2)), and refuses to fill a mask shorter than its own
//! with EINVAL.

use nix::errno::Errno;
use pjw_core::cpuset::{CpuSet, Pu};
use pjw_core::process::Tid;

/// 8,192 CPUs, the largest `NR_CPUS` there is; more words are tried if a kernel wants them.
const WORDS: usize = 128;
const MOST_WORDS: usize = (Pu::MAX.0 as usize + 1) / 64;

/// Where a thread may run now: what it asked for, cut to its cpuset and to the PUs that are scheduled on.
///
/// # Errors
/// `ESRCH` if the thread is gone.
pub fn get(tid: Tid) -> Result<CpuSet, Errno> {
    let mut words = [0u64; WORDS];
    match get_into(tid, &mut words) {
        Err(Errno::EINVAL) => {}
        other => return other,
    }
    let mut words = vec![0u64; WORDS * 2];
    loop {
        match get_into(tid, &mut words) {
            Err(Errno::EINVAL) if words.len() < MOST_WORDS => words.resize(words.len() * 2, 0),
            other => return other,
        }
    }
}

fn get_into(tid: Tid, words: &mut [u64]) -> Result<CpuSet, Errno> {
    let pid = libc::pid_t::try_from(tid.0).map_err(|_| Errno::ESRCH)?;
    let bytes = size_of_val(words);
    // SAFETY: the kernel writes at most `bytes` bytes into `words`, which is that long and outlives the call.
    let written = unsafe { libc::syscall(libc::SYS_sched_getaffinity, pid, bytes, words.as_mut_ptr()) };
    let written = usize::try_from(Errno::result(written)?).unwrap_or(0);
    Ok(CpuSet::from_words(&words[..written.div_ceil(8).min(words.len())]))
}

/// Asks for a mask.
///
/// # Errors
/// `ESRCH` if the thread is gone, `EINVAL` if the mask and the thread's cpuset don't meet or the kernel forbids
/// changing it, `EPERM` for another user's thread without `CAP_SYS_NICE`.
pub fn set(tid: Tid, cpus: &CpuSet) -> Result<(), Errno> {
    set_words(tid, cpus.words())
}

/// Asks for every PU there ever may be: since Linux 6.2 the kernel remembers what was asked for and cuts it to
/// the cpuset, so only this mask lets a thread follow its cpuset again.
///
/// # Errors
/// As [`set`].
pub fn set_all(tid: Tid) -> Result<(), Errno> {
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
    use std::process::{Child, Command};

    struct Sleeper(Child);

    impl Sleeper {
        fn start() -> Self {
            Self(Command::new("sleep").arg("1000").spawn().unwrap())
        }

        fn tid(&self) -> Tid {
            Tid(self.0.id())
        }
    }

    impl Drop for Sleeper {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    #[test]
    fn a_mask_that_was_set_is_read_back() {
        let sleeper = Sleeper::start();
        let all = get(sleeper.tid()).unwrap();
        let one = CpuSet::from(all.last().unwrap());
        set(sleeper.tid(), &one).unwrap();
        assert_eq!(get(sleeper.tid()).unwrap(), one);
        set_all(sleeper.tid()).unwrap();
        assert!(all.is_subset(&get(sleeper.tid()).unwrap()));
    }

    #[test]
    fn a_mask_may_name_pus_beyond_this_machine() {
        let sleeper = Sleeper::start();
        let all = get(sleeper.tid()).unwrap();
        set(sleeper.tid(), &all.union(&CpuSet::from(Pu(5000)))).unwrap();
        assert_eq!(get(sleeper.tid()).unwrap(), all);
    }

    #[test]
    fn a_mask_without_a_pu_of_this_machine_is_refused() {
        let sleeper = Sleeper::start();
        assert_eq!(set(sleeper.tid(), &CpuSet::from(Pu(8000))), Err(Errno::EINVAL));
        assert_eq!(set(sleeper.tid(), &CpuSet::new()), Err(Errno::EINVAL));
    }

    #[test]
    fn a_thread_that_is_gone_is_esrch() {
        let mut child = Command::new("true").spawn().unwrap();
        let tid = Tid(child.id());
        child.wait().unwrap();
        assert_eq!(get(tid), Err(Errno::ESRCH));
        assert_eq!(set(tid, &CpuSet::from(Pu(0))), Err(Errno::ESRCH));
    }
}
