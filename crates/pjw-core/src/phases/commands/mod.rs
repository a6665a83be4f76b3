//! Commands: their types, and the phase that carries them out.

mod request;
pub(crate) mod serve;
pub mod types;
