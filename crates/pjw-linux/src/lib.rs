//! Access to the Linux kernel: one module per kernel interface. [`node::LinuxMachine`] combines them.
//!
//! In each module the parsers are pure functions and the readers are thin. `unsafe` is allowed in this crate
//! and in pjw-spawn only, in small wrappers with a `SAFETY` comment.
//!
//! The modules form layers. A module imports only modules listed before it: [`sys`], [`inotify`], [`proc`], [`cgroup`],
//! [`systemd`], `cpuset`, [`bpf`], [`probe`], [`survey`], [`node`]. [`topology`] imports none of them.

pub mod bpf;
pub mod cgroup;
mod cpuset;
pub mod inotify;
pub mod node;
pub mod probe;
pub mod proc;
pub mod survey;
pub mod sys;
pub mod systemd;
#[cfg(test)]
mod tests;
pub mod topology;
