//! IBM Spectrum LSF and OpenLava: by default no cgroup; the job's `res`, a child of sbatchd, leads a process group,
//! and all jobs share sbatchd's session. With cgroups (v1): `lsf/<cluster>/job.<id>[<index>].<…>`.

use pjw_core::job::{Amount, Source};
use pjw_core::snapshot::OwnUnit;

use crate::path::{pieces, place};
use crate::{Host, Place, Scheduler, Variables, count, value};

pub(crate) const LSF: Scheduler = Scheduler {
    source: Source::Lsf,
    launchers: &["sbatchd", "res"],
    variables: &["LSB_JOBID", "LSB_JOBINDEX", "LSB_MCPU_HOSTS"],
    place: find,
    name,
    amount,
    own: OwnUnit::Group,
};

fn find(path: &str) -> Option<Place> {
    let mut inside = false;
    for (piece, upto) in pieces(path) {
        if let Some(name) = piece.strip_prefix("job.").filter(|_| inside) {
            let name = name.split('.').next().unwrap_or_default();
            return place(upto, name).filter(|_| name.starts_with(|first: char| first.is_ascii_digit()));
        }
        inside |= piece == "lsf";
    }
    None
}

fn name(variables: &Variables) -> Option<String> {
    let id = value(variables, "LSB_JOBID")?;
    match value(variables, "LSB_JOBINDEX") {
        None | Some("0") => Some(id.to_owned()),
        Some(index) => Some(format!("{id}[{index}]")),
    }
}

fn amount(variables: &Variables, host: &Host) -> Option<Amount> {
    let hosts = value(variables, "LSB_MCPU_HOSTS")?;
    count::per_host(hosts, host).ok().map(Amount::Cores)
}
