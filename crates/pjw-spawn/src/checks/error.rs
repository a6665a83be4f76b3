//! Why a group can't be started.

use nix::errno::Errno;
use pjw_core::cpuset::CpuSet;
use thiserror::Error;

use crate::template::ArgumentError;

/// Why a group can't be started. Nothing was started.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum CheckError {
    /// The list of instances is empty.
    #[error("the number of instances is 0: start at least 1")]
    NoInstances,
    /// No file has the name of the program.
    #[error("there is no program {program}: check its name, and PATH")]
    NoProgram {
        /// The name or path, as given.
        program: String,
    },
    /// The program can't be executed.
    #[error("the program {program} can't be executed: {why}")]
    NotExecutable {
        /// The path.
        program: String,
        /// Why, and the remedy.
        why: String,
    },
    /// An argument can't be used.
    #[error(transparent)]
    Argument(#[from] ArgumentError),
    /// A placement has PUs on which the caller may not run, or no PU.
    #[error(
        "instance {rank} was given the CPUs {}, and {why}; choose from {}",
        text(.cpus), text(.allowed)
    )]
    Mask {
        /// The instance.
        rank: u32,
        /// The PUs of its placement.
        cpus: CpuSet,
        /// What is wrong with them.
        why: String,
        /// The PUs on which the caller may run now.
        allowed: CpuSet,
    },
    /// There is no room for so many processes.
    #[error("there is room for {room} more processes, and {wanted} were asked for: {limit}; {remedy}")]
    NoRoom {
        /// The number of processes that were asked for.
        wanted: u64,
        /// The number of processes that there is room for.
        room: u64,
        /// The limit, with its value and place.
        limit: String,
        /// What to do.
        remedy: String,
    },
    /// The limit of open descriptors is too low: each instance needs at least one until its end.
    #[error(
        "the instances need {wanted} descriptors, with the open ones {needed}, and at most {limit} may be open \
         (RLIMIT_NOFILE); start fewer, or raise the hard limit with ulimit -Hn {needed}"
    )]
    NoDescriptors {
        /// The number of descriptors for the instances.
        wanted: usize,
        /// The number of descriptors with those that are open now.
        needed: u64,
        /// The hard limit.
        limit: u64,
    },
    /// The arguments and the environment of every instance are too large for execve(2).
    #[error(
        "the arguments and the environment of every instance are too large: {why} (execve(2)); make them smaller, or \
         start with an empty environment"
    )]
    TooLarge {
        /// Which limit is exceeded, with its value.
        why: String,
    },
    /// A system call that can't fail on a healthy system has failed.
    #[error("{what}: {}", .errno.desc())]
    System {
        /// What can't be done.
        what: &'static str,
        /// Its error.
        errno: Errno,
    },
}

fn text(cpus: &CpuSet) -> String {
    if cpus.is_empty() { "none".to_owned() } else { cpus.to_string() }
}
