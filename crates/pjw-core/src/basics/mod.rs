//! Basic types that do not depend on jobs: CPU sets, ids, times, the cgroups of a process, and text helpers for them.

pub mod cpuset;
pub(crate) mod history;
pub mod ids;
pub(crate) mod prelude;
pub mod process_cgroups;
pub mod text;
pub mod time;

pub(crate) use self::{cpuset::*, ids::*, process_cgroups::*, text::*, time::*};
