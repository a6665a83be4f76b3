//! Reads the state of a running daemon, so that the doctor knows the registered jobs and their members. A scan of the
//! node alone cannot find these.

use std::collections::BTreeMap;
use std::time::Duration;

use pjw_core::diagnosis::{DaemonStatus, Finding, LendingStatus, OrphanedJob, Severity, is_daemon_failure};
use pjw_core::ids::{Pid, ProcessId, StartTime, Uid};
use pjw_core::job::{EndCondition, Grant, GrantedBy, Job, JobId, JobRequest, Ownership};
use pjw_core::record::{JobMembership, Record};
use pjw_core::time::{Nanos, UnixMillis};
use pjw_core::{cpuset::CpuSet, evidence::MembershipEvidence};
use pjw_ipc::client::{Client, ConnectError};
use pjw_ipc::{service_commands, wire};

use crate::render::status::is_alarming;

use super::super::connection::{DaemonAddress, read_status};
use super::super::show;

/// The time limit for the connection to the daemon, and for each call. A daemon that hangs is a finding, and the user
/// should not wait for half a minute to see this finding.
const TIMEOUT: Duration = Duration::from_secs(5);
/// The maximum number of jobs whose members are read.
const MAX_JOBS: usize = 256;

/// The state of the daemon pjwd that `pjwctl doctor` uses: whether pjwd runs, its jobs and their processes, and the PUs
/// (logical CPUs) of each job.
pub(super) struct DaemonState {
    /// Whether the daemon runs and replies, and what it says about itself.
    pub(super) status: DaemonStatus,
    /// The jobs of the daemon and their members.
    pub(super) records: Vec<Record>,
    /// The PUs of each job that the daemon confines.
    pub(super) held: BTreeMap<JobId, CpuSet>,
    /// How each job is kept on its PUs.
    pub(super) kept_by: BTreeMap<JobId, String>,
    /// The PUs that are reserved for the system.
    pub(super) housekeeping: CpuSet,
}

impl DaemonState {
    /// Makes the state of a daemon of which no job is known.
    fn without_jobs(status: DaemonStatus) -> Self {
        Self {
            status,
            records: Vec::new(),
            held: BTreeMap::new(),
            kept_by: BTreeMap::new(),
            housekeeping: CpuSet::new(),
        }
    }

    /// Adds jobs whose pjwd has ended, so that the doctor knows their processes and PUs. Returns the added jobs. A job
    /// with the id of a job of the running daemon is left out: this daemon keeps it. The processes of a batch system's
    /// job are not added, because the scan recognises them.
    pub(super) fn add_orphaned_jobs(&mut self, mut orphaned_jobs: Vec<OrphanedJob>) -> Vec<OrphanedJob> {
        orphaned_jobs.retain(|orphaned| !self.kept_by.contains_key(&orphaned.id));
        for orphaned in &orphaned_jobs {
            self.held.insert(orphaned.id.clone(), orphaned.cpus.clone());
            if orphaned.id.source().is_batch_system() {
                continue;
            }
            let mut job =
                Job::new(orphaned.id.clone(), orphaned.owner, EndCondition::Timeout, UnixMillis::default());
            job.grant = observed_grant(orphaned.cpus.clone(), GrantedBy::Warden, false);
            self.records.push(Record::Job(job));
            let membership = |&process: &ProcessId| {
                membership_record(&orphaned.id, process, MembershipEvidence::Registered)
            };
            self.records.extend(orphaned.processes.iter().map(membership));
        }
        orphaned_jobs
    }
}

/// Requests the state of the daemon. `runs` says whether a process `pjwd` was found.
///
/// - If `runs` is false and the option `--socket` was not given, or if nobody listens on the socket, the result says
///   that no daemon runs.
/// - If the connection or the call fails for another reason, for example because the daemon does not reply within
///   [`TIMEOUT`], the result says that the daemon does not respond.
pub(super) fn read_daemon_state(daemon: &DaemonAddress, runs: bool) -> DaemonState {
    if !runs && daemon.socket_option().is_none() {
        return DaemonState::without_jobs(not_running_status());
    }
    let mut client = match Client::connect_with_timeout(&daemon.path(), TIMEOUT) {
        Ok(client) => client,
        Err(error @ ConnectError::NotRunning { .. }) => {
            return DaemonState::without_jobs(DaemonStatus::Absent(error.to_string()));
        }
        Err(error) => return DaemonState::without_jobs(DaemonStatus::Unresponsive(error.to_string())),
    };
    match read_status(&mut client) {
        Ok(status) => daemon_state_from_status(&mut client, &status),
        Err(error) => DaemonState::without_jobs(DaemonStatus::Unresponsive(error.to_string())),
    }
}

