//! The file descriptors of tasks and of their host: a table of their own, numbers that do not collide, and which
//! descriptors are closed.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use nix::errno::Errno;

use crate::bare;

/// If the number of open descriptors is known, those with smaller numbers than this are checked one by one. Reading the
/// directory `/proc/thread-self/fd` takes several times longer. One call of poll(2) for all numbers would be faster,
/// but wrong: it takes events from open files that other processes share, and reports a descriptor with `O_PATH` as not
/// open.
const CHECKED_NUMBERS: RawFd = 512;
/// The descriptors up to this number are checked one by one if `/proc/thread-self/fd` can't be read. Either there is no
/// /proc, or no descriptor is free to open the directory.
const UNLISTED_NUMBERS: RawFd = 1024;

/// Gives the calling thread its own table of file descriptors, with copies of all descriptors (unshare(2),
/// `CLONE_FILES`).
pub(crate) fn unshare_descriptor_table() -> Result<(), Errno> {
    // SAFETY: the thread uses no descriptor that another thread opens later.
    Errno::result(unsafe { libc::unshare(libc::CLONE_FILES) }).map(drop)
}

/// Closes all file descriptors of the calling thread from `first` to `last`. No other thread may use the same table of
/// descriptors. Kernels before Linux 5.9 have no close_range(2): the descriptors are then closed one by one. Returns an
/// error number. A task calls this before its program begins: nothing here allocates or writes `errno`.
pub(crate) fn close_descriptor_range(first: RawFd, last: RawFd) -> Result<(), i32> {
    let arguments = [first.into(), last.into(), 0, 0, 0];
    // SAFETY: the table of descriptors is that of the calling thread alone.
    let closed = unsafe { bare::raw_syscall(libc::SYS_close_range, arguments) };
    if closed != Err(libc::ENOSYS) {
        return closed.map(drop);
    }
    close_descriptors_in_proc(first, last).or_else(|_| close_below_limit(first, last))
}

/// Closes the file descriptors from `first` to `last` that `/proc/thread-self/fd` lists. Unlike [`close_below_limit`],
/// also finds descriptors above `RLIMIT_NOFILE`, which exist if the limit was lowered after they were opened. Returns
/// an error number if the list can't be read.
fn close_descriptors_in_proc(first: RawFd, last: RawFd) -> Result<(), i32> {
    for_each_descriptor_in_proc(|descriptor| {
        if (first..=last).contains(&descriptor) {
            close(descriptor.into());
        }
    })
}

/// Calls `act` for each open file descriptor of the calling thread, as `/proc/thread-self/fd` lists them. `act` may
/// close the descriptor. Returns an error number if the list can't be read.
fn for_each_descriptor_in_proc(mut act: impl FnMut(RawFd)) -> Result<(), i32> {
    let flags = libc::O_RDONLY | libc::O_DIRECTORY | libc::O_CLOEXEC;
    let path = bare::address(c"/proc/thread-self/fd".as_ptr());
    // SAFETY: the path ends with a NUL byte.
    let directory =
        unsafe { bare::raw_syscall(libc::SYS_openat, [libc::AT_FDCWD.into(), path, flags.into(), 0, 0])? };
    let mut buffer = [0_u8; 1024];
    let listed = loop {
        let arguments = [directory, bare::address(buffer.as_mut_ptr()), buffer.len() as i64, 0, 0];
        // SAFETY: the kernel writes at most the bytes of the buffer.
        let entries = match unsafe { bare::raw_syscall(libc::SYS_getdents64, arguments) } {
            Ok(0) => break Ok(()),
            Ok(bytes) => buffer.get(..usize::try_from(bytes).unwrap_or(0)).unwrap_or_default(),
            Err(errno) => break Err(errno),
        };
        // Closing while reading skips none: the kernel continues the list with the next number.
        numbers_in(entries).filter(|descriptor| i64::from(*descriptor) != directory).for_each(&mut act);
    };
    close(directory);
    listed
}

