//! The event loop and lent cores: the samples of their owners, the signal to their borrowers, and the thawing of jobs
//! that are frozen because they can borrow no core.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::signal::Signal;
use pjw_core::cpuset_group::CpusetHierarchy;
use pjw_core::event::{Event, EventKind};
use pjw_core::ids::{Pid, ProcessId, Tid};
use pjw_core::job::{Job, JobId, Ownership};
use pjw_core::plan::Warning;
use pjw_core::policy::DaemonMode;
use pjw_core::state::Member;
use pjw_core::time::Nanos;
use pjw_linux::node::{has_lost_idle_priority, thaw_jobs, thaw_killed_processes};
use pjw_linux::proc::signal::send_signal;
use pjw_linux::sys::realtime::scheduling_policy;
use pjw_linux::sys::{clock, cpu_time::process_cpu_time};
use tracing::{debug, warn};

use super::EventLoop;
use crate::run::owner_samples::load_lent_cpu_monitor;

/// Threads of a process that together use less than this share of a PU, in permille, take no time worth mentioning from
/// an owner.
const MIN_REALTIME_DEMAND_PERMILLE: u32 = 10;
/// The longest time for which the loop waits for delayed changes of cpusets before it thaws the jobs. systemd may take
/// up to 2 s for a change.
const MAX_WAIT_TO_THAW: Duration = Duration::from_secs(3);
/// The number of processes of frozen jobs that are read after a scan, to find those that were killed. A process takes
/// some 20 us.
const MAX_FROZEN_READ: usize = 256;

impl EventLoop {
    /// Measures how many cores each owner uses, if a measurement is due at the time `now`. An owner is a job whose idle
    /// cores can be lent to other jobs. Returns whether a cycle (scan, decision and changes) is due because cores must
    /// be lent or taken back.
    pub(super) fn sample_owner_cpu_use(&mut self, now: Instant) -> bool {
        let since_boot = clock::now().since_boot;
        let (state, policy) = self.warden.state_and_policy();
        self.owner_samples.load_monitor_if_due(
            now,
            !state.pool.lent_cpus().is_empty(),
            load_lent_cpu_monitor,
        );
        self.owner_samples.measure_if_due(state, policy, (now, since_boot), process_cpu_time)
            || self.grace_period_end().is_some_and(|end| end <= since_boot)
    }

    /// Returns the time at which [`EventLoop::sample_owner_cpu_use`] must be called next: when the next measurement is
    /// due, or when a grace period ends after which a lent core is taken back. `None` if no measurement is due and no
    /// grace period runs. `now` is the current time.
    pub(super) fn lending_due_at(&self, now: Instant) -> Option<Instant> {
        let end_of_grace = self
            .grace_period_end()
            .map(|end| now + Duration::from_nanos(end.0.saturating_sub(clock::now().since_boot.0)));
        end_of_grace.into_iter().chain(self.owner_samples.next_measurement_at()).min()
    }

    /// The end of the grace period after which a core is taken back next. `None` if there is none.
    fn grace_period_end(&self) -> Option<Nanos> {
        self.warden.state().lending.next_grace_period_end()
    }

    /// Returns the warnings about borrowers with real-time threads. A borrower is a job of the class `besteffort`,
    /// which runs on cores that other jobs (the owners) lend. The kernel runs real-time threads before the threads of
    /// the owner, whatever the cgroup is.
    ///
    /// Real-time threads of a process that together use nearly no CPU time do not count. But a frozen job that has
    /// the warning keeps it while it has any real-time thread, because frozen threads use no CPU time.
    fn realtime_borrower_warnings(&self) -> Vec<Warning> {
        let state = self.warden.state();
        let has_realtime_thread = |member: &Member, only_active: bool| {
            let threads = member.threads.iter().map(|(tid, thread)| (*tid, thread.demand.permille));
            has_realtime_threads(threads, only_active, |tid| {
                // A thread may have ended since the last scan.
                scheduling_policy(tid).is_ok_and(|policy| policy.is_realtime())
            })
        };
        let warning_of = |job: &Job| {
            let has_warning =
                self.borrower_records.realtime.iter().any(|warning| warning.job.as_ref() == Some(&job.id));
            let only_active = !(is_frozen(job) && has_warning);
            let member = state.members_of(&job.id).find(|member| has_realtime_thread(member, only_active))?;
            let text = format!(
                "process {} of {} has a real-time priority, so the job gets no lent cores: owners would wait for the process",
                member.id.pid, job.id
            );
            let remedy = "end the process, give it the normal policy (chrt -o -p 0 PID), or release the job";
            Some(Warning { job: Some(job.id.clone()), ..Warning::new("realtime-borrower", text, remedy) })
        };
        state.jobs.borrowers().filter_map(warning_of).collect()
    }

