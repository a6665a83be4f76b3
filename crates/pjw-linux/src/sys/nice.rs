//! The nice value of a thread, and the time for which the thread runs before others: sched_setattr(2).

use std::time::Duration;

use nix::errno::Errno;

/// `struct sched_attr` of the kernel's `include/uapi/linux/sched/types.h`, in its first version
/// (`SCHED_ATTR_SIZE_VER0`).
#[repr(C)]
#[derive(Default)]
struct SchedulingAttributes {
    size: u32,
    policy: u32,
    flags: u64,
    nice: i32,
    priority: u32,
    runtime: u64,
    deadline: u64,
    period: u64,
}

/// Sets the policy `SCHED_OTHER`, the nice value `nice_value` (-20 to 19) and the time slice `time_slice` for
/// the calling thread, with sched_setattr(2). Other threads of the process are not affected.
///
/// The time slice is the time for which the calling thread can run before the scheduler switches to another
/// thread on the same PU (logical CPU). With a short time slice, the other threads on this PU wait for a shorter
/// time. The kernel limits the time slice to 0.1 to 100 ms. A kernel before Linux 6.12 ignores the time slice
/// (`__setparam_fair`, kernel/sched/syscalls.c).
///
/// # Errors
/// `EPERM` if `nice_value` is lower than the present nice value, and this user has no permission to lower it.
pub fn set_own_nice_value_and_slice(nice_value: i32, time_slice: Duration) -> Result<(), Errno> {
    let attributes = SchedulingAttributes {
        size: u32::try_from(size_of::<SchedulingAttributes>()).unwrap_or(0),
        policy: libc::SCHED_OTHER.cast_unsigned(),
        nice: nice_value,
        runtime: u64::try_from(time_slice.as_nanos()).unwrap_or(u64::MAX),
        ..SchedulingAttributes::default()
    };
    let (calling_thread, no_flags) = (0, 0);
    // SAFETY: the kernel reads `size` bytes of the attributes, which outlive the call.
    let set =
        unsafe { libc::syscall(libc::SYS_sched_setattr, calling_thread, &raw const attributes, no_flags) };
    Errno::result(set).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_gets_a_nice_value_and_a_slice() {
        let set = std::thread::spawn(|| {
            set_own_nice_value_and_slice(19, Duration::from_micros(100)).unwrap();
            let mut attributes = SchedulingAttributes::default();
            let size = size_of::<SchedulingAttributes>();
            // SAFETY: the kernel writes at most `size` bytes to the attributes.
            let read = unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attributes, size, 0) };
            Errno::result(read).map(|_| (attributes.nice, attributes.runtime))
        });
        let (nice, runtime) = set.join().unwrap().unwrap();
        assert_eq!(nice, 19);
        // A kernel before 6.12 reports no slice.
        assert!([0, 100_000].contains(&runtime), "{runtime}");
    }

    #[test]
    fn only_the_calling_thread_becomes_nice() {
        let value = |tid: i32| {
            std::fs::read_to_string(format!("/proc/self/task/{tid}/stat")).map(|stat| {
                let rest = stat.rsplit_once(')').unwrap().1.to_owned();
                rest.split_whitespace().nth(16).unwrap().parse::<i32>().unwrap()
            })
        };
        let own = nix::unistd::gettid().as_raw();
        let before = value(own).unwrap();
        let nice = std::thread::spawn(move || {
            set_own_nice_value_and_slice(19, Duration::from_millis(1)).unwrap();
            value(nix::unistd::gettid().as_raw()).unwrap()
        });
        assert_eq!(nice.join().unwrap(), 19);
        assert_eq!(value(own).unwrap(), before);
    }
}
