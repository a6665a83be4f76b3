//! The process to which a thread belongs.

use std::path::Path;

use pjw_core::ids::{Pid, Tid};

use super::short_file::read_short_file;

/// Returns the process to which the thread `tid` belongs, from the line `Tgid` of `/proc/TID/status`. The kernel does
/// not list threads in `/proc`, but provides this file for each thread. `None` if there is no such thread, or if the
/// file can't be read.
#[must_use]
pub fn process_of_thread(tid: Tid) -> Option<Pid> {
    let status = read_short_file(Path::new(&format!("/proc/{tid}/status"))).ok()?;
    // Only the `Name:` line can contain bytes that are not UTF-8.
    let status = String::from_utf8_lossy(&status);
    let line = status.lines().find_map(|line| line.strip_prefix("Tgid:"))?;
    line.trim().parse().ok().map(Pid)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::affinity::own_thread;

    #[test]
    fn each_thread_of_a_process_belongs_to_it() {
        let read = || (own_thread(), process_of_thread(own_thread()));
        let (tid, process) = std::thread::spawn(read).join().unwrap();
        assert_eq!(process, Some(Pid(std::process::id())));
        assert_ne!(tid.0, std::process::id());
        assert_eq!(process_of_thread(Tid(0)), None);
    }
}
