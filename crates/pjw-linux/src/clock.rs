//! The time, the boot, the host's name.

use nix::errno::Errno;
use nix::libc::pid_t;
use nix::sys::time::TimeSpec;
use nix::time::{ClockId, clock_gettime};
use pjw_core::process::Pid;
use pjw_core::snapshot::{Moment, Nanos, UnixMillis};

/// Now, on both clocks. The boot clock counts suspended time too and survives the daemon's restart.
#[must_use]
pub fn now() -> Moment {
    let since_boot = clock_gettime(ClockId::CLOCK_BOOTTIME).map(nanos);
    let wall = clock_gettime(ClockId::CLOCK_REALTIME)
        .map(|time| UnixMillis(time.tv_sec() * 1000 + time.tv_nsec() / 1_000_000));
    // Neither clock can fail on Linux 2.6.39 or later; a zero only makes a record look old.
    Moment { since_boot: since_boot.unwrap_or_default(), wall: wall.unwrap_or_default() }
}

/// The clock by which the kernel dates its process events, and [`std::time::Instant`] counts: it stands still while the
/// machine is suspended.
#[must_use]
pub fn monotonic() -> Nanos {
    clock_gettime(ClockId::CLOCK_MONOTONIC).map(nanos).unwrap_or_default()
}

fn nanos(time: TimeSpec) -> Nanos {
    let seconds = u64::try_from(time.tv_sec()).unwrap_or(0);
    Nanos(seconds * 1_000_000_000 + u64::try_from(time.tv_nsec()).unwrap_or(0))
}

/// The id of this boot, random(4); empty where the kernel doesn't tell.
#[must_use]
pub fn boot_id() -> String {
    let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    id.trim().to_owned()
}

/// The host's name, as `hostname` prints it.
#[must_use]
pub fn hostname() -> String {
    nix::unistd::gethostname().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

/// How long all threads of a process have run, in ns, those that have ended included: one system call.
///
/// # Errors
/// If there is no such process.
pub fn cpu_time(pid: Pid) -> Result<u64, Errno> {
    // As clock_getcpuclockid(3) makes it, without the system call by which that checks it: MAKE_PROCESS_CPUCLOCK of
    // linux/posix-timers.h with CPUCLOCK_SCHED.
    let number = pid_t::try_from(pid.0).map_err(|_| Errno::ESRCH)?;
    let clock = ClockId::from_raw((!number << 3) | 2);
    Ok(nanos(clock_gettime(clock)?).0)
}
