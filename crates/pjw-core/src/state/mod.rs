//! The state: the data that is kept between two cycles.

pub mod address_spaces;
pub(crate) mod attempts;
pub mod cpusets;
pub mod demand;
pub mod dirty;
pub mod jobs;
pub mod lending;
pub mod lineage;
pub mod masks;
pub mod members;
pub mod pool;
pub mod processes;
pub(crate) mod replay;
pub(crate) mod scans;
pub mod unknown_masks;
pub mod usage;
pub mod warden;

pub use members::{Member, MemberThread};
pub use processes::KnownProcess;
pub use warden::WardenState;

pub(crate) use self::{
    attempts::*, dirty::*, lineage::*, masks::entry::*, masks::request::*, pool::*, replay::*,
};
