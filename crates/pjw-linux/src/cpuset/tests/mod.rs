//! Cpusets on this machine.

mod fixture;
mod own;
mod scopes;
mod unrelated_threads;
