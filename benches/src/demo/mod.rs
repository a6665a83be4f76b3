//! The demo: two jobs that compete for one machine, without pjwd and with it.
//!
//! The demo repeats the experiment of the paper that first described pjw, scaled to this machine. Job B runs one
//! worker for each core that it requested. Job A requested the other cores and starts four workers for each of its
//! cores. Both jobs compute in steps and spin at a barrier after each step. So one worker of B without a core delays
//! all workers of B. The demo measures the time of B alone, beside A, and beside A with pjwd. It also measures the
//! CPU use of other programs.

pub mod experiment;
pub mod show;
