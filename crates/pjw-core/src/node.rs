//! The two ports of the decisions: the node that is looked at and changed, and the journal.

use std::collections::BTreeMap;
use std::error::Error;

use crate::newborn::{Expected, Glance};
use crate::plan::{Action, Outcome};
use crate::process::Pid;
use crate::record::Record;
use crate::snapshot::{Look, Snapshot};
use crate::wall::{WallAction, WallOutcome};

/// A machine that can be looked at and changed: the real one (`pjw-linux`) or a fake kernel (`pjw-sim`).
pub trait Node {
    /// Looks where it is told. Things that vanish meanwhile are [`crate::snapshot::Seen::Gone`], not errors.
    fn observe(&mut self, look: &Look) -> Snapshot;

    /// Reads the masks of processes that were just born, and nothing else that might have to wait. Who has the expected
    /// one, is gone, or was born longer ago than [`crate::process::ProcessId::NUMBER_RESTS`] is left out.
    fn glance(&mut self, expected: &BTreeMap<Pid, Expected>) -> Glance;

    /// Carries out one action and reads back what became of it. An action on a thread that is no longer the
    /// one it was decided for is [`Outcome::Gone`].
    fn apply(&mut self, action: &Action) -> Outcome;

    /// Carries out one change to a wall and reads back what became of it.
    fn build(&mut self, action: &WallAction) -> WallOutcome;
}

/// Where records go before the changes they tell of.
pub trait Journal {
    /// Why a record could not be written.
    type Fault: Error + Send + Sync + 'static;

    /// Appends the records, all or none as far as a later reader can tell.
    ///
    /// # Errors
    /// If they could not be written; then nothing they tell of may be done.
    fn append(&mut self, records: &[Record]) -> Result<(), Self::Fault>;

    /// Replaces everything written so far by these records, at once or not at all.
    ///
    /// # Errors
    /// If they could not be written; then what was there before still counts.
    fn rewrite(&mut self, records: &[Record]) -> Result<(), Self::Fault>;
}
