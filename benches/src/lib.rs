//! What the benches and the demo share, in folders that import only the folders named before them.
#![forbid(unsafe_code)]

pub mod programs;

pub mod measure;

pub mod load;
pub mod peers;

pub mod setup;

pub mod demo;
