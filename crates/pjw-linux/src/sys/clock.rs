//! Clocks, boot id and host name.

use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::errno::Errno;
use nix::libc::pid_t;
use nix::sys::time::TimeSpec;
use nix::time::{ClockId, clock_gettime};
use pjw_core::ids::{Pid, Tid};
use pjw_core::time::{Moment, Nanos, UnixMillis};
use thiserror::Error;

use crate::sys::errno::from_io;

/// Returns the current time, read from two clocks: the time since boot (`CLOCK_BOOTTIME`, which includes
/// suspended time) and the UTC time.
#[must_use]
pub fn now() -> Moment {
    let since_boot = clock_gettime(ClockId::CLOCK_BOOTTIME).map(nanos);
    let wall_clock = clock_gettime(ClockId::CLOCK_REALTIME)
        .map(|time| UnixMillis(time.tv_sec() * 1000 + time.tv_nsec() / 1_000_000));
    // Neither clock can fail on Linux 2.6.39 or later. With a zero, a record only looks old.
    Moment { since_boot: since_boot.unwrap_or_default(), wall_clock: wall_clock.unwrap_or_default() }
}

/// Returns the current time of the clock `CLOCK_MONOTONIC`, in ns since boot. This clock stops while the
/// machine is suspended. The kernel's process events and [`std::time::Instant`] use this clock.
#[must_use]
pub fn monotonic_now() -> Nanos {
    clock_gettime(ClockId::CLOCK_MONOTONIC).map(nanos).unwrap_or_default()
}

fn nanos(time: TimeSpec) -> Nanos {
    let seconds = u64::try_from(time.tv_sec()).unwrap_or(0);
    Nanos(seconds * 1_000_000_000 + u64::try_from(time.tv_nsec()).unwrap_or(0))
}

/// `CPUCLOCK_SCHED` of linux/posix-timers.h: the clock counts the time for which a thread or process has run.
const CPUCLOCK_SCHED: pid_t = 2;
/// `CPUCLOCK_PERTHREAD_MASK` of linux/posix-timers.h: the clock is that of a thread.
const CPUCLOCK_PERTHREAD_MASK: pid_t = 4;
/// Where the kernel shows the id of the boot.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

#[derive(Debug, Error)]
#[error(
    "can't read the id of this boot in {}: {why}; records of this boot and of an earlier one can't be told apart \
     without it: mount /proc as the kernel makes it, with mount -t proc proc /proc, and start pjwd again",
    path.display()
)]
/// Error: the id of the current boot can't be read. Contains the path of the file that has the id, and the
/// reason. The message also says what the user can do.
pub struct BootIdError {
    path: PathBuf,
    why: String,
}

/// Returns the id of the current boot, a random UUID (random(4)). pjwd compares this id with the boot id in its
/// own files. If the two differ, the process start times in these files belong to an earlier boot.
///
/// # Errors
/// If the file with the id can't be read or is empty, for example because `/proc` is not mounted.
pub fn boot_id() -> Result<String, BootIdError> {
    read_boot_id(Path::new(BOOT_ID))
}

fn read_boot_id(path: &Path) -> Result<String, BootIdError> {
    let fault = |why: String| BootIdError { path: path.to_owned(), why };
    let id = std::fs::read_to_string(path).map_err(|error| fault(from_io(error).desc().to_owned()))?;
    let id = id.trim();
    if id.is_empty() { Err(fault("the file is empty".to_owned())) } else { Ok(id.to_owned()) }
}

/// Returns the name of this host, as gethostname(2) reports it. Empty after an error.
#[must_use]
pub fn hostname() -> String {
    nix::unistd::gethostname().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

/// Returns the CPU time of the process `pid` since its start, in ns: the sum over all its threads, including
/// ended threads. Makes one system call.
///
/// # Errors
/// `ESRCH` or `EINVAL` if there is no such process.
pub fn process_cpu_time_ns(pid: Pid) -> Result<u64, Errno> {
    cpu_time(pid.0, CPUCLOCK_SCHED)
}

/// Returns the CPU time of the thread `tid` since its start, in ns. The thread must belong to the calling
/// process. Makes one system call.
///
/// # Errors
/// `EINVAL` if the calling process has no such thread.
pub fn thread_cpu_time_ns(tid: Tid) -> Result<u64, Errno> {
    cpu_time(tid.0, CPUCLOCK_SCHED | CPUCLOCK_PERTHREAD_MASK)
}

/// Returns the CPU time of the calling thread since its start.
#[must_use]
pub fn own_thread_cpu_time() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map_or(Duration::ZERO, Duration::from)
}

/// Reads the CPU clock of the process or thread `id`. Builds the id of the clock as clock_getcpuclockid(3) does,
/// without the extra system call of that function: `MAKE_PROCESS_CPUCLOCK` and `MAKE_THREAD_CPUCLOCK` of
/// linux/posix-timers.h.
fn cpu_time(id: u32, kind: pid_t) -> Result<u64, Errno> {
    let number = pid_t::try_from(id).map_err(|_| Errno::ESRCH)?;
    let clock = ClockId::from_raw((!number << 3) | kind);
    Ok(nanos(clock_gettime(clock)?).0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_boot_has_an_id_and_it_stays_the_same() {
        let id = boot_id().unwrap();
        assert!(!id.is_empty() && id.trim() == id, "{id:?}");
        assert_eq!(boot_id().unwrap(), id);
    }

    #[test]
    fn an_absent_or_empty_boot_id_is_an_error_and_not_an_empty_id() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("boot_id");
        let read = || read_boot_id(&path).unwrap_err().to_string();
        let absent = read();
        assert!(
            absent.starts_with(&format!("can't read the id of this boot in {}: ", path.display())),
            "{absent}"
        );
        assert!(absent.contains("No such file") && absent.contains("mount -t proc"), "{absent}");
        std::fs::write(&path, "\n").unwrap();
        assert!(read().contains("the file is empty"), "{}", read());
        std::fs::write(&path, "1b4e28ba\n").unwrap();
        assert_eq!(read_boot_id(&path).unwrap(), "1b4e28ba");
    }
}
