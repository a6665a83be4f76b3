//! The peers: programs and bare system calls that the warden is compared with.

pub mod cgroups;
pub mod cgrulesengd;
pub mod echo;
pub mod fork_listener;
pub mod numad;
pub mod syscalls;
