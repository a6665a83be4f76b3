//! The real-time priority of threads of this process: sched_setscheduler(2), sched(7).
//!
//! A raised thread has the policy `SCHED_RR` and the priority 1, the lowest: it runs before all threads without a
//! real-time priority. `RLIMIT_RTTIME` (getrlimit(2)) bounds how long such a thread runs without sleeping. After that
//! time the kernel sends `SIGXCPU`, and the handler of this module gives the thread that runs the normal policy again.
//!
//! `SCHED_RESET_ON_FORK` is always set, so no child and no new thread inherits the priority.

use std::os::unix::thread::JoinHandleExt;
use std::thread::JoinHandle;
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::resource::{Resource, getrlimit, rlim_t, setrlimit};
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};
use pjw_core::ids::Tid;

/// The scheduling policy of a thread (sched(7)).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SchedulingPolicy {
    /// `SCHED_OTHER`: the normal policy, without a real-time priority.
    Normal,
    /// `SCHED_RR`: round-robin with a real-time priority.
    RoundRobin,
    /// `SCHED_FIFO` or `SCHED_DEADLINE`: the other real-time policies.
    OtherRealtime,
    /// Any other policy, such as `SCHED_BATCH` and `SCHED_IDLE`.
    AnyOther,
}

impl SchedulingPolicy {
    /// Returns whether this policy is a real-time policy: `SCHED_RR`, `SCHED_FIFO` or `SCHED_DEADLINE`. A
    /// runnable thread with a real-time policy runs before all threads with other policies, even if those are
    /// in other cgroups.
    #[must_use]
    pub fn is_realtime(self) -> bool {
        matches!(self, Self::RoundRobin | Self::OtherRealtime)
    }
}

/// Returns the scheduling policy of the thread `tid` (sched(7)).
///
/// # Errors
/// `ESRCH` if the thread has ended.
pub fn scheduling_policy(tid: Tid) -> Result<SchedulingPolicy, Errno> {
    let pid = libc::pid_t::try_from(tid.0).map_err(|_| Errno::ESRCH)?;
    // SAFETY: the call takes a number and accesses no memory.
    let policy = Errno::result(unsafe { libc::syscall(libc::SYS_sched_getscheduler, pid) })?;
    Ok(match policy & !i64::from(libc::SCHED_RESET_ON_FORK) {
        policy if policy == i64::from(libc::SCHED_OTHER) => SchedulingPolicy::Normal,
        policy if policy == i64::from(libc::SCHED_RR) => SchedulingPolicy::RoundRobin,
        policy if [libc::SCHED_FIFO, libc::SCHED_DEADLINE].map(i64::from).contains(&policy) => {
            SchedulingPolicy::OtherRealtime
        }
        _ => SchedulingPolicy::AnyOther,
    })
}

/// Sets the scheduling policy of the thread `tid` to `SCHED_RR` with the priority 1, the lowest real-time
/// priority. Threads and processes that the thread starts later do not inherit the policy
/// (`SCHED_RESET_ON_FORK`).
///
/// # Errors
/// `ESRCH` if the thread has ended. `EPERM` in these cases:
///
/// - The calling process has neither `CAP_SYS_NICE` nor a sufficient `RLIMIT_RTPRIO`.
/// - `cpu.rt_runtime_us` is 0 for the cgroup of the thread. This file of the v1 controller `cpu` exists on
///   kernels with `CONFIG_RT_GROUP_SCHED`.
/// - A seccomp filter refuses the call.
pub fn set_realtime_policy(tid: Tid) -> Result<(), Errno> {
    set_policy(tid, libc::SCHED_RR, 1)
}

/// Sets the scheduling policy of `thread` to `SCHED_RR` with the priority 1, the lowest real-time priority. Also
/// works if the thread has not run yet, so that its thread id is not known.
///
/// # Errors
/// The errors of [`set_realtime_policy`].
pub(crate) fn set_thread_realtime<T>(thread: &JoinHandle<T>) -> Result<(), Errno> {
    let parameters = parameters(1);
    let policy = libc::SCHED_RR | libc::SCHED_RESET_ON_FORK;
    // SAFETY: the handle is of a thread that was neither joined nor detached. The function reads `parameters`.
    match unsafe { libc::pthread_setschedparam(thread.as_pthread_t(), policy, &raw const parameters) } {
        0 => Ok(()),
        errno => Err(Errno::from_raw(errno)),
    }
}

