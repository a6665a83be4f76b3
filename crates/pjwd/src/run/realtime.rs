//! The real-time priority of the event loop, of the control server and of the thread that changes cpusets, and its
//! bounds.
//!
//! Beside many processes that start and end all the time, a thread with the normal policy may wait for a CPU for
//! seconds. A nice value does not help, because the kernel first divides the time between groups of processes
//! (sched(7), "The autogroup feature"). So these threads have the lowest real-time priority where the system allows it.
//! All are needed: a request passes through the control server and the loop, and the loop waits for changes of cpusets.
//!
//! A thread with a real-time priority could keep a CPU from a job. So it runs on PUs that no job holds, while there are
//! any ([`super::own_mask`]), and is bounded in two ways:
//! - The thread runs at most `RUN_LIMIT` without sleeping, as in a scan of a very large node. The kernel enforces this.
//! - The thread has a budget of `SHARE_PERMILLE` of one PU, also if clients or processes make work all the time.
//!
//! A thread that exceeds a bound goes on with the normal policy, and is raised again when the budget has a reserve.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::unistd::Uid;
use pjw_core::ids::Tid;
use pjw_linux::sys::errno::is_permission_denied;
use pjw_linux::sys::realtime::{
    SchedulingPolicy, limit_realtime_run_time, scheduling_policy, set_normal_policy,
};
use pjw_linux::sys::{clock::thread_cpu_time_ns, realtime};
use tracing::{debug, info, warn};

use super::budget::CpuBudget;

/// How long a thread may run with the real-time priority without sleeping.
const RUN_LIMIT: Duration = Duration::from_millis(50);
/// The share of one PU that each thread may use with the real-time priority in the long run. More than the default
/// share for process events (`cpu_budget_permille`). Three threads together leave some time of a PU that they share.
const SHARE_PERMILLE: u32 = 300;
/// The longest time between two checks of the budgets.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// The shortest time between two log lines about a thread that exceeded a bound.
const LOG_PERIOD: Duration = Duration::from_secs(60 * 60);

/// Gives threads of the daemon a real-time priority (SCHED_RR, priority 1), within two limits of their CPU time. The
/// kernel enforces the first limit: a thread must not run for more than 50 ms without sleeping (`RLIMIT_RTTIME`). pjwd
/// checks the second limit: in the long run, a thread must not use more than 30 % of one PU (logical CPU).
///
/// A thread that exceeds a limit gets the normal scheduling policy (SCHED_OTHER). When the thread has unused CPU time
/// again ([`CpuBudget::has_reserve`]), the thread gets back the real-time priority.
#[derive(Debug, Default)]
pub struct RealtimePriority {
    threads: Vec<BoundedThread>,
    /// Whether the threads may have the priority: the configuration wants it, and the system allowed it at the last
    /// attempt.
    is_on: bool,
    run_limit: Duration,
}

#[derive(Debug)]
struct BoundedThread {
    name: &'static str,
    tid: Tid,
    budget: CpuBudget,
    /// The CPU time of the thread at the last check, in ns.
    cpu_time: u64,
    is_raised: bool,
    last_logged: Option<Instant>,
}

