//! Replays a curve of demand through the decisions of the warden.
//!
//! Each owner is a job of the class guaranteed. One job of the class besteffort wants every core. The decisions are
//! those of [`reconcile`], which here knows the use of the cores at once. The daemon samples the use. An owner goes
//! before the besteffort job on each core that the owner owns: the besteffort job gets what the owner leaves of a lent
//! core.

use std::collections::BTreeMap;
use std::time::Duration;

use pjw_core::command::{AssignCommand, Caller, Command, Reply};
use pjw_core::cpuset::CpuSet;
use pjw_core::cpuset_group::{CpusetHierarchy, CpusetSupport, IdlePrioritySupport};
use pjw_core::ids::Uid;
use pjw_core::job::{CpuRequest, JobId, JobSource, PriorityClass};
use pjw_core::lending::would_change_loans;
use pjw_core::policy::{ExhaustionPolicy, LendingPolicy, Policy};
use pjw_core::reconcile::reconcile;
use pjw_core::refusal::Refusal;
use pjw_core::scan::ScanScope;
use pjw_core::snapshot::Snapshot;
use pjw_core::state::WardenState;
use pjw_core::state::lending::{CoreUse, OwnerCpuSample};
use pjw_core::time::{Moment, Nanos, UnixMillis};
use pjw_core::topology::Topology;
use thiserror::Error;

use super::curve::{CurveOwner, DemandCurve, DemandPoint};

/// The time between two decisions about lending: the daemon's interval while a core is lent.
const STEP: Duration = Duration::from_millis(10);
/// The length of the sample by which the daemon gets to know a demand. The sample is much longer than the 100 ms over
/// which the daemon averages, so that the average is the demand.
const SAMPLE_PERIOD: Duration = Duration::from_secs(100);
/// The source of the besteffort job, which wants every core. No owner has this source, so the names of owners can't
/// clash with the name of this job.
const BESTEFFORT_SOURCE: JobSource = JobSource::Session;

/// The options of a replay of a curve of CPU demand: the PUs (logical CPUs) that are reserved for the system, and the
/// settings of lending. In the replay, the jobs of the curve lend the cores that they do not use. One additional job,
/// the besteffort job, has no cores of its own. It uses the lent cores and the free cores.
#[derive(Debug, Clone)]
pub struct DemandReplayOptions {
    /// The housekeeping PUs, which are reserved for the system. No job gets one of these PUs.
    pub housekeeping_cpus: CpuSet,
    /// The settings of lending: whether and when jobs lend the cores that they do not use. If lending is disabled, the
    /// besteffort job (the additional job without cores of its own) still uses the free cores.
    pub lending: LendingPolicy,
}

/// The result of a replay of a curve of CPU demand: the core time that each job used, and the core time for which
/// each owner lent cores. Core time is a number of cores multiplied by a time. Each job of the curve is an owner: the
/// job owns cores, and lends the cores that it does not use. One additional job, the besteffort job, has no cores of
/// its own. It uses the lent cores and the free cores.
///
/// The lent core time is recorded for each owner ([`OwnerTotals::lent_core_s`]). There is no total over all owners.
#[derive(Debug, Clone, PartialEq)]
pub struct DemandReplayResult {
    /// The result for each owner, in the order of the curve.
    pub owners: Vec<OwnerTotals>,
    /// The number of cores of the machine that jobs can use: all except those of the housekeeping PUs.
    pub usable_cores: u32,
    /// The time from the first point of the curve to the last.
    pub duration: Duration,
    /// The core time that the besteffort job used, in core seconds (one core for one second). This job uses free and
    /// lent cores.
    pub besteffort_core_s: f64,
}

/// What one owner used and lent in a replay of a curve of CPU demand. An owner is a job that owns cores, and
/// lends the cores that it does not use. Core time is a number of cores multiplied by a time, in core seconds
/// (one core for one second).
#[derive(Debug, Clone, PartialEq)]
pub struct OwnerTotals {
    /// The id of the owner, and the number of cores that it owns.
    pub owner: CurveOwner,
    /// The core time that the owner used, in core seconds.
    pub used_core_s: f64,
    /// The core time for which cores of the owner were lent, in core seconds.
    pub lent_core_s: f64,
    /// The number of times that a core was lent. If two cores are lent at the same time, both count.
    pub loans: u64,
    /// The number of times that a lent core was taken back. If two cores are taken back at the same time, both count.
    pub revocations: u64,
}

/// Error: a curve of CPU demand can't be replayed on a machine, because pjw refuses to give a job of the replay
/// its cores. The usual reason is that the machine has too few cores. Contains the job and the reason.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{job} can't have {cores} core{}: {}", if *cores == 1 { "" } else { "s" }, why_refused(*requested_cores, *usable_cores, refusal))]
pub struct JobRefused {
    /// The name of the job.
    pub job: String,
    /// The number of cores that the curve gives to the job.
    pub cores: u32,
    /// The sum of the cores that the curve gives to all of its jobs.
    pub requested_cores: u64,
    /// The number of whole cores that jobs can have on the machine.
    pub usable_cores: u32,
    /// The reason why pjw refuses these cores.
    pub refusal: Refusal,
}

