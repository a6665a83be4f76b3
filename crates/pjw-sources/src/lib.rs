//! pjw-sources recognises batch systems by what they leave on a process: cgroup paths, variables, names.
//!
//! One file per scheduler, each a [`Scheduler`]: data where data is enough, a small pure function where a path or
//! a count has a form of its own. What the marks are worth is decided elsewhere (`pjw_core::membership`). An id
//! with characters that no job id may have makes no claim; a count that is not certain is no count.
//! docs/sources.md tells the same for administrators.
#![forbid(unsafe_code)]

mod condor;
pub mod count;
mod flux;
mod lsf;
mod manual;
mod oar;
mod path;
mod pbs;
mod sge;
mod slurm;

use std::collections::{BTreeMap, BTreeSet};

use pjw_core::job::{Amount, JobId, Source};
use pjw_core::process::Comm;
use pjw_core::snapshot::{Claim, Claims, Mark, Marks, OwnUnit, Role};

/// This machine, as far as recognition needs it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Host {
    /// Its name; schedulers may use the short or the full one.
    pub name: String,
}

/// The variables of a process's environment that were asked for.
type Variables = BTreeMap<String, String>;

/// What one scheduler leaves on its jobs' processes.
struct Scheduler {
    source: Source,
    /// Names of its processes whose children are job processes.
    launchers: &'static [&'static str],
    /// The variables that `name` and `amount` read.
    variables: &'static [&'static str],
    /// The job's own directory and name, from one cgroup path.
    place: fn(&str) -> Option<Place>,
    /// The job's name, from the environment.
    name: fn(&Variables) -> Option<String>,
    /// How many cores the job has on this host, from the environment.
    amount: fn(&Variables, &Host) -> Option<Amount>,
    /// What each job has of its own.
    own: OwnUnit,
}

/// A job's directory.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Place {
    /// Its path, as in `/proc/PID/cgroup`.
    directory: String,
    /// The job's name.
    name: String,
    /// Whether this part of it holds the scheduler's helpers, not the job's processes.
    helpers: bool,
}

const SCHEDULERS: [&Scheduler; 8] = [
    &slurm::SLURM,
    &lsf::LSF,
    &pbs::PBS,
    &sge::SGE,
    &condor::CONDOR,
    &flux::FLUX,
    &oar::OAR,
    &manual::MANUAL,
];

/// The hierarchies whose paths name jobs, best first: v2, then the v1 ones that schedulers use.
const HIERARCHIES: [&str; 6] = ["", "cpuset", "name=systemd", "freezer", "memory", "cpuacct"];

/// The variables that a node must read of a process's environment.
#[must_use]
pub fn wanted_variables() -> BTreeSet<&'static str> {
    SCHEDULERS.iter().flat_map(|scheduler| scheduler.variables.iter().copied()).collect()
}

/// What the marks on a process mean.
#[must_use]
pub fn recognise(comm: &Comm, marks: &Marks, host: &Host, enabled: &BTreeSet<Source>) -> Claims {
    let mut recognised = Claims::default();
    for scheduler in SCHEDULERS.iter().filter(|scheduler| enabled.contains(&scheduler.source)) {
        if scheduler.launchers.iter().any(|launcher| *comm == Comm::from(*launcher)) {
            recognised.role = Role::Launcher(scheduler.source);
        }
        let amount = (scheduler.amount)(&marks.environ, host);
        if let Some(place) = placed(scheduler, marks) {
            if place.helpers || is_placeholder(marks) {
                recognised.role = Role::Helper(scheduler.source);
            }
            let mark = Mark::Cgroup(place.directory.clone());
            recognised.claims.extend(claim(scheduler.source, &place.name, mark, amount.clone()));
        }
        if let Some(name) = (scheduler.name)(&marks.environ) {
            let mark = Mark::Environment { own: scheduler.own };
            recognised.claims.extend(claim(scheduler.source, &name, mark, amount));
        }
    }
    recognised
}

fn claim(source: Source, name: &str, mark: Mark, amount: Option<Amount>) -> Option<Claim> {
    Some(Claim { job: JobId::new(source, name).ok()?, mark, amount })
}

fn placed(scheduler: &Scheduler, marks: &Marks) -> Option<Place> {
    HIERARCHIES.iter().find_map(|hierarchy| {
        let lines = marks.cgroups.iter().filter(|(controllers, _)| match *hierarchy {
            "" => controllers.is_empty(),
            wanted => controllers.split(',').any(|controller| controller == wanted),
        });
        let trusted = lines.filter(|(_, path)| scheduler.source == Source::Flux || !path::is_users_own(path));
        trusted.into_iter().find_map(|(_, path)| (scheduler.place)(path))
    })
}

/// Slurm keeps the extern step alive with a sleeper of root's.
fn is_placeholder(marks: &Marks) -> bool {
    marks.command_line == "sleep 100000000"
        && marks.cgroups.iter().any(|(_, path)| path.contains("/step_extern"))
}

/// A variable that is there and not empty.
fn value<'a>(variables: &'a Variables, name: &str) -> Option<&'a str> {
    variables.get(name).map(|value| value.trim()).filter(|value| !value.is_empty())
}

#[cfg(test)]
mod tests;
