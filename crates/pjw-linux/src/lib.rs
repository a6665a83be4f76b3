//! pjw-linux knows the kernel: one module per interface, and [`node::LinuxNode`], which puts them together.
//!
//! In each module what parses bytes is pure and what reads them is thin. Unsafe code is allowed in this crate
//! only, in small wrappers that say why they are sound.

pub mod activation;
pub mod affinity;
pub mod bpf;
pub mod cgroup;
pub mod clock;
pub mod errno;
pub mod irq;
pub mod node;
mod online;
pub mod own_cost;
pub mod probe;
pub mod proc_events;
pub mod procfs;
pub mod survey;
pub mod systemd;
pub mod topology;
pub mod walls;
