//! The description of one batch system: how pjw recognises its processes and jobs. An entry of the table `SYSTEMS`.

use pjw_core::ids::Comm;
use pjw_core::job::{CpuRequest, JobId, JobSource};
use pjw_core::snapshot::{BatchAttributes, JobProcessGrouping};

use crate::{error::HookInputError, host::LocalHost, number::parse_digits};

/// The maximum number of cores of a job. No machine has more: a larger count is an error or a lie.
const MAX_CORES: u32 = 65_536;

/// How pjw recognises the processes and jobs of one batch system. An entry of the table of batch systems.
pub(crate) struct BatchSystem {
    /// The batch system.
    pub(crate) source: JobSource,
    /// The program names of the launchers: daemons of the batch system whose child processes belong to jobs. Each name
    /// is cut to 15 bytes, as the kernel does.
    pub(crate) launchers: &'static [&'static str],
    /// The names of the environment variables that [`BatchSystem::environ_claim`] reads. That function can read no
    /// other variables.
    pub(crate) variables: &'static [&'static str],
    /// Whether the batch system starts each job in a process group of its own, in a session of its own, or in neither.
    pub(crate) process_grouping: JobProcessGrouping,
    /// Whether pjwd may narrow the cpuset of a job's cgroup, that is, remove PUs (logical CPUs) from it. True only if
    /// the batch system writes this cpuset for no other purpose than to give cores to the job.
    pub(crate) has_narrowable_cpuset: bool,
    /// Returns the role of the outermost directory on the cgroup path of a process that belongs to this batch system:
    /// the directory belongs to a job, or contains only processes of the batch system. `None` if no directory on the
    /// path belongs to the batch system.
    pub(crate) find_directory_role: fn(&ProcessAttributes<'_>) -> Option<CgroupDirectoryRole>,
    /// Reads the job and its number of cores from the environment variables of a process. `None` if the variables name
    /// no job.
    pub(crate) environ_claim: fn(BatchEnvironment<'_>, &LocalHost) -> Option<EnvironClaim>,
}

/// The properties of a process that [`BatchSystem::find_directory_role`] uses to find the job's directory on the cgroup
/// path of the process.
pub(crate) struct ProcessAttributes<'a> {
    /// The trusted directories on the cgroup path of the process, outermost first. The directory of a user's service
    /// manager (`user@UID.service`) and the directories below it are not trusted, because the user can create
    /// directories there.
    pub(crate) directories: &'a [&'a str],
    /// The program name of the process.
    pub(crate) comm: &'a Comm,
    /// The command line of the process.
    pub(crate) command_line: &'a str,
}

/// The meaning of a directory on the cgroup path of a process. The directory belongs to a job, or the batch system uses
/// it only for its own processes.
pub(crate) enum CgroupDirectoryRole {
    /// The directory belongs to a job.
    Job {
        /// The id of the job.
        job: JobId,
        /// The index of the directory on the cgroup path, counted from 0.
        depth: usize,
        /// Whether the process in the directory belongs to the batch system and not to the job. True only if more than
        /// the program name of the process shows this.
        is_helper: bool,
    },
    /// Only the batch system puts processes into the directory, and only its own processes.
    SchedulerOnly {
        /// The index of the directory on the cgroup path, counted from 0.
        depth: usize,
    },
}

impl CgroupDirectoryRole {
    /// Makes the role of a directory that belongs to the job `job`. The process in the directory counts as a
    /// process of the job, not of the batch system. `depth` is the index of the directory on the cgroup path,
    /// counted from 0.
    pub(crate) fn job_directory(job: JobId, depth: usize) -> Self {
        CgroupDirectoryRole::Job { job, depth, is_helper: false }
    }

    /// Returns whether the process in the directory belongs to the batch system and not to a job.
    pub(crate) fn is_of_helper(&self) -> bool {
        match self {
            CgroupDirectoryRole::Job { is_helper, .. } => *is_helper,
            CgroupDirectoryRole::SchedulerOnly { .. } => true,
        }
    }

    /// Returns the index of the directory on the cgroup path. The outermost directory has the index 0.
    pub(crate) fn depth(&self) -> usize {
        match self {
            CgroupDirectoryRole::Job { depth, .. } | CgroupDirectoryRole::SchedulerOnly { depth } => *depth,
        }
    }
}