/// Returns those names in directory entries that are numbers. `entries` are the bytes that getdents64(2) has written.
fn numbers_in(mut entries: &[u8]) -> impl Iterator<Item = RawFd> {
    /// The bytes of an entry that contain its length (`d_reclen`).
    const LENGTH: std::ops::Range<usize> = 16..18;
    /// The offset of the name in an entry (`d_name`).
    const NAME: usize = 19;
    let names = std::iter::from_fn(move || {
        let length = u16::from_ne_bytes(entries.get(LENGTH)?.try_into().ok()?);
        let (entry, later_entries) = entries.split_at_checked(length.into())?;
        entries = later_entries;
        entry.get(NAME..)?.split(|byte| *byte == 0).next()
    });
    names.filter_map(|name| std::str::from_utf8(name).ok()?.parse().ok())
}

/// Closes the file descriptors from `first` to `last` that are below the soft limit `RLIMIT_NOFILE` and below 2²⁰. Used
/// if `/proc/thread-self/fd` can't be read. Returns an error number if the limit can't be read.
fn close_below_limit(first: RawFd, last: RawFd) -> Result<(), i32> {
    let mut limit = libc::rlimit64 { rlim_cur: 0, rlim_max: 0 };
    let arguments = [0, libc::RLIMIT_NOFILE.into(), 0, bare::address(&raw mut limit), 0];
    // SAFETY: the kernel writes one `rlimit64`.
    unsafe { bare::raw_syscall(libc::SYS_prlimit64, arguments)? };
    let end = i64::try_from(limit.rlim_cur).unwrap_or(i64::MAX).min(i64::from(last) + 1).min(1 << 20);
    (i64::from(first)..end).for_each(close);
    Ok(())
}

fn close(descriptor: i64) {
    // SAFETY: no other thread uses the table of descriptors, and the caller no longer uses the closed descriptor.
    let _ = unsafe { bare::raw_syscall(libc::SYS_close, [descriptor, 0, 0, 0, 0]) };
}

/// Closes the file descriptors that execve(2) would close, but not those in `kept`. Returns a number that is larger
/// than all remaining descriptors except those in `kept`. The host (the process that starts tasks) uses numbers from
/// the returned number on, and tasks use smaller numbers. No other thread may use the table of descriptors. The host
/// calls this function, so it allocates nothing.
///
/// Without /proc, the open descriptors can't be listed. All descriptors above [`UNLISTED_NUMBERS`] and above those in
/// `kept` are then closed.
///
/// # Errors
/// If the open descriptors can neither be listed nor closed.
pub(super) fn close_cloexec_descriptors(kept: [RawFd; 2]) -> Result<RawFd, Errno> {
    let mut first_own = 3;
    let mut close_or_keep = |descriptor: RawFd| {
        // SAFETY: only reads the flags of the descriptor.
        let flags = unsafe { libc::fcntl(descriptor, libc::F_GETFD) };
        if flags >= 0 && descriptor >= 3 && !kept.contains(&descriptor) {
            if flags & libc::FD_CLOEXEC == 0 {
                first_own = first_own.max(descriptor + 1);
            } else {
                close(descriptor.into());
            }
        }
        flags >= 0
    };
    let found_all = open_descriptor_count().is_some_and(|count| {
        (0..CHECKED_NUMBERS).filter(|descriptor| close_or_keep(*descriptor)).nth(count - 1).is_some()
    });
    let highest = kept.into_iter().fold(UNLISTED_NUMBERS, RawFd::max);
    let has_listed = |close_or_keep: &mut dyn FnMut(RawFd) -> bool| {
        for_each_descriptor_in_proc(|descriptor| {
            close_or_keep(descriptor);
        })
        .is_ok()
    };
    if !found_all && !has_listed(&mut close_or_keep) {
        (0..=highest).for_each(|descriptor| {
            close_or_keep(descriptor);
        });
        // If no descriptor was free to read the list, one may be free now. Without a list, all larger ones are closed.
        if !has_listed(&mut close_or_keep) {
            close_descriptor_range(highest.saturating_add(1), RawFd::MAX).map_err(Errno::from_raw)?;
        }
    }
    Ok(first_own)
}

