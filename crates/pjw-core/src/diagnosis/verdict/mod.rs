//! The verdict on a job that has ended: how well it used its cores, in one of five words, with a remedy.
//!
//! [`judge_ended_job`] is a pure function of the [`JobReport`]. The remedy is an option of the system that started the
//! job.

use alloc::format;
use core::fmt;

use crate::basics::{duration_text, prelude::*};
use crate::diagnosis::words;
use crate::terms::{JobId, JobReport, JobSource, JobUsage};

/// The minimum time, in ns, for which pjw must have measured the CPU use of an ended job to judge how well the
/// job used its cores: 10 s. A shorter job consists mostly of its start and its end.
pub const MIN_MEASURED_NS: u64 = 10_000_000_000;
/// A job that used at least this share of its cores on average used them well, in permille. jobstats (Princeton) marks
/// jobs below 65 % too.
const WELL_USED_PERMILLE: u64 = 650;
/// A condition that slows a job down counts if it lasted for at least this share of the time, in permille.
const SLOWED_PERMILLE: u64 = 200;
/// A condition that describes a job as a whole counts if it lasted for at least this share of the time, in permille.
const MOST_PERMILLE: u64 = 500;

/// The least time without a core, in ns, that the text about an ended job names: a shorter one would be 0.0 s.
const MIN_NAMED_NS: u64 = 50_000_000;

/// The share of a core, in permille, that is ignored when a number of needed cores is rounded up.
const TOLERATED_PERMILLE: u64 = 100;

/// The verdict of pjw on how well an ended job used its cores: `Fine`, or the main problem of the job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, strum::IntoStaticStr)]
#[strum(serialize_all = "lowercase")]
pub enum VerdictKind {
    /// Fewer threads ran than the job had cores.
    Serial,
    /// More threads wanted to run than the job had PUs.
    Oversubscribed,
    /// Runnable threads waited beside idle cores of their own job, because their own program had bound them.
    Bound,
    /// The threads waited: for something other than a core, or for other programs on the cores of the job.
    Waiting,
    /// The job used its cores.
    Fine,
}

impl VerdictKind {
    /// Returns the name of the verdict in JSON output and in messages to users, such as `serial`.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.into()
    }
}

/// The verdict of pjw on how well an ended job used its cores: the kind of the verdict, and advice for the
/// user.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Verdict {
    /// How well the job used its cores.
    pub kind: VerdictKind,
    /// What was wrong and what to do, in one sentence each, the most important first. Empty if the job used its cores.
    pub advice: Vec<String>,
}

/// Returns the reason why pjw does not judge how well an ended job used its cores, as a part of a sentence for users.
/// `None` if pjw judges the job. A job is not judged in each of these cases:
///
/// - The job was a provision: its cores were promised to a service, and may be idle.
/// - The job held no cores or used no CPU time.
/// - The job ran or held cores for less than 10 s ([`MIN_MEASURED_NS`]), or the use of its cores was measured for less
///   than 10 s.
#[must_use]
pub fn why_not_judged(report: &JobReport) -> Option<&'static str> {
    let usage = &report.usage;
    if report.is_provision {
        Some("it was a provision, whose cores may be idle")
    } else if usage.held_ns == 0 {
        Some("it held no cores")
    } else if report.wall_ns < MIN_MEASURED_NS {
        Some("it ran for less than 10 s")
    } else if report.time_with_pus_ns() < MIN_MEASURED_NS {
        Some("it held cores for less than 10 s")
    } else if usage.sampled_with_pus_ns() < MIN_MEASURED_NS {
        Some("its use of CPUs was measured for less than 10 s")
    } else if usage.cpu_ns == 0 {
        Some("it used no CPU time")
    } else {
        None
    }
}

/// Judges how well an ended job used its cores, from the report on the job. Returns `None` if the job is not judged,
/// for example because it ran for less than 10 s. [`why_not_judged`] then returns the reason.
#[must_use]
pub fn judge_ended_job(report: &JobReport) -> Option<Verdict> {
    let usage = &report.usage;
    if why_not_judged(report).is_some() {
        return None;
    }
    let measured_ns = usage.sampled_with_pus_ns();
    let awake_ns = measured_ns.saturating_sub(usage.asleep_ns);
    let is_well_used =
        report.mean_used_pus_permille() * 1000 >= WELL_USED_PERMILLE * report.mean_held_cores_permille();
    let is_asleep = is_share(usage.asleep_ns, measured_ns, MOST_PERMILLE);
    let kind = if is_share(usage.bound_ns, measured_ns, SLOWED_PERMILLE) {
        VerdictKind::Bound
    } else if is_share(usage.crowded_ns, awake_ns, MOST_PERMILLE) && !is_asleep {
        VerdictKind::Oversubscribed
    } else if is_share(usage.displaced_ns, measured_ns, SLOWED_PERMILLE) {
        VerdictKind::Waiting
    } else if is_well_used {
        VerdictKind::Fine
    } else if is_asleep {
        VerdictKind::Waiting
    } else if usage.cores_max >= 2 {
        VerdictKind::Serial
    } else {
        VerdictKind::Fine
    };
    let advice = match kind {
        VerdictKind::Fine => Vec::new(),
        VerdictKind::Serial => serial_advice(report),
        VerdictKind::Oversubscribed => vec![oversubscribed_advice(report)],
        VerdictKind::Bound => vec![bound_advice(report)],
        VerdictKind::Waiting => waiting_advice(report),
    };
    Some(Verdict { kind, advice })
}