/// The job to which a process belongs according to its environment, with the numbers of cores and tasks of the job on
/// this machine. The claim may be false, because any user can set environment variables.
pub(crate) struct EnvironClaim {
    /// The id of the job.
    pub(crate) job: JobId,
    /// A second id of the same job. The name of the job's cgroup may contain this second id instead of `job`. `None` if
    /// the job has only one id.
    pub(crate) alias: Option<JobId>,
    /// The number of cores or PUs (logical CPUs) that the job has on this machine. `None` if the environment does not
    /// contain it.
    pub(crate) cpu_request: Option<CpuRequest>,
    /// The number of tasks of the job on this machine. `None` if the environment does not contain it.
    pub(crate) tasks: Option<u32>,
}

impl EnvironClaim {
    /// Makes a claim for `job` without a second job id, a number of cores or a number of tasks.
    pub(crate) fn from_job_id(job: JobId) -> Self {
        Self { job, alias: None, cpu_request: None, tasks: None }
    }

    /// Returns whether `job` is the job id or the second job id in this claim.
    pub(crate) fn is_for_job(&self, job: &JobId) -> bool {
        self.job == *job || self.alias.as_ref() == Some(job)
    }
}

/// The environment variables of a process or a hook, restricted to those that pjw may read for one batch system.
#[derive(Clone, Copy)]
pub(crate) struct BatchEnvironment<'a> {
    variables: &'static [&'static str],
    attributes: &'a BatchAttributes,
}

impl<'a> BatchEnvironment<'a> {
    /// Returns a view of the environment variables in `attributes` that shows only those that pjw may read for the
    /// batch system `system`.
    pub(crate) fn new(system: &BatchSystem, attributes: &'a BatchAttributes) -> Self {
        Self { variables: system.variables, attributes }
    }

    /// Returns a view of the environment variables in `attributes` that shows only the variables in `variables`.
    pub(crate) fn with_variables(
        variables: &'static [&'static str],
        attributes: &'a BatchAttributes,
    ) -> Self {
        Self { variables, attributes }
    }

    /// Returns the value of the environment variable `variable`. If the variable is not set or empty, returns an error
    /// that names the variable.
    pub(crate) fn required_value(self, variable: &'static str) -> Result<&'a str, HookInputError> {
        self.get(variable).ok_or(HookInputError::Missing(variable))
    }

    /// Returns the name and the value of the first of the two variables in `names` that is set and not empty.
    /// If there is no such variable, returns an error that contains the first name.
    pub(crate) fn first_set_variable(
        self,
        names: [&'static str; 2],
    ) -> Result<(&'static str, &'a str), HookInputError> {
        let variable = names.into_iter().find_map(|name| Some((name, self.get(name)?)));
        variable.ok_or(HookInputError::Missing(names[0]))
    }

    /// Returns the value of the environment variable `name`. Returns `None` if the variable is not set, if it
    /// is empty, or if pjw may not read it for this batch system.
    pub(crate) fn get(self, name: &str) -> Option<&'a str> {
        let value = self.variables.contains(&name).then(|| self.attributes.environ.get(name))??;
        (!value.is_empty()).then_some(value)
    }

    /// Returns the value of the environment variable `name` as a number. `None` if the variable is not set, or if its
    /// value is not a whole number above 0, of digits only.
    pub(crate) fn positive_number(self, name: &str) -> Option<u32> {
        self.get(name).and_then(parse_digits).filter(|&n| n > 0)
    }
}

/// Returns `text` if it is a job number: 1 to 20 digits without leading zeros. Otherwise returns `None`. Leading zeros
/// are refused, because otherwise `7` and `07` would count as two jobs.
pub(crate) fn job_number(text: &str) -> Option<&str> {
    let is_number = (1..=20).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_digit());
    (is_number && !text.starts_with('0')).then_some(text)
}

/// Returns `count` if a machine can have this number of cores or PUs (logical CPUs): from 1 to 65,536. Otherwise
/// returns `None`.
pub(crate) fn valid_cpu_count(count: u32) -> Option<u32> {
    (1..=MAX_CORES).contains(&count).then_some(count)
}
