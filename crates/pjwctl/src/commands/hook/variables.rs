//! The environment variables that contain the cores of a job.
//!
//! `PJW_CPUS` and `PJW_NCORES` describe the grant. `PJW_JOB_DIR` is the directory of the job's core map, if there is
//! one. The others are set only where the user set none:
//!
//! - The variables of the configuration key `run.variables`, such as `OMP_NUM_THREADS`: the share of one task.
//! - `OMP_PLACES`: only for a task that has all its CPUs for itself, which are the whole grant or a mask of its own.
//!   With this variable OpenMP binds its threads from the first place on. Tasks that share a mask, and MPI ranks that
//!   inherit the variable, would all bind to the same first core. For those the warden distributes the running
//!   threads.

use pjw_core::cpu_count_variables::{CpuCounts, cpu_count_environment};
use pjw_core::cpuset::CpuSet;
use pjw_ipc::wire::{Core, Job, Status};
use pjw_sources::{announcement::JobAnnouncement, task::SlurmTaskCpus};

use super::client::own_mask;
use super::context::{HookInput, JobVariables};
use crate::commands::connection::{cpu_count_variables, job_directory};
use crate::commands::run::{count_cores, cpu_counts};

/// Returns the environment variables for a program of the job in `announcement`, such as `PJW_CPUS`. First waits until
/// the job holds cores. Returns no variables if pjwd does not keep the job on its cores.
pub(super) fn job_variables(
    context: &HookInput,
    announcement: &JobAnnouncement,
) -> anyhow::Result<JobVariables> {
    let Some((status, job)) = context.client.wait_for_grant(announcement)? else { return Ok(Vec::new()) };
    whole_job_variables(context, &status, &job)
}

/// Returns the environment variables for the command of the job in `announcement`, such as `PJW_CPUS`. First waits
/// until this process, which will execute the command, can run only on the cores of the job. Returns no variables if
/// pjwd does not keep the job on its cores.
pub(super) fn job_starter_variables(
    context: &HookInput,
    announcement: &JobAnnouncement,
) -> anyhow::Result<JobVariables> {
    let Some((status, job)) = context.client.wait_until_confined(announcement)? else {
        return Ok(Vec::new());
    };
    whole_job_variables(context, &status, &job)
}

/// Returns the environment variables for a program that uses all cores of the job `job`.
fn whole_job_variables(context: &HookInput, status: &Status, job: &Job) -> anyhow::Result<JobVariables> {
    let cpus: CpuSet = job.cpus.parse()?;
    let counts = cpu_counts(&cpus, &status.cores);
    Ok(variables_with_counts(context, status, job, &cpus, counts))
}

/// Returns the environment variables for one Slurm task (a process of a job step), such as `OMP_NUM_THREADS`. `task`
/// says how many CPUs the task requested, and how many tasks share the CPUs of the job `job`. `status` is the status of
/// the daemon.
pub(super) fn slurm_task_variables(
    context: &HookInput,
    status: &Status,
    job: &Job,
    task: SlurmTaskCpus,
) -> anyhow::Result<JobVariables> {
    let cpus: CpuSet = job.cpus.parse()?;
    let share = task_share(&cpus, own_mask().as_ref(), &status.cores, task);
    let number = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
    let counts = CpuCounts { cores: number(share.threads), pus: number(share.pus) };
    let mut variables = variables_with_counts(context, status, job, &cpus, counts);
    let places = share.places.filter(|_| context.inherited_variable("OMP_PLACES").is_none());
    variables.extend(places.map(|places| ("OMP_PLACES".to_owned(), places.to_owned())));
    Ok(variables)
}

/// Returns the variables that describe the grant `cpus` of the job `job`, and the variables of the configuration key
/// `run.variables` with the numbers in `counts`.
fn variables_with_counts(
    context: &HookInput,
    status: &Status,
    job: &Job,
    cpus: &CpuSet,
    counts: CpuCounts,
) -> JobVariables {
    let mut variables = grant_variables(status, job, cpus);
    variables.extend(cpu_count_environment(&cpu_count_variables(status), counts, |name| {
        context.inherited_variable(name)
    }));
    variables
}

