//! Clocks, boot id and host name.

use std::time::Duration;

use nix::errno::Errno;
use nix::libc::pid_t;
use nix::sys::time::TimeSpec;
use nix::time::{ClockId, clock_gettime};
use pjw_core::ids::{Pid, Tid};
use pjw_core::time::{Moment, Nanos, UnixMillis};

/// Returns the current time on two clocks: since boot (`CLOCK_BOOTTIME`, which includes suspended time), and the
/// wall clock (UTC).
#[must_use]
pub fn now() -> Moment {
    let since_boot = clock_gettime(ClockId::CLOCK_BOOTTIME).map(nanos);
    let wall_clock = clock_gettime(ClockId::CLOCK_REALTIME)
        .map(|time| UnixMillis(time.tv_sec() * 1000 + time.tv_nsec() / 1_000_000));
    // Neither clock can fail on Linux 2.6.39 or later. With a zero, a record only looks old.
    Moment { since_boot: since_boot.unwrap_or_default(), wall_clock: wall_clock.unwrap_or_default() }
}

/// Returns the current time on `CLOCK_MONOTONIC`, in ns. This clock stops while the machine is suspended. The
/// kernel dates its process events by it, and [`std::time::Instant`] uses it.
#[must_use]
pub fn monotonic_now() -> Nanos {
    clock_gettime(ClockId::CLOCK_MONOTONIC).map(nanos).unwrap_or_default()
}

fn nanos(time: TimeSpec) -> Nanos {
    let seconds = u64::try_from(time.tv_sec()).unwrap_or(0);
    Nanos(seconds * 1_000_000_000 + u64::try_from(time.tv_nsec()).unwrap_or(0))
}

/// The random id of the current boot, random(4). It tells whether a recorded start time of a process is from this boot.
/// Empty if the kernel provides no such id.
#[must_use]
pub fn boot_id() -> String {
    let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    id.trim().to_owned()
}

/// The name of this host, as the command `hostname` prints it.
#[must_use]
pub fn hostname() -> String {
    nix::unistd::gethostname().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

/// The CPU time of a process in ns: the sum over all its threads, including those that have ended. Makes one system
/// call.
///
/// # Errors
/// `ESRCH` if there is no such process.
pub fn process_cpu_time(pid: Pid) -> Result<u64, Errno> {
    // The clock id is built as clock_getcpuclockid(3) builds it, without that function's extra system call:
    // MAKE_PROCESS_CPUCLOCK of linux/posix-timers.h with CPUCLOCK_SCHED.
    cpu_time(pid.0, 2)
}

/// The CPU time of a thread of this process in ns. Makes one system call.
///
/// # Errors
/// `EINVAL` if this process has no such thread.
pub fn thread_cpu_time(tid: Tid) -> Result<u64, Errno> {
    // MAKE_THREAD_CPUCLOCK with CPUCLOCK_SCHED.
    cpu_time(tid.0, 2 | 4)
}

/// The CPU time of the calling thread.
#[must_use]
pub fn own_thread_cpu_time() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map_or(Duration::ZERO, Duration::from)
}

fn cpu_time(id: u32, kind: pid_t) -> Result<u64, Errno> {
    let number = pid_t::try_from(id).map_err(|_| Errno::ESRCH)?;
    let clock = ClockId::from_raw((!number << 3) | kind);
    Ok(nanos(clock_gettime(clock)?).0)
}
