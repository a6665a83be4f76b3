//! What hooks ask of the daemon: to register a job, to let it go, to tell what it has. All of it until a deadline.

use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{anyhow, bail};
use nix::unistd::{User, geteuid};
use pjw_core::cpuset::CpuSet;
use pjw_core::job::{Amount, JobId};
use pjw_ipc::call::{Assign, JobName};
use pjw_ipc::client::{Client, ClientFault};
use pjw_ipc::wire::{Job, Status};
use pjw_sources::announcement::{Announcement, Owner};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::variables::own_mask;
use crate::commands::{Nothing, assign, status};
use crate::output;

/// The system's daemon. A hook doesn't look for a user's own: the jobs are the system's.
const SOCKET: &str = "/run/pjwd/pjwd.sock";
/// How long to wait before asking again.
const PAUSE: Duration = Duration::from_millis(30);
/// How often a task looks whether it is on its cores before it asks again which they are.
const PAUSES_PER_QUESTION: u32 = 10;
/// So long before the deadline it is time to give up, and to say why.
const LAST_WORDS: Duration = Duration::from_millis(100);

/// Where the daemon is, and until when it is asked.
pub(super) struct Desk {
    socket: PathBuf,
    until: Instant,
}

impl Desk {
    pub(super) fn new(socket: Option<PathBuf>, until: Instant) -> Self {
        let told = socket.filter(|path| !path.as_os_str().is_empty());
        Self { socket: told.unwrap_or_else(|| Path::new(SOCKET).to_owned()), until }
    }

    fn left(&self) -> Duration {
        self.until.saturating_duration_since(Instant::now())
    }

    fn may_ask_again(&self) -> bool {
        self.left() > LAST_WORDS + PAUSE
    }

    fn connect(&self) -> anyhow::Result<Client> {
        Ok(Client::connect_within(&self.socket, self.left())?)
    }

    /// Asks, and asks again where the daemon only has too much to do.
    fn call<T: DeserializeOwned>(
        &self,
        method: &str,
        wish: &impl Serialize,
    ) -> anyhow::Result<Result<T, ClientFault>> {
        loop {
            match self.connect()?.call(method, wish) {
                Err(ClientFault::Refused { error, .. })
                    if error.ends_with(".Busy") && self.may_ask_again() =>
                {
                    sleep(PAUSE);
                }
                answer => return Ok(answer),
            }
        }
    }

    /// Gives a job its cores, or the count that whoever set up the hook says. Asked again, it changes nothing.
    pub(super) fn register(&self, job: &JobId, told: Announcement, cores: Option<u32>) -> anyhow::Result<()> {
        let amount = match cores {
            Some(cores) => Amount::Cores(cores),
            None => told.amount?,
        };
        let (count, smt) = match amount {
            Amount::Cores(n) => (n, None),
            Amount::Pus(n) => (n, Some("pus".to_owned())),
            Amount::Exactly(cpus) => bail!("{job} names its CPUs ({cpus}), and no hook is given such"),
        };
        let owner = Some(uid(&told.owner?)?);
        let wish = Assign { job: job.to_string(), cores: Some(count), smt, owner, ..Assign::default() };
        let assign::Reply { job } = self.call("Assign", &wish)??;
        if job.cpus.is_empty() {
            bail!(
                "{} has no cores yet: it waits until some come free (pjwctl jobs shows who holds what)",
                job.id
            );
        }
        Ok(())
    }

    /// Lets a job go, by whichever of its ids it is known. One that isn't there is gone already.
    pub(super) fn release(&self, told: &Announcement) -> anyhow::Result<()> {
        for job in std::iter::once(&told.job).chain(&told.alias) {
            let job = job.to_string();
            match self.call::<Value>("Release", &JobName { job: job.clone() })? {
                Err(ClientFault::Refused { .. })
                    if self.status()?.jobs.iter().all(|other| other.id != job) => {}
                answer => drop(answer?),
            }
        }
        Ok(())
    }

    fn status(&self) -> anyhow::Result<Status> {
        let status::Reply { status } = self.call("GetStatus", &Nothing {})??;
        Ok(status)
    }

    /// The job as it holds its cores, with the machine. Waits for them until the deadline if they are still to come;
    /// nothing if nothing is kept anywhere: where the daemon only watches, and where the job was let go.
    pub(super) fn granted(&self, told: &Announcement) -> anyhow::Result<Option<(Status, Job)>> {
        let ids: Vec<String> = std::iter::once(&told.job).chain(&told.alias).map(JobId::to_string).collect();
        loop {
            let status = self.status()?;
            let job = status.jobs.iter().find(|job| ids.contains(&job.id)).cloned();
            let state = job.as_ref().map(|job| job.state.clone());
            if status.mode == "observe" || state.as_deref() == Some("released") {
                return Ok(None);
            }
            match job.filter(|job| !job.cpus.is_empty()) {
                Some(job) => return Ok(Some((status, job))),
                None if self.may_ask_again() && state.as_deref() != Some("observed") => sleep(PAUSE),
                None => return Err(without(&told.job, state.as_deref())),
            }
        }
    }

    /// The same, and waits until this process is on the job's cores: the job's first program is this process later, or its
    /// parent. Behind a cpuset both are inside at once; by masks mostly the parent before its child.
    pub(super) fn seated(&self, told: &Announcement) -> anyhow::Result<Option<(Status, Job)>> {
        loop {
            let Some((status, job)) = self.granted(told)? else { return Ok(None) };
            for _ in 0..PAUSES_PER_QUESTION {
                if is_seated(&job) {
                    return Ok(Some((status, job)));
                }
                if !self.may_ask_again() {
                    output::complain(&format!(
                        "pjwd has not brought this task to the cores of {} ({}) yet: it starts where it is; \
                         pjwctl show {} tells what keeps it",
                        job.id, job.cpus, job.id
                    ));
                    return Ok(Some((status, job)));
                }
                sleep(PAUSE);
            }
        }
    }
}

/// Whether this process may run nowhere but on the job's cores; somebody else's process is never brought there.
fn is_seated(job: &Job) -> bool {
    let grant: CpuSet = job.cpus.parse().unwrap_or_default();
    job.owner != geteuid().as_raw() || own_mask().is_none_or(|mask| mask.is_subset(&grant))
}

fn without(job: &JobId, state: Option<&str>) -> anyhow::Error {
    match state {
        Some("observed") => {
            anyhow!("pjwd does not know how many cores {job} has: pjwctl status tells what is missing")
        }
        Some(_) => anyhow!(
            "{job} has no cores yet: it waits until some come free (pjwctl jobs shows who holds what)"
        ),
        None => anyhow!("pjwd knows no job {job} yet: pjwctl jobs lists those it found"),
    }
}

fn uid(owner: &Owner) -> anyhow::Result<u32> {
    match owner {
        Owner::Uid(uid) => Ok(uid.0),
        Owner::Name(name) => match User::from_name(name) {
            Ok(Some(user)) => Ok(user.uid.as_raw()),
            Ok(None) => bail!("there is no user {name:?} on this node: getent passwd shows who is known"),
            Err(errno) => {
                bail!("the user {name:?} can't be looked up: {errno}; getent passwd shows who is known")
            }
        },
    }
}
