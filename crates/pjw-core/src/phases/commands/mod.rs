//! Commands: their types, and the phase that carries them out.

pub(crate) mod serve;
pub mod types;
