//! Cpusets on this machine.

mod changer;
mod fixture;
mod own;
mod scopes;
mod unrelated_threads;