    /// Does the work of lending that follows each cycle (scan, decision and changes). Must be called after each
    /// cycle.
    ///
    /// - Tells the BPF monitor of lent cores which PUs (logical CPUs) are lent now.
    /// - Sends the configured signal to the borrowers (jobs on lent cores) that lose cores according to `events`, the
    ///   events of the cycle.
    ///
    /// `scanned_jobs` says whether the cycle scanned the processes of jobs. If it did, also records which borrowers
    /// have threads with a real-time priority. pjw lends such a borrower no cores, and warns users about it. If a job
    /// is frozen after such a cycle, what follows depends on the mode:
    ///
    /// - In the mode `observe`, thaws the frozen jobs, once after a change to this mode.
    /// - Otherwise, starts the thaw watcher (the process that thaws frozen jobs if pjwd is killed) unless it runs
    ///   already, and thaws processes that were killed.
    pub(super) fn update_lending_after_cycle(&mut self, events: &[Event], scanned_jobs: bool) {
        if scanned_jobs {
            let warnings = self.realtime_borrower_warnings();
            let borrowers = warnings.iter().filter_map(|warning| warning.job.clone()).collect();
            self.borrower_records.realtime = warnings;
            self.warden.state_mut().lending.set_realtime_borrowers(borrowers);
            let is_observing = self.warden.policy().mode == DaemonMode::Observe;
            self.borrower_records.is_thawed_in_observe &= is_observing;
            if self.has_frozen_job() && is_observing {
                // In this mode no cycle thaws a job, and no job can be released. A job that is frozen after the first
                // thawing was not frozen by pjwd.
                if !self.borrower_records.is_thawed_in_observe {
                    let is_complete = self.thaw_frozen_jobs(Duration::ZERO, "in the mode observe");
                    self.borrower_records.is_thawed_in_observe = is_complete;
                }
            } else if self.has_frozen_job() {
                self.warden.ensure_thaw_watcher_running();
                self.thaw_killed_processes();
            }
        }
        self.owner_samples
            .set_lent_pus(&self.warden.state().pool.lent_cpus_with_owner_pu_counts(), Instant::now());
        self.send_revocation_signal(events);
    }

    /// Checks whether another program, such as systemctl, has ended the idle priority of the jobs of the class
    /// `besteffort`. Without this priority, such a job would use half of the time of a lent core. If the priority is
    /// lost, the next decision sets it again. Must be called before each cycle.
    ///
    /// Does nothing without such jobs, in the mode `observe`, or if `is_rescan` is false (the cycle does not scan the
    /// processes without a job).
    pub(super) fn restore_lost_idle_priority(&mut self, is_rescan: bool) {
        let policy = self.warden.policy();
        let may_be_lost =
            is_rescan && policy.mode == DaemonMode::Enforce && self.warden.state().jobs.has_borrowers();
        if !may_be_lost {
            return;
        }
        let is_lost = has_lost_idle_priority(&policy.own_cgroups);
        let was_lost = std::mem::replace(&mut self.borrower_records.had_lost_idle_priority, is_lost);
        if !is_lost {
            return;
        }
        if !was_lost {
            warn!("another program has ended the idle priority of the besteffort jobs: they get it again");
        }
        let state = self.warden.state_mut();
        state.cpusets.forget_unread_settings();
        let borrowers: Vec<JobId> = state.jobs.borrowers().map(|job| job.id.clone()).collect();
        borrowers.iter().for_each(|job| state.dirty.add_job(job));
    }

    /// Returns whether a job is frozen, because the job has no cores of its own and can borrow none at present.
    pub(super) fn has_frozen_job(&self) -> bool {
        self.warden.state().jobs.borrowers().any(is_frozen)
    }

    /// Thaws the frozen jobs at a stop of pjwd. Returns whether all changes of cpusets are complete: another one could
    /// freeze a job.
    pub(super) fn thaw_frozen_jobs_at_stop(&mut self) -> bool {
        self.thaw_frozen_jobs(MAX_WAIT_TO_THAW, "while no daemon runs")
    }

    /// Thaws the frozen jobs when no cycle will thaw them, because pjwd stops or has the mode `observe`. First waits
    /// for the delayed changes of cpusets, at most for `max_wait`, because one of these changes may freeze a job.
    /// Returns whether these changes are complete. If a job can't be thawed, logs that it stays frozen. `when` is the
    /// end of this text.
    fn thaw_frozen_jobs(&mut self, max_wait: Duration, when: &str) -> bool {
        let are_complete = self.warden.machine_interface_mut().wait_for_cpuset_changes(max_wait);
        for fault in thaw_jobs(&self.warden.policy().own_cgroups) {
            warn!(%fault, "a job stays frozen {when}");
        }
        are_complete
    }

