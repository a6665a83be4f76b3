//! Asking a warden that runs what it knows, so that the doctor goes on from its books: jobs that were registered, and
//! their members, can't be found by looking.

use std::collections::BTreeMap;
use std::time::Duration;

use pjw_core::cpuset::CpuSet;
use pjw_core::diagnosis::{Finding, Severity, WardenSeen};
use pjw_core::job::{Grant, GrantedBy, Job, JobId, Lifetime, Request};
use pjw_core::membership::Evidence;
use pjw_core::process::{Pid, ProcessId, StartTime, Uid};
use pjw_core::record::Record;
use pjw_core::snapshot::{Nanos, UnixMillis};
use pjw_ipc::client::{Client, ConnectFault};
use pjw_ipc::wire;

use super::super::{Nothing, Warden, show, status};
use super::absent;

/// A warden that hangs is a finding; nobody should wait half a minute for it.
const PATIENCE: Duration = Duration::from_secs(5);
/// Of more jobs than this the members are not asked for.
const MOST_JOBS: usize = 256;
/// Warnings that say a promise is not kept for now.
const ALARMS: [&str; 5] = ["overlap", "unserved", "audit", "violation", "unconfined"];

/// What a warden told.
pub(super) struct Answer {
    pub(super) warden: WardenSeen,
    /// Its jobs and their members.
    pub(super) books: Vec<Record>,
    /// The PUs it keeps each job on.
    pub(super) held: BTreeMap<JobId, CpuSet>,
    /// How.
    pub(super) kept_by: BTreeMap<JobId, String>,
    pub(super) housekeeping: CpuSet,
}

impl Answer {
    fn none(warden: WardenSeen) -> Self {
        Self {
            warden,
            books: Vec::new(),
            held: BTreeMap::new(),
            kept_by: BTreeMap::new(),
            housekeeping: CpuSet::new(),
        }
    }
}

/// Asks, if one runs or somebody named its socket.
pub(super) fn warden(warden: &Warden, runs: bool) -> Answer {
    if !runs && warden.told().is_none() {
        return Answer::none(absent());
    }
    let mut client = match Client::connect_within(&warden.path(), PATIENCE) {
        Ok(client) => client,
        Err(fault @ ConnectFault::NotRunning { .. }) => {
            return Answer::none(WardenSeen::Absent(fault.to_string()));
        }
        Err(fault) => return Answer::none(WardenSeen::Mute(fault.to_string())),
    };
    match client.call::<status::Reply>("GetStatus", &Nothing {}) {
        Ok(status::Reply { status }) => answer(&mut client, &status),
        Err(fault) => Answer::none(WardenSeen::Mute(fault.to_string())),
    }
}

fn answer(client: &mut Client, status: &wire::Status) -> Answer {
    let seen = WardenSeen::Answers {
        version: status.version.clone(),
        own_version: env!("CARGO_PKG_VERSION").to_owned(),
        observes: status.mode == "observe",
        warnings: status.warnings.iter().map(warning).collect(),
    };
    let mut answer = Answer::none(seen);
    answer.housekeeping = status.pool.housekeeping.parse().unwrap_or_default();
    for (n, job) in status.jobs.iter().enumerate() {
        // A job of a source that this version doesn't know can't be told apart from others by it.
        let Ok(id) = job.id.parse::<JobId>() else { continue };
        answer.books.push(Record::Job(known_job(&id, job)));
        if job.enforcement != "none" && job.granted_by == "warden" {
            answer.held.insert(id.clone(), job.cpus.parse().unwrap_or_default());
        }
        answer.kept_by.insert(id.clone(), job.enforcement.clone());
        // Who ended meanwhile has no members.
        let story = (n < MOST_JOBS).then(|| show::read(client, job.id.clone()).ok()).flatten();
        answer.books.extend(story.iter().flat_map(|story| &story.members).map(|member| joined(&id, member)));
    }
    answer
}

fn known_job(id: &JobId, job: &wire::Job) -> Job {
    // It has been there already: only the warden ends it.
    let mut known = Job::new(id.clone(), Uid(job.owner), Lifetime::Reservation, UnixMillis::default());
    known.request = (job.requested_cores > 0).then(|| Request::cores(job.requested_cores));
    known.let_go = job.state == "released";
    let cpus: CpuSet = job.cpus.parse().unwrap_or_default();
    known.grant = (!cpus.is_empty()).then(|| Grant {
        cpus,
        granted_by: if job.granted_by == "scheduler" { GrantedBy::Scheduler } else { GrantedBy::Warden },
        shared: job.shared,
        by_pus: true,
        since: Nanos::default(),
        because: Vec::new(),
        runner_up: String::new(),
    });
    known
}

fn joined(job: &JobId, member: &wire::Member) -> Record {
    let evidence = match member.evidence.as_str() {
        "cgroup" => Evidence::Cgroup,
        "parent" => Evidence::Parent,
        "session" => Evidence::Session,
        "environment" => Evidence::Environment,
        "adopted" => Evidence::Adopted,
        _ => Evidence::Registered,
    };
    let process = ProcessId { pid: Pid(member.pid), start: StartTime(member.start_time) };
    Record::Joined { process, job: job.clone(), evidence, inherited: None, met: None }
}

fn warning(warning: &wire::Warning) -> Finding {
    let alarming = ALARMS.iter().any(|alarm| warning.code.contains(alarm));
    let severity = if alarming { Severity::Problem } else { Severity::Advice };
    let job = warning.job.parse::<JobId>().ok();
    Finding::new(severity, &warning.code, warning.text.clone(), warning.remedy.clone()).of(job.iter())
}