/// Returns a short text about an ended job, which pjw reports as an event to users. The text says how long the job ran,
/// how much CPU time it used, and how many of its cores it used on average while it held cores. If the job held no core
/// for some time, the text says for how long.
///
/// `verdict` is pjw's verdict on how well the job used its cores. If there is a verdict, the text begins with the name
/// of the verdict, such as `serial`. The text then ends with the first advice of the verdict, if the verdict has any
/// advice.
#[must_use]
pub fn ended_job_summary(report: &JobReport, verdict: Option<&Verdict>) -> String {
    let used = Tenths(report.mean_used_pus_permille());
    let (wall, cpu) = (seconds(report.wall_ns), seconds(report.usage.cpu_ns));
    let held = cores(u64::from(report.usage.cores_max));
    let without_ns = report.usage.without_pus_ns;
    let figures = if without_ns < MIN_NAMED_NS {
        format!("ran for {wall} and used {cpu} of CPU time, {used} of {held} on average")
    } else if report.usage.held_ns == 0 {
        format!("ran for {wall} without a core and used {cpu} of CPU time")
    } else {
        let without = seconds(without_ns);
        format!(
            "ran for {wall}, {without} of it without a core, and used {cpu} of CPU time, {used} of {held} on average"
        )
    };
    match verdict {
        None => figures,
        Some(Verdict { kind, advice }) => match advice.first() {
            None => format!("{}: {figures}", kind.name()),
            Some(advice) => format!("{}: {figures}. {}", kind.name(), advice.trim_end_matches('.')),
        },
    }
}

/// Returns the advice for a job that left many of its cores unused: request fewer cores, or use more threads in the
/// part in which one thread ran alone.
fn serial_advice(report: &JobReport) -> Vec<String> {
    let usage = &report.usage;
    let held = u64::from(usage.cores_max);
    let mean = report.mean_used_pus_permille();
    // The PUs that sufficed for nearly all of the time. If the job held no more than these, the mean is proposed.
    let used_most = usage.levels.upper_quantile(50, u64::from(usage.pus_max) * 1000);
    let rounded_up = |permille: u64| permille.saturating_sub(TOLERATED_PERMILLE).div_ceil(1000).max(1);
    let needed = rounded_up(used_most);
    let needed = if needed < held { needed } else { rounded_up(mean).min(held) };
    let used = format!("Of {} {} were used", cores(held), Tenths(mean));
    let option = option_for_cores(&report.id, needed, usage);
    let measured_ns = usage.sampled_with_pus_ns();
    if usage.serial_ns == 0 || usage.serial_ns >= measured_ns / 10 * 9 {
        let ask = option.map(|option| format!(": ask for {option}")).unwrap_or_default();
        return vec![format!("{used}{ask}.")];
    }
    let serial_part =
        format!("for {} of {} one thread ran alone", seconds(usage.serial_ns), seconds(measured_ns));
    let ask = option.map(|option| format!(", or ask for {option}")).unwrap_or_default();
    vec![format!("{used}: {serial_part}. Let more threads do that part{ask}.")]
}

/// Returns the advice for a job in which more threads wanted to run than the job had PUs: start fewer threads or
/// processes, or request more cores.
fn oversubscribed_advice(report: &JobReport) -> String {
    let usage = &report.usage;
    let held = cores(u64::from(usage.cores_max));
    let ask = |threads: u64| {
        let needed = threads.div_ceil(threads_per_core(usage));
        let option = option_for_more_cores(&report.id, needed, usage);
        option.map(|option| format!(", or ask for {option}")).unwrap_or_default()
    };
    // A job with short processes may have many hot threads for a moment.
    if is_share(usage.crowded_threads.total_ns(), usage.crowded_ns, MOST_PERMILLE) {
        // The median, because threads that start or end one after the other change the mean.
        let threads = usage.crowded_threads.upper_quantile(500, u64::from(usage.threads_max));
        return format!(
            "{threads} threads want to run on {held}: set OMP_NUM_THREADS={} (divided by the number of ranks, if there are several) or \
             the program's own number of threads{}.",
            usage.cores_max,
            ask(threads)
        );
    }
    // Few threads ran long enough to be called hot: these are processes that end soon.
    let threads = rounded(usage.crowded_wanted_ns, usage.crowded_ns);
    format!(
        "On average {threads} threads of short processes want to run on {held}: start no more at a time than the job has CPUs \
         (make -j{}){}.",
        usage.pus_max,
        ask(threads)
    )
}

