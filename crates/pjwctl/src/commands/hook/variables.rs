//! The variables that a job is told its cores by.
//!
//! `PJW_CPUS` and `PJW_NCORES` say what the job has. What OpenMP is told depends on more, and only where the user said
//! nothing:
//!
//! - `OMP_NUM_THREADS`: the share of one task.
//! - `OMP_PLACES`: only for a task that has all its CPUs for itself, the whole grant or a mask of its own. It makes
//!   OpenMP bind its threads from the first place on; tasks that share a mask, and MPI ranks that inherit the variable,
//!   would all bind to the same first core. Those are left to the warden, which spreads what runs.

use pjw_core::cpuset::CpuSet;
use pjw_core::process::Tid;
use pjw_ipc::wire::{Core, Job, Status};
use pjw_linux::affinity;
use pjw_sources::announcement::Announcement;
use pjw_sources::task::Task;

use super::{Scene, Variables};
use crate::commands::run::cores_in;

/// For what inherits the environment of a whole job.
pub(super) fn of_job(scene: &Scene, told: &Announcement) -> anyhow::Result<Variables> {
    let Some((status, job)) = scene.desk.granted(told)? else { return Ok(Vec::new()) };
    of_share(scene, &status, &job)
}

/// The same for a starter, which becomes the job's command: told once it is on the job's cores.
pub(super) fn of_starter(scene: &Scene, told: &Announcement) -> anyhow::Result<Variables> {
    let Some((status, job)) = scene.desk.seated(told)? else { return Ok(Vec::new()) };
    of_share(scene, &status, &job)
}

fn of_share(scene: &Scene, status: &Status, job: &Job) -> anyhow::Result<Variables> {
    let cpus: CpuSet = job.cpus.parse()?;
    let mut variables = of_grant(&cpus, &status.cores);
    if scene.variable("OMP_NUM_THREADS").is_none() {
        let cores = cores_in(&cpus, &status.cores).max(1);
        variables.push(("OMP_NUM_THREADS".to_owned(), cores.to_string()));
    }
    Ok(variables)
}

/// For one task of Slurm's.
pub(super) fn of_task(scene: &Scene, status: &Status, job: &Job, task: Task) -> anyhow::Result<Variables> {
    let cpus: CpuSet = job.cpus.parse()?;
    let mut variables = of_grant(&cpus, &status.cores);
    let openmp = openmp(&cpus, own_mask().as_ref(), &status.cores, task);
    let (threads, places) = (openmp.threads.to_string(), openmp.places.map(str::to_owned));
    for (name, value) in [("OMP_NUM_THREADS", Some(threads)), ("OMP_PLACES", places)] {
        if let Some(value) = value.filter(|_| scene.variable(name).is_none()) {
            variables.push((name.to_owned(), value));
        }
    }
    Ok(variables)
}

fn of_grant(cpus: &CpuSet, cores: &[Core]) -> Variables {
    let count = cores_in(cpus, cores).to_string();
    vec![("PJW_CPUS".to_owned(), cpus.to_string()), ("PJW_NCORES".to_owned(), count)]
}

/// Where the task may run as it begins: that of this process's first thread, which alone goes on in an execve(2). Without
/// PUs that are off, which whole masks have and no job.
pub(super) fn own_mask() -> Option<CpuSet> {
    affinity::get(Tid(std::process::id())).ok()
}

/// What OpenMP is told.
#[derive(Debug, PartialEq, Eq)]
struct OpenMp {
    threads: usize,
    places: Option<&'static str>,
}

