//! Grid Engine and its descendants: a session per job under sge_shepherd; with cgroups `sge/<job>.<task>/…` (v1),
//! `sge-<job>.<task>.scope` (systemd), or Gridware's `<S>.<job>[.<task>][.master].scope` in `<S>-jobs.slice`.
//!
//! The extra supplementary group marks every process of a job, but its number doesn't name the job; pairing the
//! two needs execd's spool, which is not read here.

use pjw_core::job::{Amount, Source};
use pjw_core::snapshot::OwnUnit;

use crate::path::{pieces, place};
use crate::{Host, Place, Scheduler, Variables, count, value};

pub(crate) const SGE: Scheduler = Scheduler {
    source: Source::Sge,
    launchers: &["sge_shepherd"],
    variables: &["JOB_ID", "SGE_TASK_ID", "NSLOTS", "NHOSTS", "SGE_ROOT"],
    place: find,
    name,
    amount,
    own: OwnUnit::Session,
};

fn find(path: &str) -> Option<Place> {
    let mut before = "";
    for (piece, upto) in pieces(path) {
        let unit = piece.strip_suffix(".scope").or_else(|| piece.strip_suffix(".service"));
        let systemd = unit.and_then(|unit| unit.strip_prefix("sge-"));
        let gridware =
            before.strip_suffix("-jobs.slice").and_then(|cell| unit?.strip_prefix(cell)?.strip_prefix('.'));
        let plain = (before == "sge").then_some(piece);
        if let Some(name) = systemd.or(gridware).or(plain).and_then(job_and_task) {
            return place(upto, &name);
        }
        // Gridware may nest one slice per job in the slice of all jobs.
        if !before.ends_with("-jobs.slice") || !piece.ends_with(".slice") {
            before = piece;
        }
    }
    None
}

/// `<job>` or `<job>.<task>`, with whatever follows cut off; task 1 of a job that is no array is no task.
fn job_and_task(text: &str) -> Option<String> {
    let mut parts = text.split(['.', '-']);
    let numeric = |part: &&str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
    let job = parts.next().filter(numeric)?;
    Some(match parts.next().filter(numeric) {
        Some(task) if task != "1" => format!("{job}.{task}"),
        _ => job.to_owned(),
    })
}

fn name(variables: &Variables) -> Option<String> {
    // JOB_ID is too common a name to mean Grid Engine by itself.
    value(variables, "SGE_ROOT")?;
    let job = value(variables, "JOB_ID")?;
    match value(variables, "SGE_TASK_ID") {
        None | Some("undefined" | "1") => Some(job.to_owned()),
        Some(task) => Some(format!("{job}.{task}")),
    }
}

/// `NSLOTS` counts the whole job, so it counts here only if the job has no other host.
fn amount(variables: &Variables, _host: &Host) -> Option<Amount> {
    let alone = value(variables, "NHOSTS") == Some("1");
    let slots = value(variables, "NSLOTS").filter(|_| alone)?;
    count::number(slots).ok().map(Amount::Cores)
}
