//! How much of a job's share of this node one task of Slurm has: what its task prolog is told.

use pjw_core::snapshot::Marks;

use crate::system::Environ;
use crate::{Host, slurm};

/// What is known of a task. Counts are of Slurm's CPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Task {
    /// What was asked for each task (`--cpus-per-task`).
    pub cpus: Option<u32>,
    /// What its step has on this node; in a batch script, what the job has.
    pub step_cpus: Option<u32>,
    /// What the job has on this node.
    pub job_cpus: Option<u32>,
    /// How many tasks share them here, at least 1.
    pub tasks: u32,
}

/// What the environment says of the task. A batch script stands for all the tasks of its job on this node, since what it
/// starts inherits its variables.
#[must_use]
pub fn of_slurm(marks: &Marks, host: &Host) -> Task {
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
    let environ = Environ::of(VARIABLES, marks);
    let of_job = ["SLURM_JOB_NODELIST", "SLURM_NODELIST"];
    let in_step = environ.get("SLURM_STEP_ID").is_some();
    let (counts, lists) = match environ.get("SLURM_STEP_TASKS_PER_NODE") {
        Some(_) if in_step => ("SLURM_STEP_TASKS_PER_NODE", ["SLURM_STEP_NODELIST", "SLURM_NODELIST"]),
        _ => ("SLURM_TASKS_PER_NODE", of_job),
    };
    let tasks = slurm::count_here(environ, host, counts, lists).unwrap_or(1).max(1);
    let job_cpus = slurm::count_of_job(environ, host).ok().filter(|&cpus| cpus > 0);
    let step_cpus = environ.number("SLURM_CPUS_ON_NODE");
    Task { cpus: environ.number("SLURM_CPUS_PER_TASK"), step_cpus, job_cpus, tasks }
}
