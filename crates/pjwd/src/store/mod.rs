//! The files in the state directory.

pub mod journal;