/// Returns the number of open file descriptors of the calling thread. `None` if it is unknown: before Linux 6.2, the
/// size of the directory `/proc/thread-self/fd` is 0.
fn open_descriptor_count() -> Option<usize> {
    let directory = rustix::fs::stat(c"/proc/thread-self/fd").ok()?;
    usize::try_from(directory.st_size).ok().filter(|count| *count > 0)
}

/// Moves a file descriptor to a number that is at least `first_own`. If the number of the descriptor is already large
/// enough, returns the descriptor unchanged.
pub(super) fn move_above(descriptor: OwnedFd, first_own: RawFd) -> Result<OwnedFd, Errno> {
    if descriptor.as_raw_fd() >= first_own { Ok(descriptor) } else { copy_above(&descriptor, first_own) }
}

/// Copies a file descriptor to a free number that is at least `first_own`. The copy has the flag close-on-exec.
pub(super) fn copy_above(descriptor: &impl AsRawFd, first_own: RawFd) -> Result<OwnedFd, Errno> {
    // SAFETY: only makes a copy.
    let copy = unsafe { libc::fcntl(descriptor.as_raw_fd(), libc::F_DUPFD_CLOEXEC, first_own) };
    // SAFETY: the copy is new.
    Errno::result(copy).map(|copy| unsafe { OwnedFd::from_raw_fd(copy) })
}

#[cfg(test)]
mod tests {
    use std::os::fd::IntoRawFd;

    use nix::sys::wait::{WaitStatus, waitpid};
    use nix::unistd::Pid;

    use super::*;
    use crate::checks::room::raise_descriptor_limit;
    use crate::syscall_filter::refuse_call;

    fn is_open(descriptor: RawFd) -> bool {
        // SAFETY: only reads the flags of the descriptor.
        unsafe { libc::fcntl(descriptor, libc::F_GETFD) >= 0 }
    }

    /// Opens a descriptor that execve(2) keeps, and one that it closes. Their numbers are at least `kept_from` and
    /// `closed_from`. Returns whether [`close_cloexec_descriptors`] closes the second one and keeps the first one.
    fn closes_as_execve(kept_from: RawFd, closed_from: RawFd) -> bool {
        let thread = std::thread::spawn(move || {
            unshare_descriptor_table().unwrap();
            // SAFETY: opens and copies descriptors of the table of this thread.
            let [inherited, closed] = unsafe {
                let path = libc::open(c"/".as_ptr(), libc::O_PATH | libc::O_CLOEXEC);
                [(libc::F_DUPFD, kept_from), (libc::F_DUPFD_CLOEXEC, closed_from)]
                    .map(|(command, least)| libc::fcntl(path, command, least))
            };
            assert!(inherited >= kept_from && closed >= closed_from);
            let first_own = close_cloexec_descriptors([-1, -1]).unwrap();
            first_own > inherited && is_open(inherited) && !is_open(closed)
        });
        thread.join().unwrap()
    }

    #[test]
    fn descriptors_with_small_and_large_numbers_are_closed_as_by_execve() {
        raise_descriptor_limit(1100).unwrap();
        assert!(closes_as_execve(410, 400));
        assert!(closes_as_execve(400, 410));
        assert!(closes_as_execve(910, 900));
        assert!(closes_as_execve(900, 910));
        assert!(closes_as_execve(900, 1100));
    }

    #[test]
    fn descriptors_are_closed_as_by_execve_also_without_proc() {
        raise_descriptor_limit(1100).unwrap();
        let thread = std::thread::spawn(|| {
            for call in [libc::SYS_newfstatat, libc::SYS_statx, libc::SYS_getdents64] {
                refuse_call(call, Errno::ENOENT);
            }
            [910, 1024, 1100].into_iter().all(|closed_from| closes_as_execve(900, closed_from))
        });
        assert!(thread.join().unwrap());
    }

