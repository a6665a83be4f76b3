//! For which children a process waits in vfork(2).

use std::collections::BTreeSet;

use nix::errno::Errno;
use pjw_core::ids::{Pid, Tid};

use super::procfs::ProcDir;

/// The children for which the threads of a process may be waiting in vfork(2) or posix_spawn(3).
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum VforkWait {
    /// No thread waits.
    NotWaiting,
    /// Threads may be waiting, each for one of these children. A child is missing if it has ended in the meantime, or
    /// if its thread got the children of another thread, which exited after the child was made.
    ForChildren(BTreeSet<Pid>),
    /// A thread may be waiting, but it is unknown for which child.
    ForUnknownChild,
}

impl ProcDir {
    /// Returns for which children the threads of the process `pid` may be waiting in vfork(2) or posix_spawn(3). A
    /// thread that waits makes no other child, so it waits for the last child that it has made: the last one in
    /// `/proc/PID/task/TID/children` (proc_tid_children(5)). The kernel has this file if `CONFIG_PROC_CHILDREN` is set.
    /// Returns [`VforkWait::NotWaiting`] if the process has ended.
    pub(crate) fn vfork_wait(&mut self, pid: Pid) -> VforkWait {
        let Ok(mut tids) = self.tids(pid) else { return VforkWait::NotWaiting };
        tids.retain(|&tid| self.may_wait_in_vfork(pid, tid));
        if tids.is_empty() {
            return VforkWait::NotWaiting;
        }
        let mut children = BTreeSet::new();
        for tid in tids {
            match self.last_child(pid, tid) {
                Ok(child) => children.extend(child),
                Err(_) => return VforkWait::ForUnknownChild,
            }
        }
        VforkWait::ForChildren(children)
    }

    /// Returns whether the thread `tid` of the process `pid` may be waiting for a child in vfork(2) or posix_spawn(3).
    /// The kernel lets such a thread sleep uninterruptibly (state D) inside of vfork(2), clone(2) or clone3(2)
    /// (`wait_for_vfork_done` in `kernel/fork.c`). A thread whose system call this user may not read counts as waiting,
    /// if its state is D. False if the thread has ended.
    fn may_wait_in_vfork(&mut self, pid: Pid, tid: Tid) -> bool {
        if !self.thread_stat(pid, tid).is_ok_and(|stat| stat.state == 'D') {
            return false;
        }
        let is_read = self.read_single_open_file(format_args!("{pid}/task/{tid}/syscall")).is_ok();
        !is_read || begins_with_clone(self.text())
    }

    /// Returns the last one of the children of the thread `tid` of the process `pid`, in the order of the kernel's
    /// list. `None` if the thread has no child.
    ///
    /// # Errors
    /// `ENOENT` or `ESRCH` if the thread has ended. `ENOENT` also if the kernel does not list children. `EIO` if the
    /// text is malformed.
    fn last_child(&mut self, pid: Pid, tid: Tid) -> Result<Option<Pid>, Errno> {
        self.read(format_args!("{pid}/task/{tid}/children"))?;
        let text = std::str::from_utf8(self.text()).map_err(|_| Errno::EIO)?;
        let last = text.split_ascii_whitespace().next_back();
        last.map(|number| number.parse::<u32>().map(Pid).map_err(|_| Errno::EIO)).transpose()
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
    use std::fs;

    use super::*;

    #[test]
    fn a_system_call_that_makes_a_process_is_recognised() {
        let calls = [libc::SYS_clone, libc::SYS_clone3].map(|call| format!("{call} 0x1 0x2 0x3\n"));
        assert!(calls.iter().all(|text| begins_with_clone(text.as_bytes())));
        let others = [format!("{} 0x1\n", libc::SYS_read), "running\n".to_owned(), "-1 0x7\n".to_owned()];
        assert!(!others.iter().any(|text| begins_with_clone(text.as_bytes())));
        assert!(!begins_with_clone(b""));
    }

    /// Returns for which children the process 7 waits. Each of its threads has a tid, a state, a system call, and the
    /// text of the file `children`, if there is such a file.
    fn wait_of(threads: &[(u32, char, libc::c_long, Option<&str>)]) -> VforkWait {
        let dir = tempfile::tempdir().unwrap();
        for (tid, state, call, children) in threads {
            let thread = dir.path().join(format!("7/task/{tid}"));
            fs::create_dir_all(&thread).unwrap();
            let stat = format!(
                "{tid} (x) {state} 1 7 7 0 -1 0 1 2 3 4 15 5 0 0 20 0 1 0 4711 1000 200 1 1 1 9 0 0 0 0 0 0 0 0 0 17 5 0 0 0\n"
            );
            fs::write(thread.join("stat"), stat).unwrap();
            fs::write(thread.join("syscall"), format!("{call} 0x1\n")).unwrap();
            if let Some(text) = children {
                fs::write(thread.join("children"), text).unwrap();
            }
        }
        ProcDir::open(dir.path()).unwrap().vfork_wait(Pid(7))
    }

    #[test]
    fn each_waiting_thread_waits_for_its_last_child() {
        let (clone, read) = (libc::SYS_clone, libc::SYS_read);
        let sleeping = (7, 'S', clone, Some("8 9 "));
        assert_eq!(wait_of(&[]), VforkWait::NotWaiting, "the process has ended");
        assert_eq!(wait_of(&[sleeping, (10, 'D', read, Some("11 "))]), VforkWait::NotWaiting);
        let children = |pids: &[u32]| VforkWait::ForChildren(pids.iter().copied().map(Pid).collect());
        let waiting = (10, 'D', clone, Some("11 13 12 "));
        assert_eq!(wait_of(&[sleeping, waiting]), children(&[12]));
        assert_eq!(wait_of(&[sleeping, waiting, (14, 'D', clone, Some("15 "))]), children(&[12, 15]));
        assert_eq!(wait_of(&[waiting, (14, 'D', clone, Some(""))]), children(&[12]), "its child has ended");
        assert_eq!(wait_of(&[waiting, (14, 'D', clone, None)]), VforkWait::ForUnknownChild);
        assert_eq!(wait_of(&[(14, 'D', clone, Some("x "))]), VforkWait::ForUnknownChild);
    }
}