impl RealtimePriority {
    /// Makes a [`RealtimePriority`]. `threads` are threads of this process, each with a name for the log. They keep
    /// their scheduling policy until [`RealtimePriority::set_enabled`] is called. Their CPU time is counted from `now`
    /// on.
    #[must_use]
    pub fn new(threads: &[(&'static str, Tid)], now: Instant) -> Self {
        let thread = |&(name, tid)| BoundedThread {
            name,
            tid,
            budget: CpuBudget::new(SHARE_PERMILLE, now),
            cpu_time: thread_cpu_time_ns(tid).unwrap_or_default(),
            is_raised: false,
            last_logged: None,
        };
        Self { threads: threads.iter().map(thread).collect(), is_on: false, run_limit: RUN_LIMIT }
    }

    /// Returns the threads that have lost the real-time priority for now, because they exceeded a limit of their CPU
    /// time. The result is empty if all threads have the priority. It is `None` if none has it, for example because it
    /// is switched off.
    #[must_use]
    pub fn lowered_threads(&self) -> Option<BTreeSet<Tid>> {
        let lowered = self.threads.iter().filter(|thread| !thread.is_raised).map(|thread| thread.tid);
        let lowered: BTreeSet<Tid> = lowered.collect();
        (self.is_on && lowered.len() < self.threads.len()).then_some(lowered)
    }

    /// Switches the real-time priority of the daemon's threads on or off. If the priority can't be set, for example
    /// because the system does not allow it, the threads keep their normal priority. The reason is logged: at the
    /// level info for root, and at the level debug for other users, who normally can't have a real-time priority.
    pub fn set_enabled(&mut self, is_enabled: bool) {
        if is_enabled == self.is_on {
            return;
        }
        self.is_on = false;
        if !is_enabled {
            self.threads.iter_mut().for_each(BoundedThread::lower);
            return;
        }
        match self.try_raise_all() {
            Ok(()) => info!(
                "a real-time priority (SCHED_RR, 1) for the {}: at most {:?} at a time and {} % of a CPU each",
                self.threads.iter().map(|thread| thread.name).collect::<Vec<_>>().join(", the "),
                self.run_limit,
                SHARE_PERMILLE / 10
            ),
            Err(why) if Uid::effective().is_root() => info!("no real-time priority: {why}"),
            Err(why) => debug!("no real-time priority: {why}"),
        }
    }

    /// Gives all threads the real-time policy `SCHED_RR`, after setting `RLIMIT_RTTIME` (the longest run without a
    /// sleep). Fails if a thread was started with a policy of its own, or if the kernel refuses. Each thread then has
    /// the policy that it had before. The error is a text for the log.
    fn try_raise_all(&mut self) -> Result<(), String> {
        if let Some(thread) =
            self.threads.iter().find(|thread| scheduling_policy(thread.tid) != Ok(SchedulingPolicy::Normal))
        {
            return Err(format!(
                "the {} was started with a scheduling policy of its own, and keeps it",
                thread.name
            ));
        }
        self.run_limit = limit_realtime_run_time(RUN_LIMIT).map_err(|errno| match errno {
            Errno::ERANGE => {
                "the hard limit RLIMIT_RTTIME is below 40 ms (LimitRTTIME= in the unit)".to_owned()
            }
            errno => format!("RLIMIT_RTTIME can't be set: {errno}"),
        })?;
        let raised = self.threads.iter_mut().try_for_each(BoundedThread::raise);
        self.is_on = raised.is_ok();
        raised.map_err(|errno| {
            self.threads.iter_mut().for_each(BoundedThread::lower);
            let cause = if is_permission_denied(errno) {
                ": CAP_SYS_NICE is missing, RestrictRealtime= forbids it, or the cgroup has no real-time runtime \
                 (cpu.rt_runtime_us)"
            } else {
                ""
            };
            format!("{errno}{cause}; beside very many processes, requests may wait for seconds")
        })
    }

    /// Returns the time by which the caller must call [`RealtimePriority::enforce_limits`] again. `now` is the
    /// current time. `None` if the real-time priority is off.
    #[must_use]
    pub fn next_check_at(&self, now: Instant) -> Option<Instant> {
        self.is_on.then(|| now + CHECK_INTERVAL)
    }

    /// Takes the real-time priority from each thread that has used up its budget of CPU time. Each second adds 300 ms
    /// to the budget of each thread. Gives the real-time priority back to each thread whose budget has at least 25 ms
    /// again. `now` is the current time.
    ///
    /// A thread that ran for 50 ms without sleeping has already lost the real-time priority: the kernel sent SIGXCPU,
    /// and the signal handler set SCHED_OTHER. The kernel also raised `RLIMIT_RTTIME`, and this function sets the
    /// limit back.
    ///
    /// Must be called just before the event loop sleeps. The kernel resets the counted running time of a thread only
    /// when the thread sleeps. Without the sleep, a thread that gets the priority back could exceed the limit at
    /// once.
    pub fn enforce_limits(&mut self, now: Instant) {
        if !self.is_on {
            return;
        }
        for thread in &mut self.threads {
            let is_overdrawn = thread.spend(now);
            if thread.is_raised && scheduling_policy(thread.tid) == Ok(SchedulingPolicy::Normal) {
                thread.is_raised = false;
                thread.log_exceeded(now, format_args!("it ran for {:?} without a pause", self.run_limit));
                // The kernel has raised the limit.
                if let Err(errno) = limit_realtime_run_time(self.run_limit) {
                    warn!("no real-time priority: RLIMIT_RTTIME can't be set: {errno}");
                    return self.set_enabled(false);
                }
            } else if thread.is_raised && is_overdrawn {
                thread.lower();
                let percent = SHARE_PERMILLE / 10;
                thread.log_exceeded(now, format_args!("it used more than {percent} % of a CPU"));
            } else if !thread.is_raised && thread.budget.has_reserve(now) {
                match thread.raise() {
                    Ok(()) => debug!("the {} has a real-time priority again", thread.name),
                    Err(errno) => {
                        info!("no real-time priority any more: {errno}");
                        return self.set_enabled(false);
                    }
                }
            }
        }
    }
}

impl BoundedThread {
    /// Spends the CPU time since the last check. Returns whether the budget is overdrawn.
    fn spend(&mut self, now: Instant) -> bool {
        let before = self.cpu_time;
        self.cpu_time = thread_cpu_time_ns(self.tid).unwrap_or(before);
        self.budget.spend(Duration::from_nanos(self.cpu_time.saturating_sub(before)), now);
        !self.budget.wait_time(now).is_zero()
    }

    fn raise(&mut self) -> Result<(), Errno> {
        realtime::set_realtime_policy(self.tid)?;
        self.is_raised = true;
        Ok(())
    }

    fn lower(&mut self) {
        if self.is_raised
            && let Err(errno) = set_normal_policy(self.tid)
        {
            warn!("the {} can't get the normal policy: {errno}", self.name);
        }
        self.is_raised = false;
    }

    fn log_exceeded(&mut self, now: Instant, what: std::fmt::Arguments<'_>) {
        let name = self.name;
        if self.last_logged.is_none_or(|last| now.saturating_duration_since(last) >= LOG_PERIOD) {
            self.last_logged = Some(now);
            info!("the {name} has the normal priority for a moment: {what}");
        } else {
            debug!("the {name} has the normal priority for a moment: {what}");
        }
    }
}
