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

use crate::announcement::{Flaw, shown};
use crate::system::{Environ, Place, Sight, System, Ticket, plausible};
use crate::{Host, counts};

pub(crate) const SYSTEM: System = System {
    source: Source::Pbs,
    launchers: &["pbs_mom"],
    variables: &["PBS_JOBID", "PBS_NUM_PPN", "PBS_NUM_NODES", "PBS_NP"],
    own: OwnUnit::Session,
    narrowable: false,
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

/// The CPUs that a job has on this node, by its `exec_vnode`: chunks in parentheses, joined with `+`, of vnodes with
/// their resources, joined with `+`: `(n1:ncpus=2:mem=1gb)+(n2[0]:ncpus=1+n2[1]:ncpus=1)`. A node's vnodes are called
/// as it is itself, or `n2[0]`, `n2[1]` … (OpenPBS's own hook for cgroups reads them so).
pub(crate) fn cpus_on(exec_vnode: &str, node: &str) -> Result<u32, Flaw> {
    const WHAT: &str = "exec_vnode";
    let mut sum: Option<u32> = None;
    for (at, piece) in exec_vnode.split('+').enumerate() {
        let mut parts = piece.trim().trim_start_matches('(').trim_end_matches(')').split(':');
        let vnode = parts.next().unwrap_or_default();
        let count = match parts.find_map(|part| part.strip_prefix("ncpus=")) {
            Some(text) => counts::number(text).ok_or(Flaw::Counts {
                variable: WHAT,
                why: counts::CountsError::NotACount { part: at + 1 },
            })?,
            None => 0,
        };
        if vnode.split('[').next() == Some(node) {
            sum = Some(sum.unwrap_or(0).saturating_add(count));
        }
    }
    sum.ok_or_else(|| Flaw::NotHere { variable: WHAT, host: shown(node) })
}

/// The processors that a Torque job has on this host, by the list of its limits (`nodes=1:ppn=2,walltime=60`) and, if it
/// has several nodes, the list of its hosts. Torque may put several "nodes" on one host: only where there are as many hosts
/// as nodes, all alike, is a node's share the host's.
pub(crate) fn ppn(limits: &str, hosts: &str) -> Result<u32, Flaw> {
    const WHAT: &str = "the list of limits";
    let untold = || Flaw::Untold { scheduler: Source::Pbs };
    let nodes = limits.split(',').find_map(|limit| limit.trim().strip_prefix("nodes=")).ok_or_else(untold)?;
    let mut parts = nodes.split(':');
    let first = parts.next().unwrap_or_default();
    let share = match parts.find_map(|part| part.strip_prefix("ppn=")) {
        Some(text) if !nodes.contains('+') => {
            counts::number(text).ok_or_else(|| Flaw::NotANumber { variable: WHAT, value: shown(text) })?
        }
        Some(_) => return Err(untold()),
        None => 1,
    };
    let distinct: std::collections::BTreeSet<&str> =
        hosts.split(',').filter(|host| !host.is_empty()).collect();
    match counts::number(first) {
        Some(1) => Ok(share),
        // A host by name.
        None if !nodes.contains('+') => Ok(share),
        Some(nodes) if distinct.len() == nodes as usize && !limits.contains('+') => Ok(share),
        _ => Err(untold()),
    }
}

/// An id as PBS writes it, if it is one.
pub(crate) fn job(id: &str) -> Option<JobId> {
    let number = id.split(['[', '.', '-']).next()?;
    crate::system::plain_number(number)?;
    JobId::new(Source::Pbs, id).ok()
}
