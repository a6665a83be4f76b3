//! What the measuring programs share: the demo's experiment, crowds of threads to look at, and how results are
//! written down.
#![forbid(unsafe_code)]

pub mod bare;
pub mod barrier;
pub mod crowd;
pub mod demo;
pub mod results;
