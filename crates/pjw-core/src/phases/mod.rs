//! The phases of a cycle. Each phase is a function on a [`draft::CycleDraft`]; [`crate::reconcile`] calls them in
//! order.

pub(crate) mod address_spaces;
pub(crate) mod attempts;
pub(crate) mod commands;
pub mod cpusets;
pub(crate) mod draft;
pub(crate) mod held;
pub(crate) mod hotplug;
pub(crate) mod jobs;
pub mod lending;
pub(crate) mod masks;
pub(crate) mod membership;
pub(crate) mod observe;
pub(crate) mod overload;
pub mod pinning;
pub(crate) mod recovery;
pub mod unassigned;
pub(crate) mod unknown_masks;
pub mod usage;