/// Returns the advice for a job whose threads waited although cores of the job were idle. The program, or its
/// launcher, had bound these threads to other cores.
fn bound_advice(report: &JobReport) -> String {
    let usage = &report.usage;
    format!(
        "For {} of {} threads waited beside idle cores because their own program or its launcher had bound them: do not bind \
         them, or to different cores each ({}OMP_PROC_BIND=false, mpirun --bind-to none).",
        seconds(usage.bound_ns),
        seconds(usage.sampled_with_pus_ns()),
        launcher_options(&report.id, usage)
    )
}

/// Returns the options with which a task gets enough CPUs for its threads, or is not bound at all. A task is a
/// process that the batch system starts for the job. The text is the beginning of a list of options for the system
/// that started the job. Empty if a user of this system has no such option.
fn launcher_options(job: &JobId, usage: &JobUsage) -> String {
    let tasks = usage.tasks.map_or(1, u64::from).max(1);
    let (pus_per_task, cores_per_task) =
        (u64::from(usage.pus_max) / tasks, u64::from(usage.cores_max) / tasks);
    match job.source() {
        // Since Slurm 22.05, srun does not take --cpus-per-task from sbatch: a task then has one CPU.
        JobSource::Slurm if pus_per_task > 1 => {
            format!("`srun --cpus-per-task={pus_per_task}`, `srun --cpu-bind=none`, ")
        }
        JobSource::Slurm => "`srun --cpu-bind=none`, ".to_owned(),
        JobSource::Flux => "`-o cpu-affinity=off`, ".to_owned(),
        JobSource::Lsf if cores_per_task > 1 => format!("`-R \"affinity[core({cores_per_task})]\"`, "),
        JobSource::Sge => "no `-binding`, ".to_owned(),
        JobSource::Lsf
        | JobSource::Pbs
        | JobSource::Condor
        | JobSource::Oar
        | JobSource::Manual
        | JobSource::Session => String::new(),
    }
}

/// Returns the advice for a job that waited for much of its time. Either its threads waited for cores that other
/// programs used, or none of its threads ran. In the latter case, the advice is to request fewer cores, if that is
/// possible.
fn waiting_advice(report: &JobReport) -> Vec<String> {
    let usage = &report.usage;
    let measured_ns = usage.sampled_with_pus_ns();
    let is_displaced = is_share(usage.displaced_ns, measured_ns, SLOWED_PERMILLE);
    if is_displaced && report.is_borrower {
        return vec![format!(
            "For {} of {} threads waited for cores that the job had borrowed and that other programs used: a job of the class \
             normal has cores of its own.",
            seconds(usage.displaced_ns),
            seconds(measured_ns)
        )];
    }
    if is_displaced {
        return vec![format!(
            "For {} of {} threads waited for cores of their own job that other programs used: tell the administrator \
             (pjwctl doctor names such programs).",
            seconds(usage.displaced_ns),
            seconds(measured_ns)
        )];
    }
    let slept = format!(
        "For {} of {} no thread ran: the job waited for files, the network or other processes",
        seconds(usage.asleep_ns),
        seconds(measured_ns)
    );
    if usage.cores_max < 2 {
        return vec![format!("{slept}, not for its core.")];
    }
    let needed = report.mean_used_pus_permille().div_ceil(1000).clamp(1, u64::from(usage.cores_max));
    let option = option_for_cores(&report.id, needed, usage);
    let ask =
        option.map(|option| format!(" If that can't be changed, ask for {option}.")).unwrap_or_default();
    vec![format!("{slept}.{ask}")]
}

/// Returns the option by which a user requests `needed` cores from the system that started the job. Returns `None` if
/// the job held `needed` or fewer cores, or if no option of the system leads to fewer cores.
fn option_for_cores(job: &JobId, needed: u64, usage: &JobUsage) -> Option<String> {
    if needed >= u64::from(usage.cores_max) {
        return None;
    }
    let cpus = needed * threads_per_core(usage);
    match job.source() {
        JobSource::Slurm => {
            let options = ["--cpus-per-task", "--ntasks-per-node"];
            option_for_tasks(options, cpus, u64::from(usage.pus_max), usage.tasks)
        }
        JobSource::Flux => {
            let options = ["--cores-per-task", "--tasks-per-node"];
            option_for_tasks(options, needed, u64::from(usage.cores_max), usage.tasks)
        }
        source => Some(option_for_job(source, needed, cpus)),
    }
}