    /// Thaws those processes of frozen jobs that were killed, so that they can end. Reads at most [`MAX_FROZEN_READ`]
    /// processes, and continues with the others at the next call. Does nothing in cgroup v2, where the kernel ends
    /// killed processes even if they are frozen.
    fn thaw_killed_processes(&mut self) {
        let (state, policy) = (self.warden.state(), self.warden.policy());
        if policy.cpuset_support.hierarchy != CpusetHierarchy::Legacy {
            return;
        }
        let frozen_jobs = state.jobs.borrowers().filter(|job| is_frozen(job));
        let members = frozen_jobs.flat_map(|job| state.members_of(&job.id));
        let frozen: BTreeMap<Pid, ProcessId> = members.map(|member| (member.id.pid, member.id)).collect();
        let later = frozen.range((Bound::Excluded(self.last_frozen_read), Bound::Unbounded));
        let next: Vec<ProcessId> = later.chain(&frozen).map(|(_, id)| *id).take(MAX_FROZEN_READ).collect();
        self.last_frozen_read = next.last().map_or(Pid(0), |id| id.pid);
        for process in thaw_killed_processes(next.into_iter()) {
            debug!(pid = process.pid.0, "a killed process of a frozen job was thawed, so that it ends");
        }
    }

    /// Sends the configured signal to the processes of the borrowers (jobs on lent cores) that lose cores according
    /// to `events`. If pjwd may not send the signal to a process, stores a warning about its job. If no signal is
    /// configured, only removes these warnings.
    fn send_revocation_signal(&mut self, events: &[Event]) {
        let state = self.warden.state();
        let warnings = &mut self.borrower_records.unsignalled;
        let Some(signal) = self.config.settings().revocation_signal else { return warnings.clear() };
        warnings.retain(|job, _| state.jobs.get(job).is_some_and(Job::is_borrower));
        let revoked = events.iter().filter(|event| event.kind == EventKind::Revoked);
        let revoked: BTreeSet<&JobId> = revoked.filter_map(|event| event.job.as_ref()).collect();
        for job in revoked.into_iter().filter(|id| state.jobs.get(id).is_some_and(Job::is_borrower)) {
            let mut refused = Vec::new();
            for process in state.members_of(job).map(|member| member.id) {
                match send_signal(process, signal) {
                    Err(Errno::EPERM) => refused.push(process.pid),
                    // A process may have ended since the last scan.
                    Err(error) => {
                        debug!(%job, pid = process.pid.0, %error, "the process did not get the revocation signal");
                    }
                    Ok(()) => {}
                }
            }
            match refused.first() {
                Some(&pid) => {
                    warnings.insert(job.clone(), unsignalled_warning(job, signal, pid, refused.len()));
                }
                None => drop(warnings.remove(job)),
            }
        }
    }
}

/// Returns whether a process has real-time threads that together use at least [`MIN_REALTIME_DEMAND_PERMILLE`] of a
/// PU. If `only_active` is false, any real-time thread is enough, whatever CPU time it uses. `threads` has the
/// threads of the process with their CPU demands, in permille of a PU. `is_realtime` is called for few threads only,
/// because it is a system call.
fn has_realtime_threads(
    threads: impl Iterator<Item = (Tid, u32)> + Clone,
    only_active: bool,
    is_realtime: impl Fn(Tid) -> bool,
) -> bool {
    if !only_active {
        return threads.map(|(tid, _)| tid).any(is_realtime);
    }
    let mut active = threads.filter(|(_, demand)| *demand > 0);
    let mut active_realtime = active.clone().filter(|(tid, _)| is_realtime(*tid));
    let is_demand_enough = |threads: &mut dyn Iterator<Item = (Tid, u32)>| {
        let demand = threads.fold(0, |sum: u32, (_, demand)| sum.saturating_add(demand));
        demand >= MIN_REALTIME_DEMAND_PERMILLE
    };
    is_demand_enough(&mut active) && is_demand_enough(&mut active_realtime)
}

fn is_frozen(job: &Job) -> bool {
    job.grant.as_ref().is_some_and(|grant| grant.ownership == Ownership::Frozen)
}

/// The warning about a borrower of which `count` processes, the first of them `pid`, did not get the revocation signal.
fn unsignalled_warning(job: &JobId, signal: Signal, pid: Pid, count: usize) -> Warning {
    let others = if count > 1 { format!(" and {} more", count - 1) } else { String::new() };
    let text = format!(
        "process {pid}{others} of {job} did not get {signal} before a core was taken back: pjwd may not send signals to \
         processes of this user (EPERM)"
    );
    let remedy = "give pjwd CAP_KILL (CapabilityBoundingSet= of pjwd.service), or set lending.revocation_signal = \"\"";
    Warning { job: Some(job.clone()), pid: Some(pid), ..Warning::new("revocation-signal", text, remedy) }
}

#[cfg(test)]
mod tests {
    use pjw_core::ids::Tid;

    use super::has_realtime_threads;

    #[test]
    fn the_real_time_threads_of_a_process_count_together_and_the_others_do_not() {
        let found = |demands: &[u32], realtime: std::ops::Range<u32>, only_active| {
            let threads = (0..).map(Tid).zip(demands.iter().copied());
            has_realtime_threads(threads, only_active, |tid| realtime.contains(&tid.0))
        };
        assert!(found(&[10], 0..1, true));
        assert!(found(&[9; 100], 0..100, true), "90 % of a core in small parts");
        assert!(!found(&[9, 1000], 0..1, true), "the other thread has no real-time priority");
        assert!(!found(&[9], 0..1, true));
        assert!(found(&[0], 0..1, false) && !found(&[1000], 0..0, false));
    }
}
