//! Tasks: processes that share one address space. Each has its own variables, stack, thread-local storage, descriptors,
//! working directory, signals, process id and exit status. A pointer of one task is valid in all others.
//!
//! A small process, the *host*, owns the address space. It is a fork of the process that starts the tasks, and does
//! nothing but map programs, start tasks and unmap the memory of ended tasks. A task is made by clone3(2)
//! with `CLONE_VM` and `CLONE_PARENT`: it shares the memory of the host and is a child of the host's parent, which
//! waits for it by its pidfd. A task does not execute its program by execve(2), which would end the sharing: the host
//! has mapped the program, and the task jumps to its first instruction. This method works for static programs that run
//! at any address (`-static-pie`), see docs/adr/0027-tasks.md.
//!
//! The host has no heap: it calls nothing that allocates, because brk(2) belongs to the address space and must not
//! change.

pub(crate) mod descriptors;
pub(crate) mod directory;
pub(crate) mod group;
mod headers;
mod host;
pub(crate) mod image;
mod initial_values;
mod map;
mod new_tasks;
mod own_memory;
mod page;
pub(crate) mod request;
pub(crate) mod room;
mod round;
mod slot;
pub(crate) mod space;
mod stack;
mod task_start;
#[cfg(test)]
mod tests;

pub use image::ImageError;
pub use room::AddressSpaceError;
pub use space::AddressSpace;
