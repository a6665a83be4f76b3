//! The cores that the instances are started on: of a job of the daemon, or of the own affinity mask.

use std::ffi::OsStr;
use std::path::PathBuf;

use anyhow::bail;
use pjw_core::cpu_count_variables::CpuCountVariable;
use pjw_core::cpuset::CpuSet;
use pjw_core::ids::Tid;
use pjw_ipc::call::{Assign, ExplainPid, ExplainPidReply};
use pjw_ipc::client::{Client, ClientError};
use pjw_ipc::wire::Job;
use pjw_linux::sys::affinity;

use crate::cli::{CoreCountArg, SpawnArgs, value_name};
use crate::commands::connection::{
    DaemonAddress, call_persistently, cpu_count_variables, job_directory, parse_job_id, read_status,
};
use crate::commands::run::{self, WaitNotice, make_job};

/// The calling thread, as sched_setaffinity(2) has it.
const THIS_THREAD: Tid = Tid(0);

/// Where the CPUs of a [`Grant`] come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CpuOrigin {
    /// With `--local`: the affinity mask of this process.
    AffinityMask,
    /// The job of a batch system that this process belongs to. The batch system chose the cores.
    BatchSystem,
    /// A job of a user's command, for which pjwd chose the cores.
    Warden,
}

/// The cores on which `pjwctl spawn` starts its instances (processes), and the job that holds these cores.
pub(super) struct Grant {
    pub(super) cpus: CpuSet,
    pub(super) origin: CpuOrigin,
    /// The job, if a daemon knows one.
    pub(super) job: Option<String>,
    /// The directory with the core map of the job, if it is known.
    pub(super) directory: Option<PathBuf>,
    /// The variables that tell an instance the size of its part.
    pub(super) cpu_count_variables: Vec<CpuCountVariable>,
    /// The connection over which the job was made. `None` if it was not made for this command.
    client: Option<Client>,
}

impl Grant {
    /// Makes a job that contains this process, and waits until the job holds cores. `size` is the number of instances,
    /// and also the number of cores if the option `--cores` was not given. `program` is the program after which the job
    /// is named.
    ///
    /// In these cases no job is made, and the instances get the CPUs in the affinity mask of this process:
    ///
    /// - with `--local`,
    /// - if this process belongs to a job of a batch system, and the option `--job` was not given,
    /// - if this process belongs to another job, and neither `--job` nor an option about cores was given.
    ///
    /// # Errors
    /// If pjwd can't be reached, is busy, or refuses the job. If this process belongs to a job of a batch system, and an option
    /// was given that only a job of pjwd can have.
    pub(super) fn obtain(
        daemon: &DaemonAddress,
        request: &SpawnArgs,
        size: u32,
        program: &OsStr,
    ) -> anyhow::Result<Self> {
        if request.local {
            let cpu_count_variables = CpuCountVariable::defaults();
            return Ok(Self {
                cpus: own_mask()?,
                origin: CpuOrigin::AffinityMask,
                job: None,
                directory: None,
                cpu_count_variables,
                client: None,
            });
        }
        let pid = std::process::id();
        let assign = Self::job_request(request, size, program, pid)?;
        let mut notice = WaitNotice::new(program);
        let (mut client, answer) =
            call_persistently(daemon, |client| match make_job(client, &assign, &mut notice) {
                // A busy daemon says nothing about the cores.
                Err(refusal @ ClientError::Refused { .. }) if !refusal.is_busy() => {
                    Ok(Err((refusal, own_job(daemon, client, pid)?)))
                }
                // Instances on the cores of the own job need no new job, so they don't wait.
                Err(refusal) if refusal.is_commands_too_often() => {
                    match own_job(daemon, client, pid)?.filter(|job| uses_own_job(job, request)) {
                        Some(job) => Ok(Err((refusal, Some(job)))),
                        None => Err(refusal),
                    }
                }
                answer => answer.map(Ok),
            })?;
        let (refusal, own_job) = match answer {
            Ok(job) => return Self::of_new_job(daemon, client, job, notice),
            Err(refused) => refused,
        };
        match own_job {
            Some(job) if uses_own_job(&job, request) => {
                if is_batch_system_job(&job) {
                    check_batch_system_options(&job, request)?;
                }
                Self::of_own_job(daemon, &mut client, job)
            }
            // The options ask for other cores than those of the job of this process: it leaves that job for a new one.
            Some(_) if assign.keep_members.is_some() => {
                let assign = Assign { keep_members: None, ..assign };
                // A user has a limited number of connections: this one is not kept beside a new one.
                drop(client);
                let (client, job) =
                    call_persistently(daemon, |client| make_job(client, &assign, &mut notice))?;
                Self::of_new_job(daemon, client, job, notice)
            }
            None if request.cores.is_none() && size > 1 => {
                let why = format!(
                    "spawn -n {size} asks for {size} cores, one for each instance (with fewer, give --cores, and several share)"
                );
                Err(anyhow::Error::from(refusal).context(why))
            }
            _ => Err(refusal.into()),
        }
    }

