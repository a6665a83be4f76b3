//! Whether the tasks of a group find room in one address space, and why not.

use std::path::Path;

use nix::errno::Errno;
use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit};
use thiserror::Error;

use super::image::{ImageError, TaskProgram};
use super::page::PAGE;
use super::slot::{SlotShape, stack_bytes};
use crate::failure::SpawnError;
use crate::kernel_files::number_in;

/// The number of mappings of a task: the guard, the stack, the segments of its program, and the mappings of malloc(3)
/// and of its first thread.
const MAPPINGS_OF_A_TASK: u64 = 12;

/// Error: an address space for tasks can't be made, so no task was started. A task is a process that shares its
/// address space with other processes of the same program.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum AddressSpaceError {
    /// The program can't run as a task.
    #[error("the program {program} can't share its memory with others: {why}")]
    Program {
        /// The path of the program.
        program: String,
        /// The reason.
        why: ImageError,
    },
    /// The addresses or the mappings of the tasks exceed a limit.
    #[error("{tasks} tasks need {needed}, and {limit}; {remedy}")]
    Room {
        /// The number of tasks.
        tasks: usize,
        /// What the tasks need, as text.
        needed: String,
        /// The limit, as text.
        limit: String,
        /// What the user can do, as text.
        remedy: &'static str,
    },
    /// The host process could not be started: the process that creates the address space in which the tasks run. The
    /// variant contains the failed step.
    #[error("the process that owns the shared memory can't be made: {0}; {remedy}", remedy = remedy_of_host(.0.errno))]
    Host(SpawnError),
    /// The [`SpawnContext`](crate::SpawnContext) does not allow to start tasks:
    /// [`SpawnContext::share_memory`](crate::SpawnContext::share_memory) was not called, or another user or group is
    /// set. The variant contains the reason as text.
    #[error("tasks with shared memory can't have {0}; start them without it")]
    Unsupported(&'static str),
}

/// Returns the advice for the user if the host can't be made because of `errno`.
fn remedy_of_host(errno: Errno) -> &'static str {
    match errno {
        // The error of mmap(2) does not say which of the limits is reached.
        Errno::ENOMEM => {
            "start fewer tasks, make the stack smaller with ulimit -s, or raise a limit: ulimit -d (RLIMIT_DATA), ulimit -v \
             (RLIMIT_AS), or the commit limit of a machine with vm.overcommit_memory=2 (vm.overcommit_ratio)"
        }
        Errno::EMFILE | Errno::ENFILE => "raise the limit of open descriptors with ulimit -n",
        Errno::EOWNERDEAD => "dmesg says whether the kernel did so for lack of memory",
        _ => "start fewer tasks, or make the stack smaller with ulimit -s",
    }
}

/// Checks whether one address space has room for `tasks` tasks of the program `task_program`.
///
/// # Errors
/// [`AddressSpaceError::Room`] if the tasks need more addresses or mappings than a limit allows.
pub(crate) fn check_room(task_program: &TaskProgram, tasks: usize) -> Result<(), AddressSpaceError> {
    let error = |needed, limit, remedy| AddressSpaceError::Room { tasks, needed, limit, remedy };
    let slot = SlotShape::new(&task_program.layout, stack_bytes());
    let Some(bytes) = slot.and_then(|slot| slot.bytes_of(tasks as u64)) else {
        let remedy = "start fewer, or make the stack smaller with ulimit -s";
        return Err(error(
            "more addresses than there are".to_owned(),
            "the stack is large".to_owned(),
            remedy,
        ));
    };
    let mib = |bytes: u64| bytes.div_ceil(1 << 20);
    if let Ok((soft, _)) = getrlimit(Resource::RLIMIT_AS)
        && soft != RLIM_INFINITY
        && own_addresses().saturating_add(bytes) > soft
    {
        return Err(error(
            format!(
                "{} MiB of addresses beside the {} MiB of this process",
                mib(bytes),
                mib(own_addresses())
            ),
            format!("the limit is {} MiB (RLIMIT_AS)", mib(soft)),
            "start fewer, make the stack smaller with ulimit -s, or raise the limit with ulimit -v",
        ));
    }
    let mappings = tasks as u64 * MAPPINGS_OF_A_TASK;
    let max_mappings = number_in(Path::new("/proc/sys/vm/max_map_count"));
    match max_mappings {
        Some(max_mappings) if mappings > max_mappings => Err(error(
            format!("{mappings} mappings"),
            format!("one address space may have {max_mappings} (vm.max_map_count)"),
            "start fewer, or raise it: sysctl vm.max_map_count=N",
        )),
        _ => Ok(()),
    }
}

/// Returns the size in bytes of the addresses that the calling process has mapped: the first field of
/// /proc/self/statm.
fn own_addresses() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    text.split_whitespace().next().and_then(|pages| pages.parse::<u64>().ok()).unwrap_or(0) * PAGE
}
