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
//! With `ConstrainCores=no` Slurm enables the cpuset controller down to the tasks and leaves `job_<id>/cpuset.cpus`
//! alone for good, so that the warden may write there; with `yes` it writes it before each step, and that is the grant
//! (observed with 22.05.8).
//!
//! An array's member has a job id of its own, so the array's variables are not needed.
//! `SLURM_JOB_CPUS_PER_NODE` (as `72(x2),36`, one count per name in `SLURM_JOB_NODELIST`) counts for the
//! job; `SLURM_CPUS_ON_NODE` counts for the *step*, which is the job only where there is no step number: in
//! a batch script. Both count what Slurm calls CPUs, which are logical where it was told of several threads
//! per core. (A site that tells Slurm of cores only, on a machine with several threads per core, should set
//! the count in the hook.)

use pjw_core::job::{Amount, JobId, Source};
use pjw_core::snapshot::OwnUnit;

use crate::announcement::Flaw;
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
    narrowable: true,
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
    let (job, alias) = ids(environ).ok()?;
    let count = count_of_job(environ, host).ok().or_else(|| count_of_batch_step(environ));
    Some(Ticket { job, alias, amount: count.and_then(plausible).map(Amount::Pus) })
}

/// The job's CPUs on this node, if the variables agree with each other.
pub(crate) fn count_of_job(environ: Environ<'_>, host: &Host) -> Result<u32, Flaw> {
    count_here(environ, host, "SLURM_JOB_CPUS_PER_NODE", ["SLURM_JOB_NODELIST", "SLURM_NODELIST"])
}

/// What a list of counts has for this node, which is looked up in the first of these lists of nodes that is set.
pub(crate) fn count_here(
    environ: Environ<'_>,
    host: &Host,
    variable: &'static str,
    lists: [&'static str; 2],
) -> Result<u32, Flaw> {
    let counts = environ.need(variable)?;
    let bad = |why| Flaw::Counts { variable, why };
    if let Some(count) = counts::same_on_every_node(counts).map_err(bad)? {
        return Ok(count);
    }
    let set = lists.into_iter().find_map(|list| Some((list, environ.get(list)?)));
    let (list, nodes) = set.ok_or(Flaw::Missing { variable: lists[0] })?;
    let name = environ.get("SLURMD_NODENAME").unwrap_or(&host.name);
    let position = hostlist::find(nodes, name).map_err(|why| Flaw::Nodes { variable: list, why })?;
    let index = position
        .index
        .ok_or_else(|| Flaw::NotHere { variable: list, host: crate::announcement::shown(name) })?;
    counts::at_position(counts, index, position.of).map_err(bad)
}

/// The job's number, and its SLUID where it is told.
pub(crate) fn ids(environ: Environ<'_>) -> Result<(JobId, Option<JobId>), Flaw> {
    let (variable, number) = environ.first(["SLURM_JOB_ID", "SLURM_JOBID"])?;
    let flaw = || Flaw::NotAnId { variable, value: crate::announcement::shown(number) };
    let job =
        plain_number(number).and_then(|number| JobId::new(Source::Slurm, number).ok()).ok_or_else(flaw)?;
    let alias =
        environ.get("SLURM_JOB_SLUID").and_then(sluid).and_then(|id| JobId::new(Source::Slurm, id).ok());
    Ok((job, alias))
}

fn count_of_batch_step(environ: Environ<'_>) -> Option<u32> {
    let in_step = environ.get("SLURM_STEP_ID").or_else(|| environ.get("SLURM_STEPID")).is_some();
    let told = environ.get("SLURM_JOB_CPUS_PER_NODE").is_some();
    (!in_step && !told).then(|| environ.number("SLURM_CPUS_ON_NODE"))?
}
