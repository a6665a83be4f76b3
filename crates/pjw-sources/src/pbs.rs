//! OpenPBS, PBS Professional and Torque: a session per job under pbs_mom; with the cgroups hook
//! `pbs_jobs.service/jobid/<id>` (v1), with Torque `torque/<id>`. Ids are raw: `123.server`, `124[3].server`.

use pjw_core::job::{Amount, Source};
use pjw_core::snapshot::OwnUnit;

use crate::path::{pieces, place};
use crate::{Host, Place, Scheduler, Variables, count, value};

pub(crate) const PBS: Scheduler = Scheduler {
    source: Source::Pbs,
    launchers: &["pbs_mom"],
    variables: &["PBS_JOBID", "NCPUS", "PBS_NUM_PPN", "PBS_NUM_NODES"],
    place: find,
    name,
    amount,
    own: OwnUnit::Session,
};

fn find(path: &str) -> Option<Place> {
    let mut before = ["", ""];
    for (piece, upto) in pieces(path) {
        let numbered = piece.starts_with(|first: char| first.is_ascii_digit());
        let hook = before[1] == "jobid" && before[0].starts_with("pbs_jobs");
        if numbered && (hook || before[1] == "torque") {
            return place(upto, piece);
        }
        before = [before[1], piece];
    }
    None
}

fn name(variables: &Variables) -> Option<String> {
    value(variables, "PBS_JOBID").map(str::to_owned)
}

/// Torque says how many processors each node gives. OpenPBS's `NCPUS` is that of the first chunk only, which is
/// this host's count where the job has one chunk; it is never more than the job has here.
fn amount(variables: &Variables, _host: &Host) -> Option<Amount> {
    let text = value(variables, "PBS_NUM_PPN").or_else(|| value(variables, "NCPUS"))?;
    count::number(text).ok().map(Amount::Cores)
}
