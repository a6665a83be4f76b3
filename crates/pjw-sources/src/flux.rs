//! Flux.
//!
//! Without `sdexec` all jobs share Flux's own cgroup, and only the environment and the ancestors tell. With
//! it, each job is a service `imp-shell-<rank>-<id>.service` of the user that Flux runs as, below that
//! user's `user@<uid>.service`. Any user can start a service of that name under his *own* manager, to join
//! another's job or to hoard cores with jobs that don't exist: so the shape counts only below the manager
//! of the user that [`Host::flux_user`] names (or root's), where nobody but Flux can make directories. A
//! user's own instance (`shell-<rank>-<id>`) is not a batch system of this node, and not believed.
//!
//! Ids are F58: `f` or `ƒ` (U+0192), then base58 digits. They are kept with a plain `f`. No variable holds
//! the number of cores, and no process group or session is the job's own (each task may have its own).

use pjw_core::job::{JobId, Source};
use pjw_core::snapshot::OwnUnit;

use crate::Host;
use crate::place::manager_of;
use crate::system::{Environ, Place, Sight, System, Ticket};

pub(crate) const SYSTEM: System = System {
    source: Source::Flux,
    launchers: &["flux-shell", "flux-imp"],
    variables: &["FLUX_JOB_ID"],
    own: OwnUnit::Nothing,
    narrowable: false,
    place,
    ticket,
};

fn place(sight: &Sight<'_>) -> Option<Place> {
    let manager = sight.parts.iter().position(|part| manager_of(part).is_some())?;
    sight.parts.iter().enumerate().skip(manager + 1).find_map(|(depth, part)| {
        let (rank, id) = part.strip_prefix("imp-shell-")?.strip_suffix(".service")?.split_once('-')?;
        rank.parse::<u32>().ok()?;
        Some(Place::job(job(id)?, depth))
    })
}

fn ticket(environ: Environ<'_>, _host: &Host) -> Option<Ticket> {
    job(environ.get("FLUX_JOB_ID")?).map(Ticket::of)
}

pub(crate) fn job(text: &str) -> Option<JobId> {
    let digits = text.strip_prefix(['f', 'ƒ'])?;
    // 64 bits fill at most 11 digits. Base58 leaves out what looks alike.
    let base58 = |byte: u8| byte.is_ascii_alphanumeric() && !b"0OIl".contains(&byte);
    let id = (1..=11).contains(&digits.len()) && digits.bytes().all(base58);
    id.then(|| JobId::new(Source::Flux, &format!("f{digits}")).ok())?
}
