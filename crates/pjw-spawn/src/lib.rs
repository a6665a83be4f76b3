//! pjw-spawn starts groups of processes, each on its own CPUs from its first instruction.
//!
//! A [`Context`] holds what all instances of a program have in common: the program, the environment, the credentials.
//! An [`Instance`] is one process of the group: its arguments, its [`Placement`], its streams. The result for each
//! instance is a [`Child`], or a [`SpawnError`] with the step that failed and its errno.
//!
//! The crate needs no daemon. Without one, the placements must lie inside the caller's own affinity mask.
//!
//! `unsafe` is allowed in this crate, in small functions with a `SAFETY` comment.

mod child;
mod context;
mod failure;
mod instance;
mod placement;
mod template;

pub use child::{Child, Exit};
pub use context::{Context, Credentials};
pub use failure::{SpawnError, Step};
pub use instance::{Instance, Stdio};
pub use placement::Placement;
pub use template::{ArgumentError, Arguments};
