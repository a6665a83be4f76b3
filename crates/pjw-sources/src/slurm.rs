//! Slurm 22.05 to 26.05.
//!
//! Cgroups, below anything: v2 `[<node>_]slurmstepd.scope/job_<id>/step_<S>/{slurm,user/task_<T>}`, v1
//! `slurm[_<node>]/uid_<uid>/job_<id>/step_<S>`. From 26.05 on the v2 directory is named by the SLUID, `s`
//! and 13 characters of Crockford's base32, unless `CgroupJobIdPaths=yes` (cgroup.conf(5)): the job then
//! goes by that name, since the number stands only in the environment, which could name any job.
//!
//! `<scope>/system` and `step_<S>/slurm` hold slurmstepd alone. The step `extern` holds a `sleep` of
//! root's, known by its command line; a user's own `sleep` of that kind there is told apart by its user, in
//! pjw-core.
//!
//! An array's member has a job id of its own, so the array's variables are not needed.
//! `SLURM_JOB_CPUS_PER_NODE` (as `72(x2),36`, one count per name in `SLURM_JOB_NODELIST`) counts for the
//! job; `SLURM_CPUS_ON_NODE` counts for the *step*, which is the job only where there is no step number: in
//! a batch script. Both count what Slurm calls CPUs, which are logical where it was told of several threads
//! per core. (A site that tells Slurm of cores only, on a machine with several threads per core, should set
//! the count in the hook.)

use pjw_core::job::{Amount, JobId, Source};
use pjw_core::snapshot::OwnUnit;

use crate::system::{Environ, Place, Sight, System, Ticket, plain_number, plausible};
use crate::{Host, counts, hostlist};

pub(crate) const SYSTEM: System = System {
    source: Source::Slurm,
    launchers: &["slurmstepd"],
    variables: &[
        "SLURM_JOB_ID",
        "SLURM_JOBID",
        "SLURM_JOB_SLUID",
        "SLURM_STEP_ID",
        "SLURM_STEPID",
        "SLURM_SCRIPT_CONTEXT",
        "SLURM_JOB_CPUS_PER_NODE",
        "SLURM_JOB_NODELIST",
        "SLURM_NODELIST",
        "SLURMD_NODENAME",
        "SLURM_CPUS_ON_NODE",
    ],
    own: OwnUnit::Nothing,
    place,
    ticket,
};

/// How long the placeholder of the step `extern` sleeps.
const PLACEHOLDER: &str = "sleep 100000000";

fn place(sight: &Sight<'_>) -> Option<Place> {
    let parts = sight.parts;
    (0..parts.len()).find_map(|at| {
        let below = |n: usize| parts.get(at + n).copied();
        let unified = parts[at] == "slurmstepd.scope" || parts[at].ends_with("_slurmstepd.scope");
        let legacy = parts[at] == "slurm" || parts[at].starts_with("slurm_");
        if (unified || legacy) && below(1) == Some("system") {
            return Some(Place::Staff { depth: at + 1 });
        }
        let levels = match below(1)?.strip_prefix("uid_") {
            None if unified => 1,
            Some(user) if legacy && user.parse::<u32>().is_ok() => 2,
            _ => return None,
        };
        let job = job_of_directory(below(levels)?, unified)?;
        let depth = at + levels;
        let step = below(levels + 1).and_then(|part| part.strip_prefix("step_"));
        if unified && step.is_some() && below(levels + 2) == Some("slurm") {
            return Some(Place::Staff { depth: depth + 2 });
        }
        let placeholder = sight.comm.as_bytes() == b"sleep" && sight.command_line.trim_end() == PLACEHOLDER;
        Some(Place::Job { job, depth, helper: placeholder && step == Some("extern") })
    })
}

fn job_of_directory(name: &str, unified: bool) -> Option<JobId> {
    let id = match name.strip_prefix("job_") {
        Some(number) => plain_number(number)?,
        None => sluid(name).filter(|_| unified)?,
    };
    JobId::new(Source::Slurm, id).ok()
}

/// The text, if it is a Slurm-wide unique id as Slurm writes it: Crockford's alphabet has no I, L, O and U.
fn sluid(text: &str) -> Option<&str> {
    let digits = text.strip_prefix('s')?;
    let crockford = |byte: u8| byte.is_ascii_alphanumeric() && !b"ILOU".contains(&byte.to_ascii_uppercase());
    (digits.len() == 13 && digits.bytes().all(crockford)).then_some(text)
}

fn ticket(environ: Environ<'_>, host: &Host) -> Option<Ticket> {
    // The node's prolog and epilog run for the job, not in it.
    if let Some("prolog_slurmd" | "epilog_slurmd") = environ.get("SLURM_SCRIPT_CONTEXT") {
        return None;
    }
    let number = environ.get("SLURM_JOB_ID").or_else(|| environ.get("SLURM_JOBID"))?;
    let job = JobId::new(Source::Slurm, plain_number(number)?).ok()?;
    let alias =
        environ.get("SLURM_JOB_SLUID").and_then(sluid).and_then(|id| JobId::new(Source::Slurm, id).ok());
    let count = count_of_job(environ, host).or_else(|| count_of_batch_step(environ));
    Some(Ticket { job, alias, amount: count.and_then(plausible).map(Amount::Pus) })
}

/// The job's CPUs on this node, if the variables agree with each other.
fn count_of_job(environ: Environ<'_>, host: &Host) -> Option<u32> {
    let counts = environ.get("SLURM_JOB_CPUS_PER_NODE")?;
    if let Some(count) = counts::same_on_every_node(counts).ok()? {
        return Some(count);
    }
    let nodes = environ.get("SLURM_JOB_NODELIST").or_else(|| environ.get("SLURM_NODELIST"))?;
    let name = environ.get("SLURMD_NODENAME").unwrap_or(&host.name);
    let position = hostlist::find(nodes, name).ok()?;
    counts::at_position(counts, position.index?, position.of).ok()
}

fn count_of_batch_step(environ: Environ<'_>) -> Option<u32> {
    let in_step = environ.get("SLURM_STEP_ID").or_else(|| environ.get("SLURM_STEPID")).is_some();
    let told = environ.get("SLURM_JOB_CPUS_PER_NODE").is_some();
    (!in_step && !told).then(|| environ.number("SLURM_CPUS_ON_NODE"))?
}
