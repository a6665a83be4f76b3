//! Whether a thread waits for the lock of its address space (`mmap_lock`): `/proc/PID/task/TID/stat` and `wchan`,
//! proc(5).
//!
//! `wchan` names the kernel function in which a thread sleeps, without those of the scheduler and of locks (`__sched`,
//! fs/proc/base.c and kernel/sched/core.c). So a thread that sleeps in `mmap_lock` has the name of the function that
//! takes this lock. `wchan` needs the rights of ptrace(2) for reading. Without them, or without `CONFIG_KALLSYMS`, it
//! is `0`.

use nix::errno::Errno;
use pjw_core::ids::{Pid, Tid};

use super::procfs::{ProcDir, fields_from_state};

/// The functions that take the lock of the address space, in mm/ and arch/*/mm/fault.c, in Linux 4.18 to 6.18.
const LOCKERS: [&str; 13] = [
    "vm_mmap_pgoff",
    "vm_munmap",
    "__vm_munmap",
    "vm_brk_flags",
    "do_mprotect_pkey",
    "do_madvise",
    "madvise_lock",
    "lock_mm_and_find_vma",
    "do_user_addr_fault",
    "__do_page_fault",
    "do_page_fault",
    "mmap_read_lock",
    "mmap_write_lock_killable",
];
/// The system calls that take the lock in the function of the call, which the kernel names `__x64_sys_brk` and the
/// like.
const LOCKING_CALLS: [&str; 4] = ["sys_brk", "sys_mremap", "sys_munmap", "sys_madvise"];

/// The activity of a thread at one moment: whether the thread is active, whether it waits for the lock of its address
/// space (`mmap_lock` in the kernel), and its CPU time since its start. A thread is active if it runs, waits for a PU
/// (logical CPU) or sleeps uninterruptibly.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ThreadActivity {
    /// Whether the thread runs, waits for a PU, or sleeps uninterruptibly (the states `R` and `D`).
    pub is_active: bool,
    /// Whether the thread sleeps because it waits for the lock of its address space.
    pub waits_for_map_lock: bool,
    /// The CPU time of the thread in user and system mode since its start, in clock ticks of 10 ms.
    pub cpu_ticks: u64,
    /// The part of `cpu_ticks` in system mode.
    pub system_ticks: u64,
}

impl ProcDir {
    /// Reads whether the thread `tid` of the process `pid` is active, whether it waits for the lock of its address
    /// space (`mmap_lock` in the kernel), and its CPU time. A thread is active if it runs, waits for a PU (logical CPU)
    /// or sleeps uninterruptibly. The state and the CPU time are in `/proc/PID/task/TID/stat`. The file `wchan` in the
    /// same directory has the kernel function in which the thread sleeps. [`ThreadActivity::waits_for_map_lock`] is
    /// false if this user has no permission to read `wchan` (ptrace(2)).
    ///
    /// # Errors
    /// `ENOENT` or `ESRCH` if the thread has ended. `EIO` if `stat` is malformed.
    pub fn thread_activity(&mut self, pid: Pid, tid: Tid) -> Result<ThreadActivity, Errno> {
        self.read_single_open_file(format_args!("{pid}/task/{tid}/stat"))?;
        let (state, user_ticks, system_ticks) = parse_state_and_times(self.text()).ok_or(Errno::EIO)?;
        // The file contains `0` if this user may not read it, or if the thread runs again.
        let waits_for_map_lock = state == 'D'
            && self.read_single_open_file(format_args!("{pid}/task/{tid}/wchan")).is_ok()
            && is_map_locker(self.text());
        Ok(ThreadActivity {
            is_active: matches!(state, 'R' | 'D'),
            waits_for_map_lock,
            cpu_ticks: user_ticks.saturating_add(system_ticks),
            system_ticks,
        })
    }
}

/// Parses `text`, the content of `/proc/PID/task/TID/stat`: the state, and the CPU time in user and in system mode.
fn parse_state_and_times(text: &[u8]) -> Option<(char, u64, u64)> {
    let mut fields = fields_from_state(text)?;
    let state = fields.next()?.chars().next()?;
    let user = fields.nth(10)?.parse().ok()?;
    let system = fields.next()?.parse().ok()?;
    Some((state, user, system))
}

/// Whether `wchan` names a function that takes the lock of the address space. The compiler may have added a suffix such
/// as `.isra.0`.
fn is_map_locker(wchan: &[u8]) -> bool {
    let name = std::str::from_utf8(wchan).unwrap_or_default().trim();
    let name = name.split('.').next().unwrap_or_default();
    LOCKERS.contains(&name) || LOCKING_CALLS.iter().any(|call| name.ends_with(call))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::sys::affinity::own_thread;

    #[test]
    fn the_state_and_the_times_are_read_after_any_name() {
        let stat = "7 (a) R) D 1 7 7 0 -1 4194304 9 0 0 0 12 34 0 0 20 0 1 0 5 0 0\n";
        assert_eq!(parse_state_and_times(stat.as_bytes()), Some(('D', 12, 34)));
        for broken in
            ["", "7 (a", "7 (a) D", "7 (a) D 1 7 7 0 -1 0 9 0 0 0 x 34 0", "7 (a) D 1 7 7 0 -1 0 9 0 0 0 12"]
        {
            assert_eq!(parse_state_and_times(broken.as_bytes()), None, "{broken}");
        }
        assert_eq!(parse_state_and_times(&[b')', 0xff]), None);
    }

    #[test]
    fn functions_that_take_the_lock_are_known_and_others_are_not() {
        for name in
            ["vm_mmap_pgoff", "__vm_munmap", "lock_mm_and_find_vma", "__x64_sys_brk", "do_madvise.part.0"]
        {
            assert!(is_map_locker(name.as_bytes()), "{name}");
        }
        for name in
            ["0", "", "folio_wait_bit_common", "ext4_file_write_iter", "futex_wait_queue", "unlink_anon_vmas"]
        {
            assert!(!is_map_locker(name.as_bytes()), "{name}");
        }
        assert!(!is_map_locker(&[0xff]));
    }

    #[test]
    fn this_thread_runs_and_an_ended_one_is_gone() {
        let mut proc = ProcDir::open(Path::new("/proc")).unwrap();
        let (pid, tid) = (Pid(std::process::id()), own_thread());
        let own = proc.thread_activity(pid, tid).unwrap();
        assert!(own.is_active && !own.waits_for_map_lock && own.system_ticks <= own.cpu_ticks, "{own:?}");
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let ended = child.id();
        child.wait().unwrap();
        assert!(proc.thread_activity(Pid(ended), Tid(ended)).is_err());
    }
}