/// Returns the reason of a refusal, for the message. A shortage of cores is described by the curve and the machine. The
/// text of the refusal itself names commands of a running pjwd as remedies, and a replay has no other jobs that could
/// be released.
fn why_refused(requested: u64, usable: u32, refusal: &Refusal) -> String {
    if requested <= u64::from(usable) {
        return refusal.to_string();
    }
    format!(
        "the curve asks for {requested} cores in total, and the machine has {usable} for jobs: lower the numbers of \
         cores in the curve, or take a larger machine"
    )
}

/// Replays `curve`, a curve of CPU demand, on a simulated machine with the topology `topology`. Each job of the curve
/// is an owner: the job owns cores, and uses as many cores as the curve says. An owner can lend its other cores. The
/// replay adds one job without cores of its own, the besteffort job, which uses all lent and all free cores. Returns
/// the core time (number of cores multiplied by time) that each job used. `options` contains the PUs (logical CPUs)
/// that are reserved for the system, and the settings of lending. The same arguments always give the same result.
///
/// # Errors
/// If pjw refuses to give a job its cores, usually because the machine has too few cores.
pub fn replay_demand(
    topology: &Topology,
    curve: &DemandCurve,
    options: &DemandReplayOptions,
) -> Result<DemandReplayResult, JobRefused> {
    let mut machine = Machine::new(topology, options);
    let usable_cores = topology.whole_core_count(&machine.state.pool.free_cpus());
    let requested_cores = curve.owners.iter().map(|owner| u64::from(owner.cores)).sum();
    let refused = |job: &JobId, cores: u32, refusal: Refusal| {
        let job = job.name().to_owned();
        JobRefused { job, cores, requested_cores, usable_cores, refusal }
    };
    let begin = curve.points.first().map_or(Duration::ZERO, |point| point.time);
    for owner in &curve.owners {
        let assigned = machine.assign(begin, &owner.job, owner.cores, PriorityClass::Guaranteed);
        assigned.map_err(|refusal| refused(&owner.job, owner.cores, refusal))?;
    }
    let besteffort = JobId::new(BESTEFFORT_SOURCE, "besteffort");
    if let Ok(job) = &besteffort {
        let assigned = machine.assign(begin, job, usable_cores, PriorityClass::Besteffort);
        assigned.map_err(|refusal| refused(job, usable_cores, refusal))?;
    }
    let mut result = DemandReplayResult {
        owners: curve.owners.iter().map(OwnerTotals::new).collect(),
        usable_cores,
        duration: Duration::ZERO,
        besteffort_core_s: 0.0,
    };
    for (point, next) in curve.points.iter().zip(curve.points.iter().skip(1)) {
        machine.set_demand(point, &curve.owners);
        let mut now = point.time;
        while now < next.time {
            if machine.would_change_loans(now) {
                machine.run_cycle(now, &[]);
                machine.count_moves(&mut result.owners);
            }
            let until = machine.next_decision(now, next.time).unwrap_or(next.time);
            machine.add_core_time(point, until - now, &mut result);
            now = until;
        }
    }
    Ok(result)
}

/// The state of the warden on the replayed machine. No process runs there, so no mask and no cpuset is changed.
struct Machine {
    state: WardenState,
    policy: Policy,
    /// The number of lent cores of each owner at the last call of [`Machine::count_moves`].
    lent: BTreeMap<JobId, u32>,
}

impl Machine {
    /// Makes a machine without jobs. All its cores can be granted, except those in `options.housekeeping_cpus`.
    fn new(topology: &Topology, options: &DemandReplayOptions) -> Self {
        let cpuset_support = CpusetSupport {
            hierarchy: CpusetHierarchy::Unified,
            affinity_persists: true,
            idle_priority: IdlePrioritySupport::Available,
            can_freeze: true,
        };
        let policy = Policy {
            housekeeping_cpus: options.housekeeping_cpus.clone(),
            lending: LendingPolicy { lends_to_empty_jobs: true, ..options.lending.clone() },
            exhaustion_policy: ExhaustionPolicy::Refuse,
            cpuset_support,
            // A job without processes ends after this time.
            reservation_timeout: Duration::MAX,
            ..Policy::default()
        };
        let state = WardenState::new(topology.clone(), &options.housekeeping_cpus);
        Self { state, policy, lent: BTreeMap::new() }
    }

    /// Assigns `cores` cores of the class `class` to the job `job` at the time `now`, as the command of an
    /// administrator. Returns the error if the daemon refuses the command.
    fn assign(
        &mut self,
        now: Duration,
        job: &JobId,
        cores: u32,
        class: PriorityClass,
    ) -> Result<(), Refusal> {
        let caller = Caller { uid: Uid::ROOT, is_admin: true };
        let command = AssignCommand {
            cpu_request: Some(CpuRequest::Cores(cores)),
            class: Some(class),
            ..AssignCommand::new(job.clone(), caller)
        };
        let replies = self.run_cycle(now, &[Command::Assign(command)]);
        replies.into_iter().find_map(Result::err).map_or(Ok(()), Err)
    }

