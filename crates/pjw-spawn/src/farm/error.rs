//! Why a farm can't be started, or can't go on.

use std::fmt;

use nix::errno::Errno;
use pjw_core::cpuset::CpuSet;
use thiserror::Error;

use crate::child::ExitStatus;

/// One of the two optional processes of a farm that do input and output for all its workers: the reader reads the
/// items, and the writer writes their results. A farm is a group of worker processes that compute numbered work items.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IoProcess {
    /// The process that reads the items.
    Reader,
    /// The process that writes the results.
    Writer,
}

impl fmt::Display for IoProcess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Reader => "reader",
            Self::Writer => "writer",
        })
    }
}

/// Error: a farm can't be started, or can't continue. A farm consists of the process that starts it (the master) and of
/// worker processes, which are forked from the master and compute numbered work items. The text of each error is one
/// line.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum FarmError {
    /// An option has a value that is not allowed.
    #[error("{option} is {value}: give a number from {least} to {most}")]
    InvalidOption {
        /// The name of the option, such as `chunk`.
        option: &'static str,
        /// The value that was given.
        value: u64,
        /// The least allowed value.
        least: u64,
        /// The greatest allowed value.
        most: u64,
    },
    /// The list of CPUs for the workers has an entry that the calling process may not use, or is empty.
    #[error("the CPUs {cpus:?} for a worker are not in {allowed}, the CPUs of this process: {why}")]
    InvalidCpus {
        /// The entry of the list. Empty if the list is empty.
        cpus: CpuSet,
        /// The affinity mask of the calling thread.
        allowed: CpuSet,
        /// What is wrong with the entry, as text.
        why: &'static str,
    },
    /// The process that starts the farm has more than one thread. A forked worker would have only the thread that
    /// forks, and a lock that another thread holds would stay locked in the worker for ever. The variant contains the
    /// number of threads.
    #[error(
        "the process has {0} threads, and a forked worker would have only one of them: start the farm before the first \
         thread, or allow threads"
    )]
    MultipleThreads(u64),
    /// The process that starts the farm ignores `SIGCHLD`. The kernel then discards the exit status of each worker, and
    /// the farm could not read how a worker ended.
    #[error(
        "the process ignores SIGCHLD: give the signal its default action, so that the end of a worker can be read"
    )]
    ChildSignalIgnored,
    /// A system call failed.
    #[error("{what}: {}", errno.desc())]
    SystemCall {
        /// The operation that failed, as text.
        what: &'static str,
        /// The error number of the system call.
        errno: Errno,
    },
    /// A process of the farm can't be forked. The farm has tried again for 10 s. The variant contains the error number
    /// of the last attempt.
    #[error("no process can be forked: {}; {}", .0.desc(), remedy_for_fork(*.0))]
    Fork(Errno),
    /// A worker and its replacements died 10 times in succession, and none of them computed an item. For example, each
    /// of them died in the function that a worker calls before its first item.
    #[error("worker {worker} died {deaths} times without an item, at last {}", exit_phrase(end))]
    WorkerDies {
        /// The index of the worker, from 0.
        worker: u32,
        /// The number of deaths in succession.
        deaths: u32,
        /// How the worker ended the last time: its exit status, or the signal that killed it.
        end: ExitStatus,
    },
    /// The reader (the process that reads the items) or the writer (the process that writes the results) died several
    /// times at the same item.
    #[error("the {process} died {deaths} times at item {number}, at last {}", exit_phrase(end))]
    IoProcessDies {
        /// The process that died: the reader or the writer.
        process: IoProcess,
        /// The number of the item.
        number: u64,
        /// The number of deaths at this item.
        deaths: u32,
        /// How this process ended the last time: its exit status, or the signal that killed it.
        end: ExitStatus,
    },
    /// A worker failed at its end, after it had computed its last item. It failed in the function of
    /// [`Farm::on_worker_end`](super::Farm::on_worker_end), or while it wrote the data in the buffers of its streams.
    /// All results were delivered before this error.
    #[error(
        "worker {worker} ended {} after its last item: all results were delivered, but what it does at its end may be \
         incomplete",
        exit_phrase(end)
    )]
    EndFailed {
        /// The index of the worker, from 0.
        worker: u32,
        /// How the worker ended: its exit status, or the signal that killed it.
        end: ExitStatus,
    },
    /// The reader (the process that reads the items) or the writer (the process that writes the results) failed at its
    /// end, after its last item. All results were delivered before this error.
    #[error(
        "the {process} ended {} after its last item: all results were delivered, but what it does at its end may be \
         incomplete",
        exit_phrase(end)
    )]
    IoProcessEndFailed {
        /// The process that failed: the reader or the writer.
        process: IoProcess,
        /// How this process ended: its exit status, or the signal that killed it.
        end: ExitStatus,
    },
    /// The function of the program that reads an item or writes a result returned an error. The reader or the writer,
    /// two optional processes of the farm, called the function.
    #[error("the {process} failed at item {number} with code {code}")]
    IoProcessFailed {
        /// The process that called the function: the reader or the writer.
        process: IoProcess,
        /// The number of the item.
        number: u64,
        /// The code that the function returned.
        code: i32,
    },
    /// An item that the reader (the process that reads the items) has read does not fit into the shared memory for
    /// items.
    #[error("item {number} has {size} bytes, and the shared memory for items has {limit}: raise input_bytes")]
    ItemTooLarge {
        /// The number of the item.
        number: u64,
        /// The size of the item in bytes.
        size: u64,
        /// The size of the shared memory in bytes.
        limit: u64,
    },
    /// A worker has overwritten a part of the farm's shared memory that only the library may write. The variant
    /// contains the index of the worker, from 0.
    #[error("worker {0} overwrote the shared memory of the farm: look for a write through a wrong pointer")]
    Overwritten(u32),
    /// A process of the farm has overwritten the shared memory through which results are passed to the writer (the
    /// process that writes the results). Only the library may write this memory.
    #[error(
        "the result of item {number} was overwritten in the shared memory of the farm on its way to the writer: look for \
         a write through a wrong pointer"
    )]
    ResultOverwritten {
        /// The number of the item whose result was overwritten.
        number: u64,
    },
}

/// Returns the advice for the user if a process of the farm can't be forked because of `errno`.
fn remedy_for_fork(errno: Errno) -> &'static str {
    match errno {
        Errno::EMFILE => {
            "each process of the farm needs a descriptor: raise ulimit -n, or take fewer workers"
        }
        Errno::ENFILE => "the system has too many open files: raise ulimit -n and fs.file-max",
        Errno::EINVAL => {
            "the function for the fork must return 0 only in the new process, and no negative number"
        }
        _ => {
            "a limit on processes or on memory is reached: raise pids.max or memory.max of the cgroup, or ulimit -u, or \
             take fewer workers"
        }
    }
}

/// Returns a phrase for messages that says how a process ended: `by signal 9` or `with exit status 1`.
pub(crate) fn exit_phrase(end: &ExitStatus) -> String {
    match end {
        ExitStatus::Signal(signal) => format!("by signal {signal}"),
        ExitStatus::Code(code) => format!("with exit status {code}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_names_the_thing_the_cause_and_the_remedy() {
        let text = FarmError::InvalidOption { option: "chunk", value: 0, least: 1, most: 4 }.to_string();
        assert_eq!(text, "chunk is 0: give a number from 1 to 4");
        let end = ExitStatus::Signal(9);
        let text =
            FarmError::IoProcessDies { process: IoProcess::Reader, number: 7, deaths: 3, end }.to_string();
        assert_eq!(text, "the reader died 3 times at item 7, at last by signal 9");
    }
}
