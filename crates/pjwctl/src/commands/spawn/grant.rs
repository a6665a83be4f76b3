//! The cores that the instances are started on: of a job of the daemon, or of the own affinity mask.

use std::ffi::OsStr;
use std::path::PathBuf;

use pjw_core::cpu_count_variables::CpuCountVariable;
use pjw_core::cpuset::CpuSet;
use pjw_core::ids::Tid;
use pjw_ipc::call::{Assign, ExplainPid, ExplainPidReply};
use pjw_ipc::client::{Client, ClientError};
use pjw_ipc::wire::Job;
use pjw_linux::sys::affinity;

use crate::cli::{CoreCountArg, SpawnArgs, value_name};
use crate::commands::connection::{
    DaemonAddress, call_for_field, cpu_count_variables, job_directory, parse_job_id, read_status,
};
use crate::commands::run;

/// The cores on which `pjwctl spawn` starts its instances (processes), and the job that holds these cores.
pub(super) struct Grant {
    pub(super) cpus: CpuSet,
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
    /// In two cases no job is made, and the instances get the CPUs in the affinity mask of this process: with
    /// `--local`, and if this process already belongs to a job, such as a job of a batch system.
    pub(super) fn obtain(
        warden: &DaemonAddress,
        request: &SpawnArgs,
        size: u32,
        program: &OsStr,
    ) -> anyhow::Result<Self> {
        if request.local {
            let cpu_count_variables = CpuCountVariable::defaults();
            return Ok(Self {
                cpus: own_mask()?,
                job: None,
                directory: None,
                cpu_count_variables,
                client: None,
            });
        }
        let pid = std::process::id();
        let mut client = warden.connect()?;
        let name = request.job.clone().unwrap_or_else(|| run::default_job_name(program, pid));
        let assign = Assign {
            job: parse_job_id(&name)?,
            cores: request.cores.map_or(Some(size), CoreCountArg::core_count),
            all_cores: (request.cores == Some(CoreCountArg::All)).then_some(true),
            pids: Some(vec![pid]),
            class: request.class.map(|class| value_name(&class)),
            within_job: request.within_job.map(|rule| value_name(&rule)),
            smt: request.cores_unit.map(|smt| value_name(&smt)),
            fresh: Some(true),
            ..Assign::default()
        };
        let job: Job = match call_for_field(&mut client, "Assign", &assign, "job") {
            Ok(job) => job,
            Err(fault) => {
                // A process of a job can't join another one: the instances then run on the cores of that job.
                let own_job = own_job(&mut client, pid);
                let is_in_job = own_job.is_some();
                return match (fault, own_job.filter(|id| may_use(id, request))) {
                    (ClientError::Refused { .. }, Some(job)) => Self::of_own_job(&mut client, job),
                    (fault @ ClientError::Refused { .. }, None)
                        if request.cores.is_none() && size > 1 && !is_in_job =>
                    {
                        let fault = anyhow::Error::from(fault);
                        Err(fault.context(format!(
                            "spawn -n {size} asks for {size} cores, one for each instance (with fewer, give --cores, and several share)"
                        )))
                    }
                    (fault, _) => Err(fault.into()),
                };
            }
        };
        let id = job.id.clone();
        match run::wait_for_cores(warden, &mut client, job) {
            Ok(cpus) => {
                let (directory, cpu_count_variables) = surroundings(&mut client, &id);
                Ok(Self { cpus, job: Some(id), directory, cpu_count_variables, client: Some(client) })
            }
            Err(error) => {
                run::release(&mut client, &id);
                Err(error)
            }
        }
    }

    /// The cores of the job that this process belongs to.
    fn of_own_job(client: &mut Client, job: String) -> anyhow::Result<Self> {
        let (directory, cpu_count_variables) = surroundings(client, &job);
        Ok(Self { cpus: own_mask()?, job: Some(job), directory, cpu_count_variables, client: None })
    }

    /// Releases the job, so that its cores become free. Has no effect if [`Grant::obtain`] made no job.
    pub(super) fn release(self) {
        if let (Some(mut client), Some(job)) = (self.client, self.job) {
            run::release(&mut client, &job);
        }
    }
}

/// Whether the instances are to run on the cores of `id`, the job of this process.
fn may_use(id: &str, request: &SpawnArgs) -> bool {
    let has_core_options = request.cores.is_some()
        || request.class.is_some()
        || request.within_job.is_some()
        || request.cores_unit.is_some();
    request.job.is_none() && (is_schedulers(id) || !has_core_options)
}

/// Whether the job is one of a batch system. A command in such a job may have options about cores that are for a machine
/// without the batch system.
fn is_schedulers(id: &str) -> bool {
    !id.starts_with("manual:")
}

/// The job of this process, if it belongs to one.
fn own_job(client: &mut Client, pid: u32) -> Option<String> {
    let reasons: ExplainPidReply = client.call("ExplainPid", &ExplainPid { pid, after_tid: None }).ok()?;
    reasons.job
}

/// The directory with the core map of a job, and the variables for its size. Without the directory the instances have the
/// cores of their masks.
fn surroundings(client: &mut Client, job: &str) -> (Option<PathBuf>, Vec<CpuCountVariable>) {
    match read_status(client) {
        Ok(status) => (job_directory(&status, job), cpu_count_variables(&status)),
        Err(_) => (None, CpuCountVariable::defaults()),
    }
}

fn own_mask() -> anyhow::Result<CpuSet> {
    affinity::get_mask(Tid(std::process::id()))
        .map_err(|errno| anyhow::anyhow!("the affinity mask of this process can't be read: {}", errno.desc()))
}
