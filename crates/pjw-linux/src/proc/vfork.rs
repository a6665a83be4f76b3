//! Whether a process waits in vfork(2).

use pjw_core::ids::Pid;

use super::procfs::ProcDir;

impl ProcDir {
    /// Returns whether a thread of the process `pid` may be waiting for a child in vfork(2) or posix_spawn(3). The
    /// kernel lets such a thread sleep uninterruptibly (state D) inside of vfork(2), clone(2) or clone3(2)
    /// (`wait_for_vfork_done` in `kernel/fork.c`). A thread whose system call this user may not read counts as waiting,
    /// if its state is D. False if the process has ended.
    pub(crate) fn may_wait_in_vfork(&mut self, pid: Pid) -> bool {
        let Ok(tids) = self.tids(pid) else { return false };
        tids.into_iter().any(|tid| {
            if !self.thread_stat(pid, tid).is_ok_and(|stat| stat.state == 'D') {
                return false;
            }
            let is_read = self.read_single_open_file(format_args!("{pid}/task/{tid}/syscall")).is_ok();
            !is_read || begins_with_clone(self.text())
        })
    }
}

/// Whether the text of `/proc/PID/task/TID/syscall` begins with the number of a system call that makes a process. The
/// text is `running` for a thread that does not sleep, and `-1` for one that sleeps outside of a system call.
fn begins_with_clone(text: &[u8]) -> bool {
    let number = std::str::from_utf8(text).ok().and_then(|text| text.split_ascii_whitespace().next());
    let Some(number) = number.and_then(|number| number.parse::<libc::c_long>().ok()) else { return false };
    #[cfg(target_arch = "x86_64")]
    let is_vfork = number == libc::SYS_vfork;
    // Other architectures make a child of vfork(3) with clone(2).
    #[cfg(not(target_arch = "x86_64"))]
    let is_vfork = false;
    is_vfork || number == libc::SYS_clone || number == libc::SYS_clone3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_system_call_that_makes_a_process_is_recognised() {
        let calls = [libc::SYS_clone, libc::SYS_clone3].map(|call| format!("{call} 0x1 0x2 0x3\n"));
        assert!(calls.iter().all(|text| begins_with_clone(text.as_bytes())));
        let others = [format!("{} 0x1\n", libc::SYS_read), "running\n".to_owned(), "-1 0x7\n".to_owned()];
        assert!(!others.iter().any(|text| begins_with_clone(text.as_bytes())));
        assert!(!begins_with_clone(b""));
    }
}
