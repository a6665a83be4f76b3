//! The requests of hooks to the daemon: register a job, release it, read its grant. All requests end at a deadline.

use std::path::PathBuf;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{anyhow, bail};
use jiff::{SignedDuration, Timestamp};
use nix::unistd::{User, geteuid};
use pjw_core::job::{CpuRequest, JobId};
use pjw_core::{cpuset::CpuSet, ids::Tid};
use pjw_ipc::call::{Assign, GetReports, JobParameter};
use pjw_ipc::client::{Client, ClientError};
use pjw_ipc::report::Report;
use pjw_ipc::wire::{Job, Status};
use pjw_linux::sys::affinity;
use pjw_sources::announcement::{JobAnnouncement, JobOwner};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::commands::connection::{NoParameters, call_for_field};
use crate::output;

/// The socket of the system's daemon. A hook does not use a user's own daemon, because batch jobs belong to the
/// system.
const SOCKET: &str = "/run/pjwd/pjwd.sock";
/// The delay before a request is repeated.
const RETRY_DELAY: Duration = Duration::from_millis(30);
/// How often a task checks its own affinity mask before it requests the status of the daemon again.
const CHECKS_PER_STATUS: u32 = 10;
/// The maximum age of a report of a job that has just ended. An older report belongs to an earlier job with the same
/// id, because a batch system may run a job again.
const NEW_REPORT_AGE: SignedDuration = SignedDuration::from_mins(10);
/// The time that must be left before the deadline when waiting ends, so that the reason can still be printed. If less
/// than ten times as much is left when a call begins, a tenth of the rest.
const REPORT_TIME: Duration = Duration::from_millis(100);

/// A client with which a hook of a batch system calls the daemon. All calls of one hook end at the same deadline.
pub(super) struct HookClient {
    socket: PathBuf,
    deadline: Instant,
}

impl HookClient {
    /// Makes a client for the daemon that listens on `socket`, or on the socket of the system's daemon if `socket` is
    /// `None`. All calls end at `deadline`.
    pub(super) fn new(socket: Option<PathBuf>, deadline: Instant) -> Self {
        let socket = socket.filter(|path| !path.as_os_str().is_empty());
        Self { socket: socket.unwrap_or_else(|| PathBuf::from(SOCKET)), deadline }
    }

    fn time_left(&self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }

    fn may_retry(&self) -> bool {
        self.time_left() > REPORT_TIME + RETRY_DELAY
    }

    /// Connects to the daemon. A call on the connection ends before the deadline: its error names the process that does
    /// not answer.
    fn connect(&self) -> anyhow::Result<Client> {
        let time_left = self.time_left();
        let timeout = time_left - REPORT_TIME.min(time_left / 10);
        Ok(Client::connect_with_timeout(&self.socket, timeout)?)
    }

    /// Calls the method `method` of the daemon with the parameters `request`, and returns the field `field` of the
    /// reply. If the daemon answers that it is busy, repeats the call every [`RETRY_DELAY`], until shortly before the
    /// deadline of the hook.
    ///
    /// # Errors
    /// The outer error if no connection can be made. The inner error if the daemon refuses the call (also if it is
    /// still busy at the end), if no reply arrives, or if the reply can't be parsed.
    fn call<T: DeserializeOwned>(
        &self,
        method: &str,
        request: &impl Serialize,
        field: &str,
    ) -> anyhow::Result<Result<T, ClientError>> {
        loop {
            match call_for_field(&mut self.connect()?, method, request, field) {
                Err(error) if error.is_busy() && self.may_retry() => sleep(RETRY_DELAY),
                reply => return Ok(reply),
            }
        }
    }

    /// Registers the job with the id `job` at the daemon, and requests cores for the job. `cores` is the number of
    /// cores in the command line of the hook. If `cores` is `None`, requests as many cores as the batch system
    /// allocated to the job, according to `announcement`. A second call for the same job has no effect.
    ///
    /// # Errors
    /// If the daemon refuses the request, or if the job got no cores yet.
    pub(super) fn register(
        &self,
        job: &JobId,
        announcement: JobAnnouncement,
        cores: Option<u32>,
    ) -> anyhow::Result<()> {
        let cpu_request = match cores {
            Some(cores) => CpuRequest::Cores(cores),
            None => announcement.cpu_request?,
        };
        let (count, smt) = match cpu_request {
            CpuRequest::Cores(n) => (n, None),
            CpuRequest::Pus(n) => (n, Some("pus".to_owned())),
            CpuRequest::Exactly(cpus) => {
                bail!("{job} names its CPUs ({cpus}), and hooks support only a number of cores")
            }
        };
        let owner = Some(uid_of_owner(&announcement.owner?)?);
        let request = Assign { job: job.to_string(), cores: Some(count), smt, owner, ..Assign::default() };
        let job: Job = self.call("Assign", &request, "job")??;
        if job.cpus.is_empty() {
            return Err(waiting_job_error(&job.id));
        }
        Ok(())
    }

    /// Releases the job in `announcement`, so that its cores become free. Some batch systems give a job two ids: the
    /// daemon can know the job by either of them. Returns no error if the daemon does not know the job.
    pub(super) fn release(&self, announcement: &JobAnnouncement) -> anyhow::Result<()> {
        for job in std::iter::once(&announcement.job).chain(&announcement.alias) {
            let job = job.to_string();
            let reply = self.call::<Value>("Release", &JobParameter { job: job.clone() }, "released")?;
            let was_refused = matches!(reply, Err(ClientError::Refused { .. }));
            if was_refused && self.status()?.jobs.iter().all(|other| other.id != job) {
                continue;
            }
            reply?;
        }
        Ok(())
    }

