//! What the measuring programs share: the demo's experiment, crowds of threads to look at, programs that take part in
//! a measurement, and how results are written down.
#![forbid(unsafe_code)]

pub mod bare;
pub mod barrier;
pub mod crowd;
pub mod demo;
pub mod echo;
pub mod effort;
pub mod forker;
pub mod ground;
pub mod groups;
pub mod listener;
pub mod mpi;
pub mod numad;
pub mod results;
pub mod rules;
pub mod storm;
pub mod upkeep;