/// Sets the scheduling policy of the thread `tid` to `SCHED_OTHER`, the normal policy. The nice value of the
/// thread stays the same.
///
/// # Errors
/// `ESRCH` if the thread has ended. `EPERM` for a thread of another user without `CAP_SYS_NICE`.
pub fn set_normal_policy(tid: Tid) -> Result<(), Errno> {
    set_policy(tid, libc::SCHED_OTHER, 0)
}

fn set_policy(tid: Tid, policy: libc::c_int, priority: libc::c_int) -> Result<(), Errno> {
    let pid = libc::pid_t::try_from(tid.0).map_err(|_| Errno::ESRCH)?;
    let parameters = parameters(priority);
    let policy = policy | libc::SCHED_RESET_ON_FORK;
    // Musl's own function only returns ENOSYS.
    // SAFETY: the kernel reads `parameters`, which outlives the call.
    let done = unsafe { libc::syscall(libc::SYS_sched_setscheduler, pid, policy, &raw const parameters) };
    Errno::result(done).map(drop)
}

fn parameters(priority: libc::c_int) -> libc::sched_param {
    // SAFETY: sched_param is a plain struct of the C library, for which zeros are valid. Musl's has more fields.
    let mut parameters: libc::sched_param = unsafe { std::mem::zeroed() };
    parameters.sched_priority = priority;
    parameters
}

/// Limits the time for which a thread of this process can run with a real-time priority without sleeping: sets
/// the soft limit `RLIMIT_RTTIME` to `max_run_time`. If the present soft limit is lower, it stays. Returns the
/// soft limit in force.
///
/// When a thread reaches the limit, the kernel sends `SIGXCPU`. This function installs a signal handler that
/// then sets the policy of this thread to `SCHED_OTHER`. The kernel counts in timer ticks, so a thread can run
/// one or two ticks longer than the limit.
///
/// With each `SIGXCPU`, the kernel also raises the soft limit by 1 s. The caller must then call this function
/// again to restore the limit. The caller notices the signal by the changed policy ([`scheduling_policy`]).
///
/// # Errors
/// - `ERANGE` if a hard limit `RLIMIT_RTTIME` is set: the kernel kills a process when one of its threads reaches
///   the hard limit. The handler can't prevent this. The kernel resets the counted time only when the thread
///   sleeps, not when the policy changes.
/// - Otherwise the error of sigaction(2), getrlimit(2) or setrlimit(2).
///
/// After any error, the soft limit is unchanged. The signal handler possibly stays installed.
pub fn limit_realtime_run_time(max_run_time: Duration) -> Result<Duration, Errno> {
    // The handler must be there before the limit: the default action of SIGXCPU ends the process.
    let action =
        SigAction::new(SigHandler::Handler(lower_running_thread), SaFlags::SA_RESTART, SigSet::empty());
    // SAFETY: the handler makes one system call and keeps errno, so it is async-signal-safe (signal-safety(7)).
    unsafe { sigaction(Signal::SIGXCPU, &action) }?;
    let (soft, hard) = getrlimit(Resource::RLIMIT_RTTIME)?;
    if hard != libc::RLIM_INFINITY {
        return Err(Errno::ERANGE);
    }
    let limit = rlim_t::try_from(max_run_time.as_micros()).unwrap_or(libc::RLIM_INFINITY);
    let limit = limit.min(soft);
    setrlimit(Resource::RLIMIT_RTTIME, limit, hard)?;
    Ok(Duration::from_micros(limit))
}