    /// Returns the daemon's report of the job in `announcement`, which has just ended. `None` if the daemon does not
    /// answer or has no such report. A report of a job that ended more than ten minutes before `now` is ignored,
    /// because it belongs to an earlier job with the same id.
    pub(super) fn report(&self, announcement: &JobAnnouncement, now: Timestamp) -> Option<Report> {
        std::iter::once(&announcement.job).chain(&announcement.alias).find_map(|job| {
            let request = GetReports { job: Some(job.to_string()), last: Some(1) };
            let reports: Vec<Report> = self.call("GetReports", &request, "reports").ok()?.ok()?;
            let is_new = |report: &Report| {
                let ended: Option<Timestamp> = report.ended.parse().ok();
                ended.is_some_and(|ended| now.duration_since(ended) < NEW_REPORT_AGE)
            };
            reports.into_iter().next().filter(is_new)
        })
    }

    fn status(&self) -> anyhow::Result<Status> {
        Ok(self.call("GetStatus", &NoParameters {}, "status")??)
    }

    /// Waits until the job in `announcement` holds cores, and returns the status of the daemon and the job. Returns
    /// `None` if pjwd does not keep the job on its cores, because pjwd only observes (mode `observe`) or because the
    /// job was released.
    ///
    /// # Errors
    /// If the job still has no cores at the deadline of the hook. If pjwd does not know how many cores the job has
    /// (state `observed`). If the status of the daemon can't be read.
    pub(super) fn wait_for_grant(
        &self,
        announcement: &JobAnnouncement,
    ) -> anyhow::Result<Option<(Status, Job)>> {
        let ids: Vec<String> =
            std::iter::once(&announcement.job).chain(&announcement.alias).map(JobId::to_string).collect();
        loop {
            let status = self.status()?;
            let job = status.jobs.iter().find(|job| ids.contains(&job.id)).cloned();
            let state = job.as_ref().map(|job| job.state.clone());
            if status.mode == "observe" || state.as_deref() == Some("released") {
                return Ok(None);
            }
            match job.filter(|job| !job.cpus.is_empty()) {
                Some(job) => return Ok(Some((status, job))),
                None if self.may_retry() && state.as_deref() != Some("observed") => sleep(RETRY_DELAY),
                None => return Err(no_cores_error(&announcement.job, state.as_deref())),
            }
        }
    }

    /// Waits until the job in `announcement` holds cores, and until this process can run only on these cores. Returns
    /// the status of the daemon and the job. Returns `None` if pjwd does not keep the job on its cores, as
    /// [`HookClient::wait_for_grant`] does.
    ///
    /// At the deadline, the job may have its cores while this process can still run on others. The function then
    /// prints a warning, and returns the status and the job all the same.
    ///
    /// # Errors
    /// The errors of [`HookClient::wait_for_grant`].
    pub(super) fn wait_until_confined(
        &self,
        announcement: &JobAnnouncement,
    ) -> anyhow::Result<Option<(Status, Job)>> {
        loop {
            let Some((status, job)) = self.wait_for_grant(announcement)? else { return Ok(None) };
            for _ in 0..CHECKS_PER_STATUS {
                if is_confined(&job) {
                    return Ok(Some((status, job)));
                }
                if !self.may_retry() {
                    output::print_error(&format!(
                        "pjwd has not brought this task to the cores of {} ({}) yet: it starts where it is; \
                         pjwctl show {} tells what keeps it",
                        job.id, job.cpus, job.id
                    ));
                    return Ok(Some((status, job)));
                }
                sleep(RETRY_DELAY);
            }
        }
    }
}

/// Whether this process is confined to the job's cores. True if the process belongs to another user than the job,
/// because such a process is never confined.
fn is_confined(job: &Job) -> bool {
    let grant: CpuSet = job.cpus.parse().unwrap_or_default();
    job.owner != geteuid().as_raw() || own_mask().is_none_or(|mask| mask.is_subset(&grant))
}

/// Returns the affinity mask of the first thread of this process, without offline PUs (logical CPUs). `None` if the
/// mask can't be read.
pub(super) fn own_mask() -> Option<CpuSet> {
    affinity::get_mask(Tid(std::process::id())).ok()
}

/// Returns the error for a hook whose job `job` holds no cores at the deadline. `state` is the state of the job in the
/// status of the daemon. `state` is `None` if the daemon does not know the job.
fn no_cores_error(job: &JobId, state: Option<&str>) -> anyhow::Error {
    match state {
        Some("observed") => {
            anyhow!(
                "pjwd does not know how many cores {job} has: pjwctl status shows the missing information"
            )
        }
        Some(_) => waiting_job_error(&job.to_string()),
        None => anyhow!("pjwd knows no job {job} yet: pjwctl jobs lists the known jobs"),
    }
}

/// Returns the error for a hook whose job waits for free cores. `job` is the id of the job.
fn waiting_job_error(job: &str) -> anyhow::Error {
    anyhow!("{job} has no cores yet: it waits for free cores (pjwctl jobs shows which jobs hold cores)")
}

/// Returns the user id of `owner`. If `owner` is a user name, looks up the name in the user database.
///
/// # Errors
/// If the user does not exist, or if the user database can't be read.
fn uid_of_owner(owner: &JobOwner) -> anyhow::Result<u32> {
    match owner {
        JobOwner::Uid(uid) => Ok(uid.0),
        JobOwner::Name(name) => match User::from_name(name) {
            Ok(Some(user)) => Ok(user.uid.as_raw()),
            Ok(None) => bail!("there is no user {name:?} on this node: getent passwd lists the users"),
            Err(errno) => {
                bail!("the user {name:?} can't be looked up: {errno}; getent passwd lists the users")
            }
        },
    }
}