    #[test]
    fn descriptors_between_two_numbers_are_closed() {
        let thread = std::thread::spawn(|| {
            unshare_descriptor_table().unwrap();
            let directory = std::fs::File::open("/").unwrap();
            for close in
                [close_descriptor_range as fn(_, _) -> _, close_descriptors_in_proc, close_below_limit]
            {
                let [low, mid, high] = [1000, 1010, 1020].map(|least| copy_above(&directory, least).unwrap());
                close(1005, 1015).unwrap();
                assert!(is_open(low.as_raw_fd()) && is_open(high.as_raw_fd()));
                assert!(!is_open(mid.into_raw_fd()));
            }
        });
        thread.join().unwrap();
    }

    /// Opens the descriptors 700 to 799, lowers the limit below them, and closes those up to 749. Returns whether
    /// exactly these are closed.
    fn closes_above_the_limit() -> bool {
        let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: the process has these descriptors and limits for itself alone.
        unsafe {
            let null = libc::open(c"/dev/null".as_ptr(), libc::O_RDONLY);
            (700..800).for_each(|descriptor| assert_eq!(libc::dup2(null, descriptor), descriptor));
            assert_eq!(libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit), 0);
            limit.rlim_cur = 600;
            assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit), 0);
        }
        close_descriptor_range(650, 749) == Ok(())
            && (700..800).all(|descriptor| is_open(descriptor) == (descriptor >= 750))
    }

    /// Runs `check` in a new process, so that the other tests keep their limit. Returns the result of `check`.
    fn check_in_new_process(check: fn() -> bool) -> bool {
        // SAFETY: the new process makes system calls, and ends.
        match unsafe { libc::fork() } {
            // SAFETY: ends the process.
            0 => unsafe { libc::_exit(i32::from(!check())) },
            pid => matches!(waitpid(Pid::from_raw(pid), None), Ok(WaitStatus::Exited(_, 0))),
        }
    }

    #[test]
    fn descriptors_above_a_lowered_limit_are_closed_also_before_linux_5_9() {
        let thread = std::thread::spawn(|| {
            refuse_call(libc::SYS_close_range, Errno::ENOSYS);
            check_in_new_process(closes_above_the_limit)
        });
        assert!(thread.join().unwrap());
    }

    /// Opens a descriptor that execve(2) keeps, with a number above [`UNLISTED_NUMBERS`]. Then opens the descriptors 3
    /// to 63, which execve(2) closes, and lowers the limit of descriptors to 64. Returns whether
    /// [`close_cloexec_descriptors`] keeps the first descriptor and closes the last one.
    fn keeps_a_large_number_without_a_free_one() -> bool {
        let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: the process has these descriptors and limits for itself alone.
        let inherited = unsafe {
            assert_eq!(libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit), 0);
            limit.rlim_cur = limit.rlim_max;
            assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit), 0);
            let null = libc::open(c"/dev/null".as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC);
            let inherited = libc::fcntl(null, libc::F_DUPFD, UNLISTED_NUMBERS + 100);
            for descriptor in 3..64 {
                libc::dup3(null, descriptor, libc::O_CLOEXEC);
            }
            limit.rlim_cur = 64;
            assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit), 0);
            inherited
        };
        let first_own = close_cloexec_descriptors([-1, -1]);
        inherited > UNLISTED_NUMBERS && first_own == Ok(inherited + 1) && is_open(inherited) && !is_open(63)
    }

    #[test]
    fn descriptors_are_closed_as_by_execve_also_if_none_is_free_before_linux_6_2() {
        let thread = std::thread::spawn(|| {
            for call in [libc::SYS_newfstatat, libc::SYS_statx] {
                refuse_call(call, Errno::ENOENT);
            }
            check_in_new_process(keeps_a_large_number_without_a_free_one)
        });
        assert!(thread.join().unwrap());
    }
}
