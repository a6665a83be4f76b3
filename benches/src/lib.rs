//! The code that the benches and the demo share. A module imports only from modules that are listed above it.
#![forbid(unsafe_code)]

pub mod programs;

pub mod measure;

pub mod load;
pub mod peers;

pub mod setup;

pub mod demo;
