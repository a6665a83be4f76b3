//! pjw-sources recognises: what the marks that a batch system leaves on a process mean.
//!
//! One file per batch system (`SYSTEMS` is the table), each with the shapes of its cgroups, its
//! variables, the names of its launchers and the way it writes down core counts. Everything is pure: marks
//! in, claims out.
//!
//! A claim is not a verdict. A *place* (cgroup) can't be chosen by a job's user and weighs much; the
//! environment can be set by anyone and weighs little; names of programs are free. pjw-core weighs them,
//! with the user of the process, which is not known here. What a batch system can't be asked through these
//! marks is left open: an unknown core count is `None`, an id that [`pjw_core::job::JobId`] doesn't allow
//! makes no claim.
//!
//! `docs/sources.md` lists all of it in one table.
#![forbid(unsafe_code)]

pub mod announcement;
mod condor;
pub mod counts;
mod flux;
pub mod hostlist;
mod lsf;
mod oar;
mod pbs;
mod place;
pub mod service;
mod sge;
mod slurm;
pub mod slurm_conf;
mod system;
pub mod task;

use std::collections::BTreeSet;

use pjw_core::job::Source;
use pjw_core::process::{Comm, Uid};
use pjw_core::snapshot::{Claim, Claims, Mark, Marks, Role};

use place::CgroupPath;
use system::{Environ, Place, Sight, System, Ticket};

/// The batch systems that are recognised, in the order of [`Source::ALL`].
const SYSTEMS: [System; 7] =
    [slurm::SYSTEM, lsf::SYSTEM, pbs::SYSTEM, sge::SYSTEM, condor::SYSTEM, flux::SYSTEM, oar::SYSTEM];

/// What has to be known of this machine to read the marks.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Host {
    /// Its name, short or full: `n1` and `n1.example.org` match each other.
    pub name: String,
    /// The user that Flux's system instance runs as (usually called `flux`), if there is one. Only under
    /// this user's service manager, and root's, are cgroups believed: any other user makes up what names he
    /// likes there.
    pub flux_user: Option<Uid>,
}

/// The environment variables that have to be read of each process, those of all batch systems.
#[must_use]
pub fn wanted_variables() -> BTreeSet<&'static str> {
    SYSTEMS.iter().flat_map(|system| system.variables).copied().collect()
}

/// The batch systems in whose job directories the warden may narrow the cpuset.
#[must_use]
pub fn narrowable() -> BTreeSet<Source> {
    SYSTEMS.iter().filter(|system| system.narrowable).map(|system| system.source).collect()
}

/// The batch system whose launcher has this name. By name only, which a user can give to any program:
/// whether the process may be believed depends on its user.
#[must_use]
pub fn launcher(comm: &Comm) -> Option<Source> {
    let is_launcher =
        |system: &&System| system.launchers.iter().any(|name| name.as_bytes() == comm.as_bytes());
    SYSTEMS.iter().find(is_launcher).map(|system| system.source)
}

/// What the marks on a process mean: what it is to a batch system, and the jobs that it says it belongs to.
/// Systems that are not `enabled` are not looked for.
///
/// There is at most one cgroup claim, and it stands first. The outermost directory counts, since whatever
/// is below a job's own directory may have been made by the job. The environment claims follow, at most one
/// per system, but none that contradicts the cgroup: who sits in job 5 and exports the number of job 6 is
/// in job 5. A count of cores is taken from the environment, for the cgroup claim too if both name the same
/// job.
#[must_use]
pub fn recognise(comm: &Comm, marks: &Marks, host: &Host, enabled: &BTreeSet<Source>) -> Claims {
    let systems: Vec<&System> = SYSTEMS.iter().filter(|system| enabled.contains(&system.source)).collect();
    let launcher = launcher(comm).filter(|source| enabled.contains(source));
    let place = place_of(&systems, comm, marks, host);

    let role = match (launcher, &place) {
        (Some(source), _) => Role::Launcher(source),
        (None, Some((source, Found { place: Place::Staff { .. }, .. }))) => Role::Helper(*source),
        (None, Some((source, Found { place: Place::Job { helper: true, .. }, .. }))) => Role::Helper(*source),
        (None, _) => Role::Ordinary,
    };
    let place = match place {
        // Where only the scheduler's own processes are, nothing names a job.
        Some((_, Found { place: Place::Staff { .. }, .. })) => return Claims { role, claims: Vec::new() },
        Some((_, Found { place: Place::Job { job, .. }, directory })) => Some((job, directory)),
        None => None,
    };

    let tickets: Vec<(Ticket, &System)> = systems
        .into_iter()
        .filter_map(|system| Some(((system.ticket)(Environ::new(system, marks), host)?, system)))
        .collect();
    let mut claims = Vec::new();
    if let Some((job, directory)) = &place {
        let amount = tickets
            .iter()
            .find(|(ticket, _)| ticket.names(job))
            .and_then(|(ticket, _)| ticket.amount.clone());
        claims.push(Claim { job: job.clone(), mark: Mark::Cgroup(directory.clone()), amount });
    }
    for (ticket, system) in tickets {
        let contradicted =
            place.as_ref().is_some_and(|(job, _)| job.source() == ticket.job.source() && *job != ticket.job);
        if !contradicted {
            let mark = Mark::Environment { own: system.own };
            claims.push(Claim { job: ticket.job, mark, amount: ticket.amount });
        }
    }
    Claims { role, claims }
}

/// A place that a system recognised, with the path of its directory.
struct Found {
    place: Place,
    directory: String,
}

/// The outermost directory that any system recognises, on the first line that has one.
fn place_of(systems: &[&System], comm: &Comm, marks: &Marks, host: &Host) -> Option<(Source, Found)> {
    place::lines_by_trust(&marks.cgroups).find_map(|line| {
        let path = CgroupPath::new(line, host.flux_user)?;
        let sight = Sight { parts: path.parts(), comm, command_line: &marks.command_line };
        let (source, place) = systems
            .iter()
            .filter_map(|system| Some((system.source, (system.place)(&sight)?)))
            .min_by_key(|(source, place)| (place.depth(), *source))?;
        let directory = path.down_to(place.depth());
        Some((source, Found { place, directory }))
    })
}
