//! Lets the spawner threads of a batch enter the mount namespaces for their NUMA nodes before the first instance is
//! started. If a thread can't enter its namespace, no instance of the batch is started. The thread of the instances
//! without a NUMA node enters no namespace, and waits for the others.

use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};

use super::copies::{ReplicaError, Replicas};

/// Lets one spawner thread (a thread that starts processes) enter the mount namespace for its NUMA node. The thread
/// then waits until all spawner threads of the batch have entered their namespaces.
pub(crate) struct NamespaceEntry {
    replicas: Arc<Replicas>,
    node: Option<u32>,
    entered: Sender<Result<(), ReplicaError>>,
    allowed: Receiver<()>,
}

/// Lets the thread that starts a batch wait until all spawner threads (threads that start processes) have entered the
/// mount namespaces for their NUMA nodes.
pub(crate) struct NamespaceBarrier {
    sender: Sender<Result<(), ReplicaError>>,
    entered: Receiver<Result<(), ReplicaError>>,
    waiting: Vec<Sender<()>>,
}

impl NamespaceEntry {
    /// Moves the calling thread into the mount namespace for its NUMA node, if it has one, and waits for the other
    /// threads of the batch. Returns `true` if all threads have entered their namespaces. Otherwise the thread must not
    /// start processes.
    pub(crate) fn enter(self) -> bool {
        let Self { replicas, node, entered, allowed } = self;
        let _ = entered.send(node.map_or(Ok(()), |node| replicas.enter_namespace_with_copies(node)));
        drop(entered);
        allowed.recv().is_ok()
    }
}

impl NamespaceBarrier {
    /// Makes a value to which no spawner thread has been added yet.
    pub(crate) fn new() -> Self {
        let (sender, entered) = mpsc::channel();
        Self { sender, entered, waiting: Vec::new() }
    }

    /// Adds a spawner thread that must enter the mount namespace with copies of the files in `replicas` for the NUMA
    /// node `node`. `None` for a thread that stays in the namespace of the caller. The thread must call
    /// [`NamespaceEntry::enter`] of the returned value.
    pub(crate) fn add(&mut self, replicas: &Arc<Replicas>, node: Option<u32>) -> NamespaceEntry {
        let (allow, allowed) = mpsc::channel();
        self.waiting.push(allow);
        NamespaceEntry { replicas: Arc::clone(replicas), node, entered: self.sender.clone(), allowed }
    }

    /// Waits until all added threads have entered their mount namespaces, and then lets them start processes.
    ///
    /// # Errors
    /// If a thread could not enter its namespace. No thread starts a process then.
    pub(crate) fn wait(self) -> Result<(), ReplicaError> {
        let Self { sender, entered, waiting } = self;
        drop(sender);
        entered.iter().collect::<Result<(), _>>()?;
        waiting.iter().for_each(|allow| {
            // A thread that was not started has dropped its end.
            let _ = allow.send(());
        });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use pjw_core::ids::Pid;

    use super::*;

    #[test]
    fn a_thread_without_a_node_waits_until_all_others_have_entered_theirs() {
        let replicas = Arc::new(Replicas::of_process(Pid(std::process::id()), [0]).unwrap());
        // No machine has this node. A user who is not root fails before.
        for (node, is_entered) in [(None, true), (Some(1000), false)] {
            let mut barrier = NamespaceBarrier::new();
            let entries = [barrier.add(&replicas, None), barrier.add(&replicas, node)];
            let threads = entries.map(|entry| thread::spawn(move || entry.enter()));
            assert_eq!(barrier.wait().is_ok(), is_entered);
            assert_eq!(threads.map(|thread| thread.join().unwrap()), [is_entered; 2]);
        }
    }
}
