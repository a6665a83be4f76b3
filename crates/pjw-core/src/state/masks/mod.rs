//! Affinity masks: which mask was requested, by which side, and which mask a release restores.

pub mod entry;
pub mod lifted;
pub mod old_kernels;
pub(crate) mod reading;
mod released;
pub mod request;
pub mod target;
