//! Lets the spawner threads of a batch enter their nodes before the first instance is started: if one can't, none is started.

use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};

use super::copies::{ReplicaError, Replicas};

/// What a spawner thread does before it starts instances: it enters a node, and waits until all threads have done so.
pub(crate) struct Entry {
    replicas: Arc<Replicas>,
    node: u32,
    entered: Sender<Result<(), ReplicaError>>,
    allowed: Receiver<()>,
}

/// The entries of the threads of a batch.
pub(crate) struct Entries {
    sender: Sender<Result<(), ReplicaError>>,
    entered: Receiver<Result<(), ReplicaError>>,
    waiting: Vec<Sender<()>>,
}

impl Entry {
    /// Moves the calling thread into the namespace of its node. Returns whether it may start instances.
    pub(crate) fn enter(self) -> bool {
        let Self { replicas, node, entered, allowed } = self;
        let _ = entered.send(replicas.enter_namespace_with_copies(node));
        drop(entered);
        allowed.recv().is_ok()
    }
}

impl Entries {
    pub(crate) fn new() -> Self {
        let (sender, entered) = mpsc::channel();
        Self { sender, entered, waiting: Vec::new() }
    }

    /// Makes the entry of a thread.
    pub(crate) fn add(&mut self, replicas: &Arc<Replicas>, node: u32) -> Entry {
        let (allow, allowed) = mpsc::channel();
        self.waiting.push(allow);
        Entry { replicas: Arc::clone(replicas), node, entered: self.sender.clone(), allowed }
    }

    /// Waits until all threads have entered their nodes, and lets them go on.
    ///
    /// # Errors
    /// If one of them could not. Then the threads end.
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