    /// Returns the request for a new job that contains this process, which has the pid `pid`. `request` has the
    /// command line options. Without a job name there, the name is made from `program` and `pid`. Without a number of
    /// cores there, the job gets `size` cores.
    fn job_request(request: &SpawnArgs, size: u32, program: &OsStr, pid: u32) -> anyhow::Result<Assign> {
        let name = request.job.clone().unwrap_or_else(|| run::default_job_name(program, pid));
        Ok(Assign {
            job: parse_job_id(&name)?,
            cores: request.cores.map_or(Some(size), CoreCountArg::core_count),
            all_cores: (request.cores == Some(CoreCountArg::All)).then_some(true),
            pids: Some(vec![pid]),
            class: request.class.map(|class| value_name(&class)),
            within_job: request.within_job.map(|rule| value_name(&rule)),
            smt: request.cores_unit.map(|smt| value_name(&smt)),
            fresh: Some(true),
            // Without this, a child of a process of a job would leave the job.
            keep_members: request.job.is_none().then_some(true),
            ..Assign::default()
        })
    }

    /// Waits until `job`, a new job that contains this process, holds its cores. Then lets this thread run on all these
    /// cores, and returns them as a grant. After an error, releases the job.
    fn of_new_job(
        daemon: &DaemonAddress,
        mut client: Client,
        job: Job,
        mut notice: WaitNotice<'_>,
    ) -> anyhow::Result<Self> {
        let id = job.id.clone();
        let granted = run::wait_for_cores(daemon, &mut client, job, false, &mut notice);
        match granted.and_then(|cpus| take_whole_grant(&cpus, &id).map(|()| cpus)) {
            Ok(cpus) => {
                let (directory, cpu_count_variables) = directory_and_variables(daemon, &mut client, &id);
                let origin = CpuOrigin::Warden;
                Ok(Self { cpus, origin, job: Some(id), directory, cpu_count_variables, client: Some(client) })
            }
            Err(error) => {
                run::release(&mut client, &id);
                Err(error)
            }
        }
    }

    /// The cores of the job that this process belongs to.
    fn of_own_job(daemon: &DaemonAddress, client: &mut Client, job: String) -> anyhow::Result<Self> {
        let (directory, cpu_count_variables) = directory_and_variables(daemon, client, &job);
        let origin = if is_batch_system_job(&job) { CpuOrigin::BatchSystem } else { CpuOrigin::Warden };
        Ok(Self { cpus: own_mask()?, origin, job: Some(job), directory, cpu_count_variables, client: None })
    }

    /// Releases the job, so that its cores become free. Has no effect if [`Grant::obtain`] made no job.
    pub(super) fn release(self) {
        if let (Some(mut client), Some(job)) = (self.client, self.job) {
            run::release(&mut client, &job);
        }
    }
}

/// Whether the instances are to run on the cores of `id`, the job of this process.
fn uses_own_job(id: &str, request: &SpawnArgs) -> bool {
    let has_core_options = request.cores.is_some()
        || request.class.is_some()
        || request.within_job.is_some()
        || request.cores_unit.is_some();
    request.job.is_none() && (is_batch_system_job(id) || !has_core_options)
}

/// Checks the options for instances on the cores of `id`, the job of a batch system that this process belongs to.
/// `--cores` needs no check here: the parts are then cut from the first cores of the job.
///
/// # Errors
/// If an option was given that only a job of pjwd can have.
fn check_batch_system_options(id: &str, request: &SpawnArgs) -> anyhow::Result<()> {
    let given = [("--class", request.class.is_some()), ("--smt", request.cores_unit.is_some())];
    let Some((option, _)) = given.into_iter().find(|(_, is_given)| *is_given) else { return Ok(()) };
    bail!(
        "{option} has no effect in {id}, whose cores the batch system has chosen: leave {option} out, or submit the \
         job with an option of the batch system"
    )
}

