//! Slurm: `slurmstepd.scope/job_<id>/step_<S>/user/task_<N>` (v2, the scope's name with the node's in front where
//! several slurmd run), `slurm/uid_<uid>/job_<id>` (v1), `s<13 characters>` instead of `job_<id>` from 26.05 on.
//! Counts are logical CPUs. `step_*/slurm` and `<scope>/system` hold slurmstepd.

use pjw_core::job::{Amount, Source};
use pjw_core::snapshot::OwnUnit;

use crate::path::{pieces, place};
use crate::{Host, Place, Scheduler, Variables, count, value};

pub(crate) const SLURM: Scheduler = Scheduler {
    source: Source::Slurm,
    launchers: &["slurmstepd"],
    variables: &[
        "SLURM_JOB_ID",
        "SLURM_JOBID",
        "SLURM_CPUS_ON_NODE",
        "SLURM_JOB_CPUS_PER_NODE",
        "SLURM_JOB_NODELIST",
        "SLURMD_NODENAME",
        "SLURM_STEP_ID",
    ],
    place: find,
    name,
    amount,
    own: OwnUnit::Nothing,
};

fn find(path: &str) -> Option<Place> {
    let (mut inside, mut job) = (false, None);
    for (piece, upto) in pieces(path) {
        if job.is_none() {
            if inside && let Some(name) = job_name(piece) {
                job = place(upto, name);
            }
            inside |= is_scope(piece);
        } else if piece == "slurm" && upto.contains("/step_") {
            job = job.map(|job| Place { helpers: true, ..job });
        }
    }
    job
}

fn is_scope(piece: &str) -> bool {
    let v2 = piece == "slurmstepd.scope" || piece.ends_with("_slurmstepd.scope");
    v2 || piece == "slurm" || piece.starts_with("slurm_")
}

fn job_name(piece: &str) -> Option<&str> {
    if let Some(id) = piece.strip_prefix("job_") {
        return Some(id).filter(|id| !id.is_empty() && id.bytes().all(|byte| byte.is_ascii_digit()));
    }
    // Crockford's base 32: no i, l, o, u.
    let is_digit =
        |byte: u8| byte.is_ascii_digit() || (byte.is_ascii_uppercase() && !b"ILOU".contains(&byte));
    let sluid = piece.strip_prefix('s').filter(|digits| digits.len() == 13);
    sluid.filter(|digits| digits.bytes().all(is_digit)).map(|_| piece)
}

fn name(variables: &Variables) -> Option<String> {
    value(variables, "SLURM_JOB_ID").or_else(|| value(variables, "SLURM_JOBID")).map(str::to_owned)
}

/// The job's own count first: `SLURM_CPUS_ON_NODE` is the step's in a step, and the job's only in the batch script.
fn amount(variables: &Variables, host: &Host) -> Option<Amount> {
    let list = value(variables, "SLURM_JOB_CPUS_PER_NODE").and_then(|counts| {
        let node = value(variables, "SLURMD_NODENAME").unwrap_or(&host.name);
        let position = match value(variables, "SLURM_JOB_NODELIST") {
            Some(list) => count::position(list, node).ok()?,
            None if counts.contains([',', '(']) => return None,
            None => 0,
        };
        count::repeated(counts, position).ok()
    });
    let of_batch = || {
        let in_batch = value(variables, "SLURM_STEP_ID").is_none();
        value(variables, "SLURM_CPUS_ON_NODE").filter(|_| in_batch).and_then(|text| count::number(text).ok())
    };
    list.or_else(of_batch).map(Amount::Pus)
}