/// Returns the state of a daemon that replied with `status`. Requests the processes of the first [`MAX_JOBS`] jobs from
/// the daemon. Leaves out a job whose id pjwctl can't parse.
fn daemon_state_from_status(client: &mut Client, status: &wire::Status) -> DaemonState {
    let daemon = DaemonStatus::Responsive {
        pid: Pid(status.pid),
        version: status.version.clone(),
        own_version: env!("CARGO_PKG_VERSION").to_owned(),
        observes: status.mode == "observe",
        warnings: status.warnings.iter().map(|warning| finding_from_warning(warning, &status.jobs)).collect(),
        lending: status.lending.as_ref().map(lending_status).unwrap_or_default(),
    };
    let mut state = DaemonState::without_jobs(daemon);
    state.housekeeping = status.pool.housekeeping.parse().unwrap_or_default();
    for (index, job) in status.jobs.iter().enumerate() {
        // A job of a source that this version does not know has no valid id here.
        let Ok(id) = job.id.parse::<JobId>() else { continue };
        state.records.push(Record::Job(job_from_wire(&id, job)));
        if job.enforcement != "none" && job.granted_by == "warden" {
            state.held.insert(id.clone(), job.cpus.parse().unwrap_or_default());
        }
        state.kept_by.insert(id.clone(), job.enforcement.clone());
        // A job that ended in the meantime has no members.
        let read_details = || show::read_job_details(client, job.id.clone()).ok();
        let details = (index < MAX_JOBS).then(read_details).flatten();
        let members = details.iter().flat_map(|details| &details.members);
        state.records.extend(members.map(|member| membership_from_wire(&id, member)));
    }
    state
}

/// Returns the status of lending that a running pjwd reports.
fn lending_status(lending: &wire::Lending) -> LendingStatus {
    if !lending.why_not.is_empty() {
        return LendingStatus::Off(lending.why_not.clone());
    }
    match lending.demand.as_str() {
        "reported" => LendingStatus::WithWakeupReports,
        "sampled" => LendingStatus::WithCpuTimeSamples(lending.why_sampled.clone()),
        _ => LendingStatus::Unknown,
    }
}

/// Makes the job for the diagnosis from `reported`, its description in the status of pjwd. Properties that the status
/// does not have get default values.
fn job_from_wire(id: &JobId, reported: &wire::Job) -> Job {
    // The doctor must not end a job of which it finds no process. So the job counts as a reservation. Only a released
    // job ends nevertheless: the daemon keeps it only for its processes.
    let mut job = Job::new(id.clone(), Uid(reported.owner), EndCondition::Timeout, UnixMillis::default());
    job.request =
        (reported.requested_cores > 0).then(|| JobRequest::with_core_count(reported.requested_cores));
    job.was_released = reported.state == "released";
    let granted_by =
        if reported.granted_by == "scheduler" { GrantedBy::Scheduler } else { GrantedBy::Warden };
    job.grant = observed_grant(reported.cpus.parse().unwrap_or_default(), granted_by, reported.shared);
    job
}

/// Makes the grant of a job that holds the PUs `cpus`. `None` if it holds none. Properties that the doctor does not
/// know get default values.
fn observed_grant(cpus: CpuSet, granted_by: GrantedBy, is_shared: bool) -> Option<Grant> {
    (!cpus.is_empty()).then(|| Grant {
        cpus,
        granted_by,
        is_shared,
        may_split_cores: true,
        granted_at: Nanos::default(),
        reasons: Vec::new(),
        second_best: String::new(),
        ownership: Ownership::Owned,
    })
}

/// Makes the record that a process belongs to the job `job`. `member` is the description of the process that pjwd
/// returned.
fn membership_from_wire(job: &JobId, member: &wire::Member) -> Record {
    let evidence = match member.evidence.as_str() {
        "cgroup" => MembershipEvidence::Cgroup,
        "parent" => MembershipEvidence::Parent,
        "session" => MembershipEvidence::Session,
        "environment" => MembershipEvidence::Environment,
        "adopted" => MembershipEvidence::Adopted,
        _ => MembershipEvidence::Registered,
    };
    let process = ProcessId { pid: Pid(member.pid), start: StartTime(member.start_time) };
    membership_record(job, process, evidence)
}

