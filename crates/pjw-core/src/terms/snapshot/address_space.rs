//! Facts about processes that share an address space (clone(2), `CLONE_VM`).

use crate::basics::{ProcessId, prelude::*};

/// The address spaces that several processes share (clone(2) with `CLONE_VM`), as found by all scans up to now.
/// An address space that only the threads of one process share is not in the list.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct AddressSpaceList {
    /// The address spaces with at least two processes, by number.
    pub shared: Vec<SharedAddressSpace>,
    /// The reason why pjw can't find out for some processes whether they share an address space, in one sentence.
    /// `None` if pjw can find this out for all processes.
    pub unread_reason: Option<String>,
}

/// An address space that several processes share (clone(2) with `CLONE_VM`), with these processes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SharedAddressSpace {
    /// The number of the address space. No two address spaces in a list have the same number. An address space keeps
    /// its number while processes use it.
    pub number: u64,
    /// The processes that use the address space, by pid.
    pub users: Vec<AddressSpaceUser>,
}

/// A process that uses the same address space as other processes (clone(2) with `CLONE_VM`), and what the last scan
/// found about the process: whether it may be a child of vfork(2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AddressSpaceUser {
    /// The process.
    pub id: ProcessId,
    /// What the last scan found about the process.
    pub check: AddressSpaceCheck,
}

/// The result of the check of a process that uses the same address space as other processes. A child of vfork(2) uses
/// the address space of its parent only until the child executes a program or exits. The result is `InVfork` if the
/// process may be such a child, and `Sharing` otherwise. It is `NotChecked` if the last scan did not check the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AddressSpaceCheck {
    /// The process shares the address space, and is not a child of vfork(2).
    Sharing,
    /// The process may be a child of vfork(2) or posix_spawn(3), which uses the address space of its parent until it
    /// executes a program or exits.
    InVfork,
    /// The last scan did not check the process. What an earlier scan found still holds.
    NotChecked,
}
