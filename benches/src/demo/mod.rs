//! The demo: two jobs that compete for one machine, without a warden and with one.
//!
//! It repeats the experiment of the paper that first described pjw, scaled to the machine it runs on. Job B runs
//! as many workers as it asked for cores. Job A asks for the other cores and starts four times as many workers.
//! Both compute in steps and spin at a barrier after each, so one worker of B that has no core holds up all of B.
//! B's time is measured alone, beside A, and beside A under the warden. What other programs do to the machine meanwhile
//! is measured with it.

pub mod experiment;
pub mod show;