/// Returns `PJW_CPUS` and `PJW_NCORES` for the grant `cpus` of the job `job`, and `PJW_JOB_DIR` if the job has a core
/// map.
fn grant_variables(status: &Status, job: &Job, cpus: &CpuSet) -> JobVariables {
    let count = count_cores(cpus, &status.cores).to_string();
    let directory = job_directory(status, &job.id).map(|path| path.to_string_lossy().into_owned());
    let directory = directory.map(|path| ("PJW_JOB_DIR".to_owned(), path));
    [("PJW_CPUS".to_owned(), cpus.to_string()), ("PJW_NCORES".to_owned(), count)]
        .into_iter()
        .chain(directory)
        .collect()
}

/// The share of one task in the CPUs of its job.
#[derive(Debug, PartialEq, Eq)]
struct TaskShare {
    /// The number of threads for a program that starts one per core. If the user requested CPUs for each task, this is
    /// the number of these CPUs.
    threads: usize,
    /// The number of PUs.
    pus: usize,
    /// The value of `OMP_PLACES`, if the task has its CPUs for itself.
    places: Option<&'static str>,
}

/// The CPU counts of one task, before they are limited to the CPUs on which the task can run.
struct TaskCounts {
    /// As [`TaskShare::threads`].
    threads: usize,
    /// As [`TaskShare::pus`].
    pus: usize,
    /// Whether the tasks that share CPUs use all of the CPUs that they share.
    uses_all_cpus: bool,
}

/// The fraction of the CPUs of a job that one job step uses.
#[derive(PartialEq, Eq)]
struct StepFraction {
    /// The number of CPUs of the step, or 1 if it uses all CPUs of its job.
    step_cpus: usize,
    /// The number of CPUs of the job, or 1 if the step uses all of them. Never 0.
    job_cpus: usize,
}

impl StepFraction {
    /// The step uses all CPUs of its job.
    const WHOLE_JOB: Self = Self { step_cpus: 1, job_cpus: 1 };

    /// Returns the fraction for the step of the Slurm task `task`: the whole job if the CPU count of the step or of the
    /// job is unknown.
    fn from_task(task: SlurmTaskCpus) -> Self {
        match (task.step_cpus, task.job_cpus) {
            (Some(step), Some(job)) if step < job => {
                Self { step_cpus: step as usize, job_cpus: job as usize }
            }
            _ => Self::WHOLE_JOB,
        }
    }

    /// Returns this fraction of `count`, rounded down.
    fn of_count(&self, count: usize) -> usize {
        count * self.step_cpus / self.job_cpus
    }
}

