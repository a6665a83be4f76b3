//! Cgroup paths, piece by piece: what all schedulers' shapes have in common.

use crate::Place;

/// The pieces of a path, each with the path up to and including it.
pub(crate) fn pieces(path: &str) -> impl Iterator<Item = (&str, &str)> {
    let mut end = 0;
    path.split('/').map(move |piece| {
        end += piece.len();
        let upto = &path[..end.min(path.len())];
        end += 1;
        (piece, upto)
    })
}

/// A place whose directory ends with the piece at `directory`.
pub(crate) fn place(directory: &str, name: &str) -> Option<Place> {
    let (directory, name) = (directory.to_owned(), name.to_owned());
    (!name.is_empty()).then_some(Place { directory, name, helpers: false })
}

/// Whether a user could have made this path: below the user's own service manager, whoever logs in may make
/// directories of any name.
pub(crate) fn is_users_own(path: &str) -> bool {
    pieces(path).any(|(piece, _)| piece.starts_with("user@") && piece.ends_with(".service"))
}
