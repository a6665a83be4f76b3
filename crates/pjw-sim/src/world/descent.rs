//! Descent: which process forked which.

use pjw_core::ids::ProcessId;

use super::SimMachine;

impl SimMachine {
    /// Iterates over the process `id` and its ancestors. The process comes first, then the process that forked it, and
    /// so on. Processes that have ended are included. So the result does not depend on which process adopted an orphan.
    pub fn lineage(&self, id: ProcessId) -> impl Iterator<Item = ProcessId> {
        std::iter::successors(Some(id), |child| self.births.get(child).copied())
    }
}
