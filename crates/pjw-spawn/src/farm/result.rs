//! The item that a worker computes, its result, and the progress of a farm.

use crate::child::ExitStatus;

/// A work item, as it is passed to a worker process: its number, and the data that the reader process read for the
/// item. A farm is a group of worker processes that compute numbered work items.
#[derive(Debug, Clone, Copy)]
pub struct WorkItem<'a> {
    /// The number of the item, counted from 0. If a reader process reads the items, they are numbered in the order in
    /// which it reads them.
    pub number: u64,
    /// The bytes that the reader process read for the item. Empty in a farm without a reader. The number of the item
    /// then says what to compute: it can be, for example, the index in a list that the program loaded before it started
    /// the farm.
    pub bytes: &'a [u8],
    /// The index of the worker that computes the item, from 0. A worker that replaces another one has the same index.
    pub worker: u32,
}

/// The outcome of an item that a farm computed in a worker process: the bytes of the result, an error of the program,
/// or the death of all workers that tried to compute the item.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// The item was computed. The variant contains the bytes of the result. In a farm with a writer process, only the
    /// writer gets these bytes. The process that started the farm then gets an empty vector.
    Done(Vec<u8>),
    /// The function that computes an item returned an error.
    Failed {
        /// The code that the function returned.
        code: i32,
        /// The bytes that the function had written as result, such as a message. In a farm with a writer process, only
        /// the writer gets these bytes.
        bytes: Vec<u8>,
    },
    /// Every worker that tried to compute the item died. [`super::Farm::attempts`] sets the number of attempts.
    Killed {
        /// The number of workers that died.
        attempts: u32,
        /// How the last of these workers ended: its exit status, or the signal that killed it.
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

/// The number of an item and its outcome. A farm (a group of worker processes that compute numbered work items) returns
/// exactly one such value for each item.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ItemResult {
    /// The number of the item, counted from 0. If a reader process reads the items, they are numbered in the order in
    /// which it reads them.
    pub number: u64,
    /// The outcome: the item was computed, the program returned an error, or every worker that tried the item died.
    pub outcome: Outcome,
}

/// The progress of a farm: how many items are done, how many failed, how many worker processes run, and how many
/// processes were replaced after they died. A farm is a group of worker processes that compute numbered work items.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FarmProgress {
    /// The number of all items. `None` as long as the reader (the process that reads the items) has not reached the end
    /// of the input.
    pub total: Option<u64>,
    /// The number of results that the process that started the farm has received or can receive now. If results are
    /// returned in order, a result that is ready too early does not count yet.
    pub delivered: u64,
    /// How many of the delivered results are [`Outcome::Failed`] or [`Outcome::Killed`].
    pub failed: u64,
    /// The number of workers that run now.
    pub workers: u32,
    /// How many processes of the farm died and were replaced.
    pub replaced: u64,
}
