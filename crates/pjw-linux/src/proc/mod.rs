//! Processes and interrupts: `/proc`, and the kernel's process events.

pub mod events;
pub mod irq;
pub mod map_lock;
pub mod maps;
pub(crate) mod memory_files;
pub mod memory_use;
pub mod page_nodes;
pub mod procfs;
pub(crate) mod short_file;
pub mod signal;
pub mod thread_group;
pub(crate) mod vfork;
