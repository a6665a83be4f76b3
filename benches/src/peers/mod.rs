//! The peers: other programs, and bare system calls, that pjwd is compared with.

pub mod cgroups;
pub mod cgrulesengd;
pub mod echo;
pub mod fork_listener;
pub mod item_pools;
pub mod numad;
pub mod spawn_schemes;
pub mod syscalls;
pub mod vfork_delay;