    /// Makes one decision of the warden at the time `now`, on a machine without processes and cgroups. Returns the
    /// reply to each of `commands`, or its refusal.
    fn run_cycle(&mut self, now: Duration, commands: &[Command]) -> Vec<Result<Reply, Refusal>> {
        let (taken_at, online) = (
            Moment { since_boot: nanos(now), wall_clock: UnixMillis(0) },
            self.state.topology.cpus().clone(),
        );
        let snapshot = Snapshot::of_processes(ScanScope::Full, taken_at, online, BTreeMap::new());
        reconcile(&mut self.state, &snapshot, commands, &self.policy).replies
    }

    /// Tells the warden what each owner uses from now on.
    fn set_demand(&mut self, point: &DemandPoint, owners: &[CurveOwner]) {
        let has_smt = self.state.topology.cpus().len() > self.state.topology.cores().len();
        for (owner, cores_used) in owners.iter().zip(&point.cores_used) {
            let cpu_time = SAMPLE_PERIOD.mul_f64(*cores_used);
            let sample = OwnerCpuSample { period: SAMPLE_PERIOD, cpu_time, lent: &[], has_smt };
            let used = CoreUse::default().add(&sample);
            self.state.lending.record_use(&owner.job, used, owner.cores, nanos(point.time));
        }
    }

    fn would_change_loans(&self, now: Duration) -> bool {
        would_change_loans(&self.state, &self.policy, nanos(now))
    }

    /// Returns the first time at which the daemon would lend cores or take them back. The time is after `now` and
    /// before `end`, in steps of [`STEP`]. Returns `None` if there is no such time. The demand must not change in
    /// this interval: a change of loans that is due at one time is then due at each later time. So the time is found
    /// by bisection.
    fn next_decision(&self, now: Duration, end: Duration) -> Option<Duration> {
        let is_due = |steps: u32| self.would_change_loans(now + STEP * steps);
        let steps = (end - now).as_nanos().saturating_sub(1) / STEP.as_nanos();
        let (mut not_due, mut due) = (0, u32::try_from(steps).unwrap_or(u32::MAX));
        if due == 0 || !is_due(due) {
            return None;
        }
        while due - not_due > 1 {
            let middle = not_due + (due - not_due) / 2;
            if is_due(middle) { due = middle } else { not_due = middle }
        }
        Some(now + STEP * due)
    }

    fn lent_cores(&self, owner: &JobId) -> u32 {
        let pool = &self.state.pool;
        self.state.topology.whole_core_count(&pool.pus_of(owner).intersection(&pool.lent_cpus()))
    }

    /// Adds the numbers of cores that were lent and taken back since the last call to the totals of the owners.
    fn count_moves(&mut self, owners: &mut [OwnerTotals]) {
        for totals in owners {
            let lent = self.lent_cores(&totals.owner.job);
            let before = self.lent.insert(totals.owner.job.clone(), lent).unwrap_or(0);
            totals.loans += u64::from(lent.saturating_sub(before));
            totals.revocations += u64::from(before.saturating_sub(lent));
        }
    }

    /// Adds to `result` the core time of the time `period`, in which nothing changes. Core time is a number of cores
    /// multiplied by a time. For each owner, adds the time of its lent cores, and of the cores that it uses according
    /// to `point`. For the besteffort job, adds the time of the free cores, and of the lent cores that the owners do
    /// not use.
    fn add_core_time(&self, point: &DemandPoint, period: Duration, result: &mut DemandReplayResult) {
        let seconds = period.as_secs_f64();
        let free = self.state.topology.whole_core_count(&self.state.pool.free_cpus());
        let mut besteffort_cores = f64::from(free);
        for (totals, used) in result.owners.iter_mut().zip(&point.cores_used) {
            let lent = f64::from(self.lent.get(&totals.owner.job).copied().unwrap_or(0));
            totals.lent_core_s += lent * seconds;
            totals.used_core_s += used * seconds;
            besteffort_cores += lent.min(f64::from(totals.owner.cores) - used);
        }
        result.besteffort_core_s += besteffort_cores * seconds;
        result.duration += period;
    }
}

fn nanos(time: Duration) -> Nanos {
    Nanos(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX))
}

impl DemandReplayResult {
    /// Returns the utilisation of the machine in the replay, from 0 to 1: the core time that all jobs used,
    /// divided by the core time that they could have used. Core time is a number of cores multiplied by a time.
    /// Jobs could have used [`DemandReplayResult::usable_cores`] cores for the whole time of the replay. Returns 0 if
    /// jobs can use no core.
    #[must_use]
    pub fn utilisation(&self) -> f64 {
        let used: f64 = self.owners.iter().map(|totals| totals.used_core_s).sum();
        let possible = f64::from(self.usable_cores) * self.duration.as_secs_f64();
        if possible > 0.0 { (used + self.besteffort_core_s) / possible } else { 0.0 }
    }
}

impl OwnerTotals {
    fn new(owner: &CurveOwner) -> Self {
        Self { owner: owner.clone(), used_core_s: 0.0, lent_core_s: 0.0, loans: 0, revocations: 0 }
    }
}

#[cfg(test)]
mod tests;