/// Returns how many threads and PUs (logical CPUs) one Slurm task (a process of a job step) is to use. `grant`
/// contains the PUs of the job, `mask` is the affinity mask of the task (`None` if unknown), and `cores` contains all
/// cores of the machine.
///
/// If `mask` contains only some of the PUs in `grant`, Slurm has bound the task, and the task uses only these.
/// Otherwise all tasks share the PUs of the job: `task` says how many tasks there are, and how many CPUs each has
/// requested.
fn task_share(grant: &CpuSet, mask: Option<&CpuSet>, cores: &[Core], task: SlurmTaskCpus) -> TaskShare {
    // A mask narrower than the grant is the task's own, set by the scheduler.
    let own = mask.map(|mask| mask.intersection(grant)).filter(|own| !own.is_empty() && own != grant);
    let usable = own.as_ref().unwrap_or(grant);
    let usable_cores = count_cores(usable, cores).max(1);
    let usable_pus = |core: &Core| core.cpus.parse::<CpuSet>().unwrap_or_default().intersection(usable).len();
    let max_pus_in_core = cores.iter().map(usable_pus).max().unwrap_or(1).max(1);
    let tasks = if own.is_some() { 1 } else { task.task_count as usize };
    let counts = match task.cpus_per_task {
        // The requested CPUs are threads. The last core may be allocated whole for one of them.
        Some(requested) => {
            let requested = requested as usize;
            let uses_all_cpus = requested * tasks + max_pus_in_core > usable.len();
            TaskCounts { threads: requested, pus: requested, uses_all_cpus }
        }
        None => {
            // Other steps may run beside a step that has only a part of the job's CPUs. Such a step uses the same part
            // of the grant.
            let fraction =
                if own.is_some() { StepFraction::WHOLE_JOB } else { StepFraction::from_task(task) };
            TaskCounts {
                threads: fraction.of_count(usable_cores) / tasks,
                pus: fraction.of_count(usable.len()) / tasks,
                uses_all_cpus: fraction == StepFraction::WHOLE_JOB,
            }
        }
    };
    let threads = counts.threads.clamp(1, usable.len().max(1));
    let pus = counts.pus.clamp(1, usable.len().max(1));
    let by_core = max_pus_in_core > 1 && threads <= usable_cores;
    let places = if by_core { "cores" } else { "threads" };
    TaskShare { threads, pus, places: (tasks == 1 && counts.uses_all_cpus).then_some(places) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Eight cores of two PUs, N and N+8.
    fn smt() -> Vec<Core> {
        (0..8).map(|n| Core { cpus: format!("{n},{}", n + 8), ..Core::default() }).collect()
    }

    /// Eight cores of one PU.
    fn plain() -> Vec<Core> {
        (0..8).map(|n| Core { cpus: n.to_string(), ..Core::default() }).collect()
    }

    fn task_figures(
        cores: &[Core],
        grant: &str,
        mask: Option<&str>,
        task: SlurmTaskCpus,
    ) -> (usize, &'static str) {
        let mask: Option<CpuSet> = mask.map(|mask| mask.parse().unwrap());
        let share = task_share(&grant.parse().unwrap(), mask.as_ref(), cores, task);
        (share.threads, share.places.unwrap_or("-"))
    }

    const ALONE: SlurmTaskCpus =
        SlurmTaskCpus { cpus_per_task: None, step_cpus: None, job_cpus: None, task_count: 1 };

    #[test]
    fn a_task_that_is_alone_has_a_thread_for_each_core_and_places_of_its_own() {
        assert_eq!(task_figures(&plain(), "0-3", None, ALONE), (4, "threads"));
        assert_eq!(task_figures(&smt(), "0-3,8-11", None, ALONE), (4, "cores"));
        assert_eq!(
            task_figures(&smt(), "0-3", None, ALONE),
            (4, "threads"),
            "one hardware thread of each core"
        );
        assert_eq!(task_figures(&smt(), "0-3,8-11", Some("0-15"), ALONE), (4, "cores"), "not confined yet");
    }

    #[test]
    fn requested_cpus_are_threads() {
        let requested = |cpus| SlurmTaskCpus { cpus_per_task: Some(cpus), ..ALONE };
        assert_eq!(task_figures(&smt(), "0-1,8-9", None, requested(4)), (4, "threads"));
        assert_eq!(
            task_figures(&smt(), "0-1,8-9", None, requested(3)),
            (3, "threads"),
            "two whole cores for three"
        );
        assert_eq!(
            task_figures(&smt(), "0-3,8-11", None, requested(4)),
            (4, "-"),
            "a step that is a part of the job"
        );
        assert_eq!(
            task_figures(&plain(), "0-1", None, requested(99)),
            (2, "threads"),
            "never more than there are"
        );
        assert_eq!(
            task_figures(&smt(), "0,8", None, requested(1)),
            (1, "cores"),
            "one of two, and the core is whole"
        );
    }

    #[test]
    fn tasks_that_share_a_mask_get_threads_and_no_places() {
        let four = SlurmTaskCpus { task_count: 4, ..ALONE };
        assert_eq!(task_figures(&plain(), "0-7", None, four), (2, "-"));
        assert_eq!(task_figures(&plain(), "0-1", None, four), (1, "-"), "at least one");
        assert_eq!(
            task_figures(&plain(), "0-7", None, SlurmTaskCpus { cpus_per_task: Some(2), ..four }),
            (2, "-")
        );
    }

    #[test]
    fn a_task_that_its_scheduler_bound_has_the_cpus_of_its_mask() {
        let four = SlurmTaskCpus { task_count: 4, ..ALONE };
        assert_eq!(task_figures(&plain(), "0-7", Some("2-3"), four), (2, "threads"));
        assert_eq!(
            task_figures(&plain(), "0-7", Some("2-3"), SlurmTaskCpus { cpus_per_task: Some(2), ..four }),
            (2, "threads")
        );
        assert_eq!(task_figures(&smt(), "0-7,8-15", Some("2-3,10-11"), four), (2, "cores"));
    }

    #[test]
    fn a_step_without_a_count_for_its_tasks_has_its_part_of_the_job() {
        let step = |step, task_count| SlurmTaskCpus {
            step_cpus: Some(step),
            job_cpus: Some(8),
            task_count,
            cpus_per_task: None,
        };
        assert_eq!(task_figures(&plain(), "0-7", None, step(8, 1)), (8, "threads"));
        assert_eq!(task_figures(&plain(), "0-7", None, step(2, 1)), (2, "-"), "others may run beside it");
        assert_eq!(task_figures(&plain(), "0-7", None, step(4, 4)), (1, "-"));
    }
}