fn openmp(grant: &CpuSet, mask: Option<&CpuSet>, cores: &[Core], task: Task) -> OpenMp {
    // A mask narrower than the grant is the task's own, given by the scheduler.
    let own = mask.map(|mask| mask.intersection(grant)).filter(|own| !own.is_empty() && own != grant);
    let room = own.as_ref().unwrap_or(grant);
    let in_room = cores_in(room, cores).max(1);
    let in_core = |core: &Core| core.cpus.parse::<CpuSet>().unwrap_or_default().intersection(room).len();
    let widest = cores.iter().map(in_core).max().unwrap_or(1).max(1);
    let tasks = if own.is_some() { 1 } else { task.tasks as usize };
    let (threads, all) = match task.cpus {
        // CPUs that were asked for are threads; the last core may be had whole for the sake of one.
        Some(asked) => (asked as usize, asked as usize * tasks + widest > room.len()),
        None => {
            let (part, whole) = match (own.is_some(), task.step_cpus, task.job_cpus) {
                (false, Some(step), Some(job)) if step < job => (step as usize, job as usize),
                _ => (1, 1),
            };
            (in_room * part / whole / tasks, part == whole)
        }
    };
    let threads = threads.clamp(1, room.len().max(1));
    let by_core = widest > 1 && threads <= in_room;
    let places = if by_core { "cores" } else { "threads" };
    OpenMp { threads, places: (tasks == 1 && all).then_some(places) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Eight cores of two hardware threads, N and N+8.
    fn smt() -> Vec<Core> {
        (0..8).map(|n| Core { cpus: format!("{n},{}", n + 8), ..Core::default() }).collect()
    }

    /// Eight cores of one.
    fn plain() -> Vec<Core> {
        (0..8).map(|n| Core { cpus: n.to_string(), ..Core::default() }).collect()
    }

    fn told(cores: &[Core], grant: &str, mask: Option<&str>, task: Task) -> (usize, &'static str) {
        let mask: Option<CpuSet> = mask.map(|mask| mask.parse().unwrap());
        let told = openmp(&grant.parse().unwrap(), mask.as_ref(), cores, task);
        (told.threads, told.places.unwrap_or("-"))
    }

    const ALONE: Task = Task { cpus: None, step_cpus: None, job_cpus: None, tasks: 1 };

    #[test]
    fn a_task_that_is_alone_has_a_thread_for_each_core_and_places_of_its_own() {
        assert_eq!(told(&plain(), "0-3", None, ALONE), (4, "threads"));
        assert_eq!(told(&smt(), "0-3,8-11", None, ALONE), (4, "cores"));
        assert_eq!(told(&smt(), "0-3", None, ALONE), (4, "threads"), "one hardware thread of each core");
        assert_eq!(told(&smt(), "0-3,8-11", Some("0-15"), ALONE), (4, "cores"), "not confined yet");
    }

    #[test]
    fn cpus_that_were_asked_for_are_threads() {
        let asked = |cpus| Task { cpus: Some(cpus), ..ALONE };
        assert_eq!(told(&smt(), "0-1,8-9", None, asked(4)), (4, "threads"));
        assert_eq!(told(&smt(), "0-1,8-9", None, asked(3)), (3, "threads"), "two whole cores for three");
        assert_eq!(told(&smt(), "0-3,8-11", None, asked(4)), (4, "-"), "a step that is a part of the job");
        assert_eq!(told(&plain(), "0-1", None, asked(99)), (2, "threads"), "never more than there are");
        assert_eq!(told(&smt(), "0,8", None, asked(1)), (1, "cores"), "one of two, and the core is whole");
    }

    #[test]
    fn tasks_that_share_a_mask_get_threads_and_no_places() {
        let four = Task { tasks: 4, ..ALONE };
        assert_eq!(told(&plain(), "0-7", None, four), (2, "-"));
        assert_eq!(told(&plain(), "0-1", None, four), (1, "-"), "at least one");
        assert_eq!(told(&plain(), "0-7", None, Task { cpus: Some(2), ..four }), (2, "-"));
    }

    #[test]
    fn a_task_that_its_scheduler_bound_has_what_its_mask_says() {
        let four = Task { tasks: 4, ..ALONE };
        assert_eq!(told(&plain(), "0-7", Some("2-3"), four), (2, "threads"));
        assert_eq!(told(&plain(), "0-7", Some("2-3"), Task { cpus: Some(2), ..four }), (2, "threads"));
        assert_eq!(told(&smt(), "0-7,8-15", Some("2-3,10-11"), four), (2, "cores"));
    }

    #[test]
    fn a_step_without_a_count_for_its_tasks_has_its_part_of_the_job() {
        let step = |step, tasks| Task { step_cpus: Some(step), job_cpus: Some(8), tasks, cpus: None };
        assert_eq!(told(&plain(), "0-7", None, step(8, 1)), (8, "threads"));
        assert_eq!(told(&plain(), "0-7", None, step(2, 1)), (2, "-"), "others may run beside it");
        assert_eq!(told(&plain(), "0-7", None, step(4, 4)), (1, "-"));
    }
}
