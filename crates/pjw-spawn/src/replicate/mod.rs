//! Replicas: a copy of the program and its libraries on each NUMA node, so that instances read them from their own
//! node.
//!
//! The page cache has one copy of a file, on the node of the process that read it first. The copies lie in a tmpfs
//! whose memory policy binds it to one node, in a mount namespace of the thread that starts the instances of that node.
//! There they are mounted over the files, so paths stay as they are. The tmpfs has no mount point outside of that
//! namespace: it is gone with the thread and its last instance, in whatever way they end.

mod copies;
mod entry;

pub use copies::{ReplicaError, Replicas};
pub(crate) use entry::{NamespaceBarrier, NamespaceEntry};
