//! Basic types that do not depend on jobs: CPU sets, ids, times, and text helpers for them.

pub mod cpuset;
pub(crate) mod history;
pub mod ids;
pub(crate) mod prelude;
pub mod text;
pub mod time;

pub(crate) use self::{cpuset::*, ids::*, text::*, time::*};
