//! What a worker computes, and what comes back.

use crate::child::ExitStatus;

/// A work item, as it is passed to a worker process: its number, and the data that the reader process read for the
/// item. A farm is a group of worker processes that compute numbered work items.
#[derive(Debug, Clone, Copy)]
pub struct WorkItem<'a> {
    /// The number of the item, from 0 in the order of the source.
    pub number: u64,
    /// The bytes that the reader read for the item. Empty in a farm without a reader: there the number says what is to
    /// be computed, for example the index in a list that the master loaded before the fork.
    pub bytes: &'a [u8],
    /// The index of the worker, from 0. A worker that replaces another one has the index of the other one.
    pub worker: u32,
}

/// The outcome of an item that a farm computed in a worker process: the bytes of the result, an error of the program,
/// or the death of each worker that tried the item.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// The item was computed. The variant contains the bytes of the result. In a farm with a writer, the writer gets
    /// these bytes, and the variant contains none for the master.
    Done(Vec<u8>),
    /// The function of the worker returned an error.
    Failed {
        /// The code that the function returned.
        code: i32,
        /// The bytes that the function had written as result, such as a message. Like those of [`Outcome::Done`] they
        /// are for the writer, if there is one.
        bytes: Vec<u8>,
    },
    /// Every worker that computed the item died, as often as [`super::Farm::attempts`] allows.
    Killed {
        /// How many workers died.
        attempts: u32,
        /// How the last one ended: the signal, or the exit status.
        end: ExitStatus,
    },
}

impl Outcome {
    /// Returns a copy of the outcome that contains no bytes of the result.
    pub(crate) fn without_bytes(&self) -> Self {
        match self {
            Self::Done(_) => Self::Done(Vec::new()),
            Self::Failed { code, .. } => Self::Failed { code: *code, bytes: Vec::new() },
            killed @ Self::Killed { .. } => killed.clone(),
        }
    }

    /// Returns the bytes of the result. Empty if each worker that tried the item died.
    pub(crate) fn bytes(&self) -> &[u8] {
        match self {
            Self::Done(bytes) | Self::Failed { bytes, .. } => bytes,
            Self::Killed { .. } => &[],
        }
    }
}

/// The number of an item and its outcome. A farm (a group of worker processes that compute numbered items) returns
/// exactly one such value for each item.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ItemResult {
    /// The number of the item, from 0 in the order of the source.
    pub number: u64,
    /// What became of the item.
    pub outcome: Outcome,
}

/// The progress of a farm: how many items are done, how many failed, how many worker processes run, and how many
/// processes were replaced after they died. A farm is a group of worker processes that compute numbered items.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FarmProgress {
    /// The number of all items. `None` as long as the reader has not reached the end of the input.
    pub total: Option<u64>,
    /// The number of results that the master got, or that are ready for it.
    pub delivered: u64,
    /// How many of the delivered items failed: [`Outcome::Failed`] and [`Outcome::Killed`].
    pub failed: u64,
    /// The number of workers that run now.
    pub workers: u32,
    /// How many processes of the farm died and were replaced.
    pub replaced: u64,
}