/// Whether the job is one of a batch system. No second job is made for a process of such a job.
fn is_batch_system_job(id: &str) -> bool {
    !id.starts_with("manual:")
}

/// Returns the job of this process, which has the pid `pid`. `None` if the process belongs to no job, or if pjwd
/// answers with an error. May replace the connection `client` by a new one.
///
/// # Errors
/// If pjwd answers that it is busy, also on a new connection.
fn own_job(daemon: &DaemonAddress, client: &mut Client, pid: u32) -> Result<Option<String>, ClientError> {
    let request = ExplainPid { pid, after_tid: None };
    let explain = |client: &mut Client| client.call::<ExplainPidReply>("ExplainPid", &request);
    match call_again_if_disconnected(daemon, client, explain) {
        Ok(reasons) => Ok(reasons.job),
        Err(error) if error.is_busy_before_execution() => Err(error),
        Err(_) => Ok(None),
    }
}

/// Returns the reply to `call` on the connection `client`. If the connection is broken, or if pjwd answers that it is
/// busy, replaces `client` by a new connection, and makes the call once more. For example, pjwd may have closed the
/// idle connection to serve another user. `call` must only read, because pjwd may carry it out twice.
fn call_again_if_disconnected<T>(
    daemon: &DaemonAddress,
    client: &mut Client,
    call: impl Fn(&mut Client) -> Result<T, ClientError>,
) -> Result<T, ClientError> {
    match call(client) {
        Err(error) if run::needs_new_connection(&error) => {
            let Ok(connected) = Client::connect(&daemon.path()) else { return Err(error) };
            *client = connected;
            call(client)
        }
        reply => reply,
    }
}

/// Returns the directory with the core map of the job `job`, and the variables that tell an instance the size of its
/// part. If the status can't be read, there is no directory, and the variables are the default ones. May replace the
/// connection `client` by a new one.
fn directory_and_variables(
    daemon: &DaemonAddress,
    client: &mut Client,
    job: &str,
) -> (Option<PathBuf>, Vec<CpuCountVariable>) {
    match call_again_if_disconnected(daemon, client, read_status) {
        Ok(status) => (job_directory(&status, job), cpu_count_variables(&status)),
        Err(_) => (None, CpuCountVariable::defaults()),
    }
}

/// Sets the mask of this thread to `cpus`, which `job` was granted. The instances get parts of this mask. It may be
/// narrower than the grant: pjwd may leave a mask inside the grant as it is, such as one of taskset(1).
fn take_whole_grant(cpus: &CpuSet, job: &str) -> anyhow::Result<()> {
    affinity::set_mask(THIS_THREAD, cpus).map_err(|errno| {
        anyhow::anyhow!(
            "{job} was granted {cpus}, and pjwctl can't take it as its affinity mask: {}; check the cpuset of its cgroup, \
             and pjwctl events",
            errno.desc()
        )
    })
}

fn own_mask() -> anyhow::Result<CpuSet> {
    affinity::get_mask(Tid(std::process::id()))
        .map_err(|errno| anyhow::anyhow!("the affinity mask of this process can't be read: {}", errno.desc()))
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;

    use super::*;
    use crate::cli::{Cli, CliCommand};

    fn request(options: &str) -> SpawnArgs {
        let line = format!("pjwctl spawn -n 2 {options} -- program");
        let Ok(cli) = Cli::parse_args(line.split_whitespace().map(OsString::from)) else { panic!("{line}") };
        let CliCommand::Spawn(request) = cli.command else { panic!("not spawn") };
        request
    }

    #[test]
    fn options_that_only_a_job_of_pjwd_can_have_are_refused_in_a_job_of_a_batch_system() {
        let check = |options: &str| check_batch_system_options("slurm:7", &request(options));
        for (option, value) in [("--class", "normal"), ("--smt", "pus")] {
            let refusal = check(&format!("{option} {value} --cores 1")).unwrap_err().to_string();
            let expected = format!(
                "{option} has no effect in slurm:7, whose cores the batch system has chosen: leave {option} out"
            );
            assert!(refusal.starts_with(&expected), "{refusal}");
        }
        for options in ["", "--cores 1", "--cores all", "--within-job rr", "--map core"] {
            check(options).unwrap();
        }
    }
}