/// Makes the record that `process` belongs to the job `job`, by the evidence `evidence`.
fn membership_record(job: &JobId, process: ProcessId, evidence: MembershipEvidence) -> Record {
    Record::Joined(JobMembership {
        process,
        job: job.clone(),
        evidence,
        inherited_mask: None,
        first_seen: None,
    })
}

/// Makes a finding of the diagnosis from a warning of pjwd. `jobs` are the jobs in the status of pjwd.
fn finding_from_warning(warning: &wire::Warning, jobs: &[wire::Job]) -> Finding {
    let severity = severity_of_warning(warning, jobs);
    let job = warning.job.parse::<JobId>().ok();
    Finding::new(severity, &warning.code, warning.text.clone(), warning.remedy.clone()).with_jobs(job.iter())
}

/// Returns the severity of a warning of pjwd. `jobs` are the jobs in the status of pjwd. The warning is a problem if
/// pjwd fails as a whole or breaks a promise, else advice. A job without a process that waits for cores is no problem:
/// it runs nothing on the cores of other jobs.
fn severity_of_warning(warning: &wire::Warning, jobs: &[wire::Job]) -> Severity {
    let is_without_process = jobs.iter().any(|job| job.id == warning.job && job.processes == 0);
    let only_waits = warning.code == "unserved" && is_without_process;
    if is_daemon_failure(&warning.code) || (is_alarming(warning) && !only_waits) {
        Severity::Problem
    } else {
        Severity::Advice
    }
}

/// Returns the status of a daemon that does not run, with the command that starts it.
fn not_running_status() -> DaemonStatus {
    DaemonStatus::Absent(format!(
        "pjwd is not running; start it with: {}",
        service_commands::pjwd_start_commands()
    ))
}

#[cfg(test)]
mod tests {
    use pjw_core::own_cgroups::OwnCgroupNames;
    use pjw_core::testing::cpu_set;

    use super::*;

    #[test]
    fn jobs_of_an_ended_daemon_are_added_unless_the_running_daemon_has_such_a_job() {
        let orphaned = |id: &str, pid| OrphanedJob {
            id: id.parse().unwrap(),
            owner: Uid(1001),
            daemon: OwnCgroupNames::default(),
            cgroup: format!("/pjw/{id}"),
            cpus: cpu_set("1"),
            processes: vec![ProcessId { pid: Pid(pid), start: StartTime(1) }],
        };
        let mut state = DaemonState::without_jobs(not_running_status());
        state.kept_by.insert("known".parse().unwrap(), "cpuset".to_owned());
        let found = vec![orphaned("known", 7), orphaned("slurm:8", 8), orphaned("n1", 9)];
        let added = state.add_orphaned_jobs(found);
        let added: Vec<String> = added.iter().map(|job| job.id.to_string()).collect();
        assert_eq!(added, ["slurm:8", "manual:n1"], "the running daemon keeps the other one");
        let mut held: Vec<String> = state.held.keys().map(ToString::to_string).collect();
        held.sort();
        assert_eq!(held, ["manual:n1", "slurm:8"]);
        let [Record::Job(job), Record::Joined(membership)] = state.records.as_slice() else {
            panic!("{:?}", state.records)
        };
        assert_eq!((job.id.to_string(), job.owner), ("manual:n1".to_owned(), Uid(1001)));
        assert_eq!(job.grant.as_ref().map(|grant| grant.cpus.clone()), Some(cpu_set("1")));
        assert_eq!((membership.process.pid, &membership.job), (Pid(9), &job.id));
    }

    #[test]
    fn a_failure_of_pjwd_is_a_problem_and_a_job_that_only_waits_is_none() {
        let job = |id: &str, processes| wire::Job { id: id.to_owned(), processes, ..wire::Job::default() };
        let jobs = [job("manual:waits", 0), job("manual:runs", 2)];
        for (code, job, expected) in [
            ("journal", "", Severity::Problem),
            ("cpuset-thread", "", Severity::Problem),
            ("unserved", "manual:waits", Severity::Advice),
            ("unserved", "manual:runs", Severity::Problem),
            ("unserved", "manual:unknown", Severity::Problem),
            ("overlap", "manual:waits", Severity::Problem),
            ("beside", "", Severity::Advice),
        ] {
            let (code, job) = (code.to_owned(), job.to_owned());
            let warning = wire::Warning { code, job, ..wire::Warning::default() };
            assert_eq!(finding_from_warning(&warning, &jobs).severity, expected, "{warning:?}");
        }
    }
}
