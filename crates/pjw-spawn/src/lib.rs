//! pjw-spawn starts groups of processes, each on its own CPUs from its first instruction.
//!
//! A [`SpawnContext`] holds what all instances of a program have in common: the program, the environment, the
//! credentials. An [`Instance`] is one process of the group: its arguments, its [`Placement`], its streams.
//! [`SpawnContext::spawn_n`] returns when every instance has begun its program or has failed; [`SpawnContext::start`]
//! returns at once. The result for each instance is a [`Child`], or a [`SpawnError`] with the step that failed and its
//! errno.
//!
//! The crate needs no daemon. The placements must lie inside the caller's own affinity mask.
//!
//! `unsafe` is allowed in this crate, in small functions with a `SAFETY` comment.

mod arguments;
mod bare;
mod batch;
mod checks;
mod child;
mod clone;
mod context;
mod credentials;
mod exec_stop;
mod failure;
pub mod farm;
mod instance;
mod kernel_files;
mod layout;
mod own_policy;
mod placement;
pub mod pool;
pub mod proxy;
pub mod replicate;
mod results;
mod setup;
mod signals;
mod spawner;
#[cfg(test)]
mod syscall_filter;
pub mod tasks;
mod work;

pub use arguments::{ArgumentError, Arguments};
pub use batch::SpawnBatch;
pub use checks::CheckError;
pub use checks::nodes::can_prefer_numa_node;
pub use checks::program::find_program;
pub use checks::room::{check_descriptor_limit, check_process_limits, raise_descriptor_limit};
pub use child::{Child, ExitStatus};
pub use context::SpawnContext;
pub use credentials::Credentials;
pub use failure::{SpawnError, SpawnStep};
pub use instance::{Instance, Stdio};
pub use placement::Placement;
pub use signals::{clear_fault_handlers, reset_launcher_signals};