/// Returns the option by which a user requests `needed` cores from the system that started the job. Returns `None` if
/// the job held `needed` or more cores.
fn option_for_more_cores(job: &JobId, needed: u64, usage: &JobUsage) -> Option<String> {
    if needed <= u64::from(usage.cores_max) {
        return None;
    }
    let cpus = needed * threads_per_core(usage);
    Some(match job.source() {
        JobSource::Slurm => option_per_task("--cpus-per-task", cpus, usage.tasks),
        JobSource::Flux => option_per_task("--cores-per-task", needed, usage.tasks),
        source => option_for_job(source, needed, cpus),
    })
}

/// Returns the option that requests cores for a whole job from the system `source`. `needed` is the number of cores,
/// and `cpus` the number of their hardware threads, which PBS counts.
fn option_for_job(source: JobSource, needed: u64, cpus: u64) -> String {
    match source {
        JobSource::Pbs => format!("`-l select=1:ncpus={cpus}`"),
        JobSource::Lsf => format!("`-n {needed}`"),
        JobSource::Sge => format!("`-pe NAME {needed}`, with the name of the parallel environment"),
        JobSource::Condor => format!("`request_cpus = {needed}`"),
        JobSource::Oar => format!("`-l core={needed}`"),
        JobSource::Slurm | JobSource::Flux | JobSource::Manual | JobSource::Session => {
            format!("`--cores {needed}`")
        }
    }
}

/// The option of a system that counts CPUs for each task, for `needed` CPUs of all tasks on this node. Slurm counts
/// hardware threads where a core has several.
fn option_per_task(per_task: &str, needed: u64, tasks: Option<u32>) -> String {
    let Some(tasks) = tasks.map(u64::from).filter(|&tasks| tasks > 0) else {
        return format!(
            "`{per_task}={needed}`, divided by the number of tasks on a node, if there are several"
        );
    };
    let of_tasks = if tasks > 1 { format!(" for each of {tasks} tasks") } else { String::new() };
    format!("`{per_task}={}`{of_tasks}", needed.div_ceil(tasks))
}

/// Returns the option that requests fewer CPUs from a batch system that counts CPUs for each task. A task is a
/// process that the batch system starts for the job. If possible, the option requests fewer CPUs for each task.
/// Otherwise, it requests fewer tasks. Returns `None` if neither is possible.
///
/// - `per_task` is the name of the option for the CPUs of a task.
/// - `of_tasks` is the name of the option for the number of tasks on a node.
/// - `needed` and `held` are the needed and the held number of CPUs of all tasks on this node.
/// - `tasks` is the number of the tasks on this node. If it is unknown, the user is to divide `needed` by the number.
fn option_for_tasks(
    [per_task, of_tasks]: [&str; 2],
    needed: u64,
    held: u64,
    tasks: Option<u32>,
) -> Option<String> {
    if needed >= held {
        return None;
    }
    let Some(count) = tasks.map(u64::from).filter(|&tasks| tasks > 0) else {
        return Some(option_per_task(per_task, needed, None));
    };
    let held_per_task = held / count;
    if needed.div_ceil(count) < held_per_task {
        return Some(option_per_task(per_task, needed, tasks));
    }
    // Each task already has as few CPUs as it needs, so only fewer tasks need fewer CPUs.
    let fewer = needed.div_ceil(held_per_task.max(1));
    (fewer < count).then(|| format!("`{of_tasks}={fewer}`"))
}

/// The number of PUs of a core.
fn threads_per_core(usage: &JobUsage) -> u64 {
    let (pus, cores) = (u64::from(usage.pus_max), u64::from(usage.cores_max));
    pus.div_ceil(cores.max(1)).max(1)
}

/// A quotient, rounded to the nearest number. 0 if `by` is 0.
fn rounded(part: u64, by: u64) -> u64 {
    part.saturating_add(by / 2) / by.max(1)
}

/// Whether `part` is at least `permille` of `whole`.
fn is_share(part: u64, whole: u64, permille: u64) -> bool {
    part > 0 && u128::from(part) * 1000 >= u128::from(whole) * u128::from(permille)
}

fn cores(count: u64) -> String {
    words::counted_noun(usize::try_from(count).unwrap_or(usize::MAX), "core")
}

/// Returns a time as text. It is first rounded to milliseconds, as in the report that `pjwctl report` prints.
fn seconds(ns: u64) -> String {
    duration_text(ns.saturating_add(500_000) / 1_000_000)
}

/// A number in permille, printed with one digit after the point.
struct Tenths(u64);

impl fmt::Display for Tenths {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tenths = self.0.saturating_add(50) / 100;
        write!(f, "{}.{}", tenths / 10, tenths % 10)
    }
}

#[cfg(test)]
mod tests;
