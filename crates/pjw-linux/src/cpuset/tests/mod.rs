//! Cpusets on this machine.

mod fixture;
mod idle;
mod own;
mod scheduler;
mod scopes;
mod unrelated_threads;