/// The handler of `SIGXCPU`. The kernel sends the signal to the process while the thread that reached the limit runs,
/// and the thread that runs handles it, because no thread blocks it.
extern "C" fn lower_running_thread(_signal: libc::c_int) {
    let errno = Errno::last_raw();
    // The thread id 0 is the calling thread.
    let _ = set_normal_policy(Tid(0));
    Errno::set_raw(errno);
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::process::Command;
    use std::time::Instant;

    use super::*;
    use crate::sys::affinity::own_thread;

    const LIMIT: Duration = Duration::from_millis(20);

    /// Whether a thread may have a real-time priority here. If not, reports that the test is skipped.
    fn may_raise() -> bool {
        let raised = std::thread::spawn(|| set_realtime_policy(own_thread())).join().unwrap();
        if let Err(errno) = raised {
            // Not by a macro: the harness shows this line also if the test passes.
            let _ = writeln!(std::io::stderr(), "skipped: no real-time priority here: {errno}");
        }
        raised.is_ok()
    }

    #[test]
    fn a_raised_thread_has_round_robin_and_its_threads_and_children_have_not() {
        if !may_raise() {
            return;
        }
        let test = || {
            assert_eq!(scheduling_policy(own_thread()), Ok(SchedulingPolicy::Normal));
            set_realtime_policy(own_thread()).unwrap();
            assert_eq!(scheduling_policy(own_thread()), Ok(SchedulingPolicy::RoundRobin));
            assert_eq!(
                std::thread::spawn(|| scheduling_policy(own_thread())).join().unwrap(),
                Ok(SchedulingPolicy::Normal)
            );
            let thread = std::thread::spawn(|| (std::thread::park(), scheduling_policy(own_thread())).1);
            set_thread_realtime(&thread).unwrap();
            thread.thread().unpark();
            assert_eq!(thread.join().unwrap(), Ok(SchedulingPolicy::RoundRobin));
            let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
            let of_child = scheduling_policy(Tid(child.id()));
            child.kill().and_then(|()| child.wait()).unwrap();
            assert_eq!(of_child, Ok(SchedulingPolicy::Normal));
            set_normal_policy(own_thread()).unwrap();
            assert_eq!(scheduling_policy(own_thread()), Ok(SchedulingPolicy::Normal));
        };
        std::thread::spawn(test).join().unwrap();
    }

    #[test]
    #[ignore = "run in a child by a_thread_that_reaches_the_limit_has_the_normal_policy_again"]
    fn child_that_runs_without_sleeping() {
        assert_eq!(limit_realtime_run_time(LIMIT), Ok(LIMIT));
        let raised = std::thread::spawn(|| {
            let begin = Instant::now();
            set_realtime_policy(own_thread()).unwrap();
            let end = begin + Duration::from_secs(30);
            while scheduling_policy(own_thread()) == Ok(SchedulingPolicy::RoundRobin) {
                assert!(Instant::now() < end, "the kernel's limit has no effect");
            }
            (scheduling_policy(own_thread()), begin.elapsed())
        });
        let (policy_afterwards, ran) = raised.join().unwrap();
        assert_eq!(policy_afterwards, Ok(SchedulingPolicy::Normal));
        // Not the CPU time: the kernel counts the ticks between which a hypervisor took the CPU, too.
        assert!(ran >= LIMIT / 2, "{ran:?}");
        let (raised_limit, _) = getrlimit(Resource::RLIMIT_RTTIME).unwrap();
        assert!(raised_limit > 1_000_000, "the kernel adds a second");
        assert_eq!(limit_realtime_run_time(LIMIT), Ok(LIMIT), "and it is taken back");
    }

    #[test]
    #[ignore = "run in a child by beside_a_hard_limit_no_soft_limit_is_set"]
    fn child_with_a_hard_limit() {
        setrlimit(Resource::RLIMIT_RTTIME, 900_000, 900_000).unwrap();
        assert_eq!(limit_realtime_run_time(LIMIT), Err(Errno::ERANGE));
        assert_eq!(getrlimit(Resource::RLIMIT_RTTIME), Ok((900_000, 900_000)));
    }

    /// Runs an ignored test in a child, because limits and signal handlers belong to the whole process.
    fn run_in_child(test: &str) {
        let child = Command::new(std::env::current_exe().unwrap())
            .args([&format!("sys::realtime::tests::{test}"), "--exact", "--ignored", "--nocapture"])
            .output()
            .unwrap();
        let output = String::from_utf8_lossy(&child.stdout);
        assert!(child.status.success() && output.contains("1 passed"), "{child:?}");
    }

    #[test]
    fn a_thread_that_reaches_the_limit_has_the_normal_policy_again() {
        if may_raise() {
            run_in_child("child_that_runs_without_sleeping");
        }
    }

    #[test]
    fn beside_a_hard_limit_no_soft_limit_is_set() {
        run_in_child("child_with_a_hard_limit");
    }
}
