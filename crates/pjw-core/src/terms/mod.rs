//! Plain data types of the decisions, without logic on the state.

pub mod cpuset_group;
pub mod event;
pub mod evidence;
pub mod job;
pub mod own_cgroups;
pub mod plan;
pub mod policy;
pub mod ports;
pub mod record;
pub mod refusal;
pub mod scan;
pub mod snapshot;
pub mod usage;

pub(crate) use self::{
    cpuset_group::*, event::*, evidence::*, job::*, plan::*, policy::*, record::*, refusal::*, scan::*,
    snapshot::*, usage::*,
};
