//! Flux: with sdexec a unit `imp-shell-<rank>-<id>.service` in the flux user's own service manager; without it all
//! jobs share flux.service and are found by launcher and environment. Ids are base 58 with `f` (or the letter
//! U+0192) in front. No variable tells the count.
//!
//! Units in a user's manager can be made up by that user, so `shell-…` of a single-user instance makes no claim;
//! `imp-shell-…` only names jobs that run as another user than the manager's owner, which takes root's help.

use pjw_core::job::{Amount, Source};
use pjw_core::snapshot::OwnUnit;

use crate::path::{pieces, place};
use crate::{Host, Place, Scheduler, Variables, value};

pub(crate) const FLUX: Scheduler = Scheduler {
    source: Source::Flux,
    launchers: &["flux-shell", "flux-imp"],
    variables: &["FLUX_JOB_ID"],
    place: find,
    name,
    amount,
    own: OwnUnit::Nothing,
};

fn find(path: &str) -> Option<Place> {
    pieces(path).find_map(|(piece, upto)| {
        let unit = piece.strip_prefix("imp-shell-")?.strip_suffix(".service")?;
        let (rank, id) = unit.split_once('-')?;
        let numeric = !rank.is_empty() && rank.bytes().all(|byte| byte.is_ascii_digit());
        place(upto, &plain(id)).filter(|_| numeric)
    })
}

fn name(variables: &Variables) -> Option<String> {
    value(variables, "FLUX_JOB_ID").map(plain)
}

/// The id with a plain `f` in front.
fn plain(id: &str) -> String {
    id.strip_prefix('\u{192}').map_or_else(|| id.to_owned(), |digits| format!("f{digits}"))
}

fn amount(_variables: &Variables, _host: &Host) -> Option<Amount> {
    None
}
