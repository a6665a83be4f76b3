//! The share of one Slurm task in the CPUs of its job on this node, for the task prolog.

use pjw_core::snapshot::BatchAttributes;

use crate::{host::LocalHost, slurm, system::BatchEnvironment};

/// Numbers of CPUs from the environment of a Slurm task (a process of a parallel job): those of the task, of its job
/// step (one `srun` command) and of its job. What Slurm calls a CPU is a core or a PU (logical CPU), depending on
/// Slurm's configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlurmTaskCpus {
    /// The number of CPUs that were requested for each task (`--cpus-per-task`). `None` if the environment of
    /// the task does not contain this number.
    pub cpus_per_task: Option<u32>,
    /// The number of CPUs on this machine of the job step to which the task belongs. For a batch script, this
    /// is the number of CPUs of the whole job on this machine. `None` if the environment of the task does not
    /// contain this number.
    pub step_cpus: Option<u32>,
    /// The number of CPUs of the job on this machine. `None` if the environment of the task does not contain
    /// this number.
    pub job_cpus: Option<u32>,
    /// The number of tasks on this machine that share the CPUs of the job step. For a batch script, this is
    /// the number of tasks of the whole job on this machine. 1 if the environment of the task contains no
    /// valid number. Never 0.
    pub task_count: u32,
}

/// Reads the CPU counts of a Slurm task (a process of a parallel job) from `attributes`, the environment of the task.
/// `host` describes this machine.
///
/// `attributes` can also be the environment of a batch script. The fields `step_cpus` and `task_count` of the result
/// are then the numbers of the whole job on this machine. The reason: the programs that the script starts inherit its
/// environment, and together they can use all CPUs of the job.
#[must_use]
pub fn read_slurm_task_cpus(attributes: &BatchAttributes, host: &LocalHost) -> SlurmTaskCpus {
    const VARIABLES: &[&str] = &[
        "SLURM_STEP_ID",
        "SLURM_CPUS_PER_TASK",
        "SLURM_CPUS_ON_NODE",
        "SLURM_JOB_CPUS_PER_NODE",
        "SLURM_STEP_TASKS_PER_NODE",
        "SLURM_STEP_NODELIST",
        "SLURM_TASKS_PER_NODE",
        "SLURM_JOB_NODELIST",
        "SLURM_NODELIST",
        "SLURMD_NODENAME",
    ];
    let environ = BatchEnvironment::with_variables(VARIABLES, attributes);
    let in_step = environ.get("SLURM_STEP_ID").is_some();
    let (count_variable, list_variables) = match environ.get("SLURM_STEP_TASKS_PER_NODE") {
        Some(_) if in_step => ("SLURM_STEP_TASKS_PER_NODE", ["SLURM_STEP_NODELIST", "SLURM_NODELIST"]),
        _ => ("SLURM_TASKS_PER_NODE", slurm::JOB_NODE_LISTS),
    };
    let task_count = slurm::count_of_this_node(environ, host, count_variable, list_variables);
    let job_cpus = slurm::job_cpu_count(environ, host).ok().filter(|&cpus| cpus > 0);
    SlurmTaskCpus {
        cpus_per_task: environ.positive_number("SLURM_CPUS_PER_TASK"),
        step_cpus: environ.positive_number("SLURM_CPUS_ON_NODE"),
        job_cpus,
        task_count: task_count.unwrap_or(1).max(1),
    }
}
