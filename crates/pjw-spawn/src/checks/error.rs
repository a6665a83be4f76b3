//! Why a group of processes can't be started.

use nix::errno::Errno;
use pjw_core::cpuset::CpuSet;
use thiserror::Error;

use crate::arguments::ArgumentError;
use crate::replicate::ReplicaError;
use crate::tasks::room::AddressSpaceError;

/// The number of descriptors that the caller may need beside those of the instances.
pub(super) const SPARE_DESCRIPTORS: u64 = 64;

/// Error: a group of processes can't be started. A check before the start has failed, so no process was started.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum CheckError {
    /// The list of instances is empty.
    #[error("the number of instances is 0: start at least 1")]
    NoInstances,
    /// The program was not found: no file has its path, or no directory in `PATH` contains its name.
    #[error("there is no program {program}: check its name, and PATH")]
    NoProgram {
        /// The name or path of the program, as the caller gave it.
        program: String,
    },
    /// The file of the program exists and can't be executed.
    #[error("the program {program} can't be executed: {why}")]
    NotExecutable {
        /// The path of the file.
        program: String,
        /// The reason and the remedy, as text.
        why: String,
    },
    /// An argument of the program is invalid. The variant contains the reason.
    #[error(transparent)]
    InvalidArgument(#[from] ArgumentError),
    /// The [`Placement`](crate::Placement) of an instance (one of the processes to start) contains no PU (logical CPU),
    /// or PUs that are not in the affinity mask of the caller.
    #[error(
        "instance {rank} was given the CPUs {}, and {why}; choose from {}",
        list_text(.cpus), list_text(.allowed)
    )]
    InvalidMask {
        /// The rank of the instance, counted from 0.
        rank: u32,
        /// The PUs in the placement of the instance.
        cpus: CpuSet,
        /// What is wrong with these PUs, as text.
        why: String,
        /// The PUs in the affinity mask of the caller.
        allowed: CpuSet,
    },
    /// The [`Placement`](crate::Placement) of an instance (one of the processes to start) prefers the memory of a NUMA
    /// node from which the caller can't have memory.
    #[error(
        "instance {rank} was to prefer the memory of NUMA node {node}, and {why}; choose from {}",
        list_text(.allowed)
    )]
    InvalidNumaNode {
        /// The rank of the instance, counted from 0.
        rank: u32,
        /// The number of the NUMA node in the placement of the instance.
        node: u32,
        /// What is wrong with this node, as text.
        why: &'static str,
        /// The numbers of the NUMA nodes from which the caller can have memory.
        allowed: CpuSet,
    },
    /// A limit of the system, of the user or of a cgroup on the number of processes or threads is too low.
    #[error(
        "there is room for {room} more processes, and {wanted} were asked for{}: {limit}; {remedy}",
        starters_text(*.starters)
    )]
    ProcessLimit {
        /// The number of processes that were to be started.
        wanted: u64,
        /// The number of further processes and threads that the start itself needs, such as the threads that start the
        /// processes. They count in the limit too.
        starters: u64,
        /// The number of processes that the limit still allows.
        room: u64,
        /// The name of the limit, its value, and the number of threads that exist already if that is known,
        /// as text.
        limit: String,
        /// What the user can do, as text.
        remedy: String,
    },
    /// The hard limit of open descriptors (`RLIMIT_NOFILE`) is too low. Each instance needs a descriptor, its
    /// pidfd, until it has ended.
    #[error(
        "the instances need {wanted} descriptors: with {}a reserve of {reserve}, this is {needed}, and at most {limit} \
         may be open (RLIMIT_NOFILE); {}raise the hard limit with ulimit -Hn {needed}",
        open_descriptors_text(*.open),
        fewer_instances_text(*.open, *.limit),
        reserve = SPARE_DESCRIPTORS
    )]
    DescriptorLimit {
        /// The number of descriptors that the instances need.
        wanted: usize,
        /// The number of descriptors that are open now. 0 if it is unknown.
        open: u64,
        /// The total number of descriptors: those for the instances, those that are open now, and a reserve
        /// of 64.
        needed: u64,
        /// The hard limit of open descriptors.
        limit: u64,
    },
    /// The arguments and the environment of each instance (process to start) are too large for execve(2). If only some
    /// instances are too large, this error does not occur: the start of these instances fails later.
    #[error("{why}; {remedy}")]
    TooLarge {
        /// What is too large in the first instance, with its size and the exceeded limit, as text.
        why: String,
        /// What the user can do, as text.
        remedy: String,
        /// Whether the environment alone is too large, or has a string that is. If not, the arguments are, or both are
        /// too large together.
        is_environment: bool,
    },
    /// The files of the program can't be copied to the NUMA nodes on which the processes are to run. The variant
    /// contains the reason.
    #[error(transparent)]
    Replicas(#[from] ReplicaError),
    /// The instances (processes to start) can't share one address space. The variant contains the reason.
    #[error(transparent)]
    AddressSpace(#[from] AddressSpaceError),
    /// A system call that should never fail has failed.
    #[error("{what}: {}", .errno.desc())]
    SystemCall {
        /// The consequence of the failure, as text, such as `a socket can't be made`.
        what: &'static str,
        /// The error number of the system call.
        errno: Errno,
    },
}

fn starters_text(starters: u64) -> String {
    match starters {
        0 => String::new(),
        1 => ", with 1 more that starts them".to_owned(),
        _ => format!(", with {starters} more that start them"),
    }
}

fn open_descriptors_text(open: u64) -> String {
    if open == 0 { String::new() } else { format!("{open} that are open, and ") }
}

/// Returns the remedy to start fewer instances. Empty if `limit` does not allow a single one beside the `open`
/// descriptors.
fn fewer_instances_text(open: u64, limit: u64) -> &'static str {
    if limit > open + SPARE_DESCRIPTORS { "start fewer, or " } else { "" }
}

/// Returns the text of a list of CPUs or NUMA nodes. An empty list is `none`.
fn list_text(list: &CpuSet) -> String {
    if list.is_empty() { "none".to_owned() } else { list.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_of_the_descriptor_limit_says_what_is_counted_and_advises_only_what_helps() {
        let text =
            |open, needed, limit| CheckError::DescriptorLimit { wanted: 6, open, needed, limit }.to_string();
        assert_eq!(
            text(5, 75, 5),
            "the instances need 6 descriptors: with 5 that are open, and a reserve of 64, this is 75, and at most 5 \
             may be open (RLIMIT_NOFILE); raise the hard limit with ulimit -Hn 75"
        );
        let unknown = text(0, 70, 4);
        assert!(unknown.contains("descriptors: with a reserve of 64, this is 70"), "{unknown}");
        assert!(text(5, 75, 70).contains("; start fewer, or raise the hard limit"), "{}", text(5, 75, 70));
    }
}
