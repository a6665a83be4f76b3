//! The process that holds a lock of flock(2), for messages to the user.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::MetadataExt;

use nix::sys::stat::{major, minor};

/// The size of a read of /proc/locks in bytes: at least a page. In one read, the kernel returns as many locks as fit
/// into a page. For the next read, it counts the locks again: if a lock earlier in the list was released meanwhile, a
/// later lock is missing (seq_read_iter in fs/seq_file.c).
const READ_BYTES: usize = 64 << 10;

/// Returns the pid of the running process that holds a lock on `file` (flock(2)), as the kernel lists it in
/// /proc/locks (proc_locks(5)). `None` in each of these cases:
///
/// - No process holds a lock, or the process has ended or ends now.
/// - The holder is unknown: on file systems such as Btrfs, the list has other device numbers than stat(2) returns.
/// - The list is longer than a page, and the kernel leaves out the lock, because an earlier lock is released while the
///   list is read.
pub(crate) fn running_holder(file: &File) -> Option<u32> {
    let meta = file.metadata().ok()?;
    let (major, minor) = (major(meta.dev()), minor(meta.dev()));
    let inode = format!("{major:02x}:{minor:02x}:{}", meta.ino());
    let locks = BufReader::with_capacity(READ_BYTES, File::open("/proc/locks").ok()?);
    let lines = locks.lines().map_while(Result::ok);
    lines.filter_map(|line| holder_in_line(&line, &inode)).find(|&pid| is_running(pid))
}

/// The pid in a line such as `1: FLOCK  ADVISORY  WRITE 4267 fe:00:10010757 0 EOF`, if the line is about this inode.
/// The line of a process that waits for the lock has `->` after the number.
fn holder_in_line(line: &str, inode: &str) -> Option<u32> {
    let mut words = line.split_whitespace().skip(1);
    let is_flock = words.next() == Some("FLOCK");
    let pid = words.nth(2)?.parse().ok()?;
    (is_flock && words.next() == Some(inode)).then_some(pid)
}

/// Returns whether the process `pid` runs. A process that ends has no program file any more before its files are closed
/// (do_exit in kernel/exit.c).
pub(crate) fn is_running(pid: u32) -> bool {
    std::fs::read_link(format!("/proc/{pid}/exe")).is_ok()
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use nix::fcntl::{Flock, FlockArg};

    use super::*;

    #[test]
    fn the_holder_of_a_lock_is_known_while_it_holds_the_lock() {
        let dir = tempfile::tempdir().unwrap();
        let open = || File::create(dir.path().join("lock")).unwrap();
        assert_eq!(running_holder(&open()), None);
        let lock = Flock::lock(open(), FlockArg::LockExclusiveNonblock).unwrap();
        assert_eq!(running_holder(&open()), Some(std::process::id()));
        drop(lock);
        assert_eq!(running_holder(&open()), None);
    }

    #[test]
    fn the_holder_of_a_lock_is_known_also_while_another_lock_is_taken_and_released() {
        if std::fs::read("/proc/locks").unwrap().len() > 2000 {
            println!("skipped: this machine has so many locks that the kernel may not list them in one read");
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let open = |name: &str| File::create(dir.path().join(name)).unwrap();
        let lock = |file: File| Flock::lock(file, FlockArg::LockExclusiveNonblock).unwrap();
        let (_held, same_file, is_over) = (lock(open("lock")), open("lock"), AtomicBool::new(false));
        let unknown = std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut other = open("other");
                while !is_over.load(Ordering::Relaxed) {
                    other = lock(other).unlock().unwrap();
                }
            });
            let own = Some(std::process::id());
            let unknown = (0..1000).filter(|_| running_holder(&same_file) != own).count();
            is_over.store(true, Ordering::Relaxed);
            unknown
        });
        assert_eq!(unknown, 0, "of 1000 looks");
    }

    #[test]
    fn a_process_that_waits_and_a_lock_of_another_kind_are_no_holders() {
        let inode = "fe:00:17";
        assert_eq!(holder_in_line("1: FLOCK  ADVISORY  WRITE 42 fe:00:17 0 EOF", inode), Some(42));
        assert_eq!(holder_in_line("1: FLOCK  ADVISORY  WRITE 42 fe:00:18 0 EOF", inode), None);
        assert_eq!(holder_in_line("1: -> FLOCK  ADVISORY  WRITE 42 fe:00:17 0 EOF", inode), None);
        assert_eq!(holder_in_line("2: POSIX  ADVISORY  WRITE 42 fe:00:17 0 EOF", inode), None);
        assert_eq!(holder_in_line("", inode), None);
    }
}
