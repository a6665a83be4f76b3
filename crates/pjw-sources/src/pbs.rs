//! OpenPBS, PBS Professional, Torque.
//!
//! Ids are taken raw, server name included: `123.server`, `124[3].server` for members of arrays. Cgroups:
//! OpenPBS's hook makes `<prefix>.service/jobid/<id>` (v1; the prefix is `pbs_jobs` unless its
//! configuration says otherwise), Torque `torque/<id>`. pbs_mom starts every task in a session of its own,
//! so a session belongs to one job.
//!
//! Cores: OpenPBS sets `NCPUS` to the threads of the job's *first chunk*, not of its share of the node:
//! under `select=4:ncpus=1` four processes would end up on one core. It is therefore not read. (The cgroup
//! hook's cpuset tells, or a count from pjw's own hook.) Torque's `PBS_NUM_PPN` is the share of a node when
//! the job has one node and `PBS_NP`, the job's total, agrees.

use pjw_core::job::{Amount, JobId, Source};
use pjw_core::snapshot::OwnUnit;

use crate::Host;
use crate::system::{Environ, Place, Sight, System, Ticket, plausible};

pub(crate) const SYSTEM: System = System {
    source: Source::Pbs,
    launchers: &["pbs_mom"],
    variables: &["PBS_JOBID", "PBS_NUM_PPN", "PBS_NUM_NODES", "PBS_NP"],
    own: OwnUnit::Session,
    place,
    ticket,
};

fn place(sight: &Sight<'_>) -> Option<Place> {
    let parts = sight.parts;
    (0..parts.len()).find_map(|at| {
        let depth = match (parts[at], parts.get(at + 1)) {
            ("torque", _) => at + 1,
            (service, Some(&"jobid")) if service.ends_with(".service") => at + 2,
            _ => return None,
        };
        Some(Place::job(job(parts.get(depth)?)?, depth))
    })
}

fn ticket(environ: Environ<'_>, _host: &Host) -> Option<Ticket> {
    let job = job(environ.get("PBS_JOBID")?)?;
    let share = environ.number("PBS_NUM_PPN");
    let whole =
        share.is_some() && environ.number("PBS_NP") == share && environ.number("PBS_NUM_NODES") == Some(1);
    let amount = share.filter(|_| whole).and_then(plausible).map(Amount::Cores);
    Some(Ticket { amount, ..Ticket::of(job) })
}

fn job(id: &str) -> Option<JobId> {
    let number = id.split(['[', '.', '-']).next()?;
    crate::system::plain_number(number)?;
    JobId::new(Source::Pbs, id).ok()
}
