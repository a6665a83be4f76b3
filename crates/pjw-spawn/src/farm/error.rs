//! Why a farm can't be started, or can't go on.

use std::fmt;

use nix::errno::Errno;
use pjw_core::cpuset::CpuSet;
use thiserror::Error;

use crate::child::ExitStatus;

/// One of the two optional processes of a farm that do input and output for all its workers: the reader reads the
/// items, and the writer writes their results. A farm is a group of worker processes that compute numbered items.
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

/// Error: a farm can't be started, or can't continue. A farm is a master process, with worker processes that are
/// forked from the master. The text of each error is one line.
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
        /// What is wrong with the entry.
        why: &'static str,
    },
    /// The process has more than one thread. A forked process has only the thread that forks, and locks of the other
    /// threads stay locked in it. The variant contains the number of threads.
    #[error(
        "the process has {0} threads, and a forked worker would have only one of them: start the farm before the first \
         thread, or allow threads"
    )]
    MultipleThreads(u64),
    /// The process ignores `SIGCHLD`, so the kernel does not keep how a worker ended.
    #[error(
        "the process ignores SIGCHLD: give the signal its default action, so that the end of a worker can be read"
    )]
    ChildSignalIgnored,
    /// A system call failed.
    #[error("{what}: {}", errno.desc())]
    SystemCall {
        /// What could not be done.
        what: &'static str,
        /// The error number of the system call.
        errno: Errno,
    },
    /// A process of the farm can't be forked. The farm tried again for 10 s.
    #[error("no process can be forked: {}; {}", .0.desc(), remedy_for_fork(*.0))]
    Fork(Errno),
    /// A worker died several times one after the other, and computed no item at these moments.
    #[error("worker {worker} died {deaths} times without an item, at last {}", exit_phrase(end))]
    WorkerDies {
        /// The index of the worker, from 0.
        worker: u32,
        /// The number of deaths one after the other.
        deaths: u32,
        /// How it ended the last time.
        end: ExitStatus,
    },
    /// The reader or the writer died several times at the same item.
    #[error("the {process} died {deaths} times at item {number}, at last {}", exit_phrase(end))]
    IoProcessDies {
        /// Which process.
        process: IoProcess,
        /// The number of the item.
        number: u64,
        /// The number of deaths at this item.
        deaths: u32,
        /// How it ended the last time.
        end: ExitStatus,
    },
    /// A worker failed at its end, after it had computed its last item: in the function for the end of a worker, or at
    /// the flush of its streams. All results were delivered before this error.
    #[error(
        "worker {worker} ended {} after its last item: all results were delivered, but what it does at its end may be \
         incomplete",
        exit_phrase(end)
    )]
    EndFailed {
        /// The index of the worker, from 0.
        worker: u32,
        /// How it ended.
        end: ExitStatus,
    },
    /// The reader or the writer failed at its end, after its last item. All results were delivered before this error.
    #[error(
        "the {process} ended {} after its last item: all results were delivered, but what it does at its end may be \
         incomplete",
        exit_phrase(end)
    )]
    IoProcessEndFailed {
        /// Which process.
        process: IoProcess,
        /// How it ended.
        end: ExitStatus,
    },
    /// The function of the reader or of the writer returned an error.
    #[error("the {process} failed at item {number} with code {code}")]
    IoProcessFailed {
        /// Which process.
        process: IoProcess,
        /// The number of the item.
        number: u64,
        /// The code that the function returned.
        code: i32,
    },
    /// An item that the reader read does not fit into the shared memory for items.
    #[error("item {number} has {size} bytes, and the shared memory for items has {limit}: raise input_bytes")]
    ItemTooLarge {
        /// The number of the item.
        number: u64,
        /// The size of the item in bytes.
        size: u64,
        /// The size of the shared memory in bytes.
        limit: u64,
    },
    /// The shared memory of a worker has values that the library does not write: the program of the worker wrote there.
    #[error("worker {0} overwrote the shared memory of the farm: look for a write through a wrong pointer")]
    Overwritten(u32),
    /// The shared memory through which the master passes results to the writer has values that the library does not
    /// write: a process of the farm wrote there.
    #[error(
        "the result of item {number} was overwritten in the shared memory of the farm on its way to the writer: look for \
         a write through a wrong pointer"
    )]
    ResultOverwritten {
        /// The number of the item.
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
