//! The work of a worker process: it takes items, computes them, and puts their results into its ring buffer.

use std::sync::atomic::Ordering;

use super::functions::FarmFunctions;
use super::memory::{SharedMemory, UNKNOWN_TOTAL};
use super::result::WorkItem;
use super::ring::{ResultHeader, ResultRing};
use super::wake::MasterWaker;
use super::window::{ItemQueue, TakenItem};

/// A worker process of a farm: takes items from the queue, computes them, and puts the results into the ring buffer of
/// the worker.
pub(crate) struct Worker<'f, 'a> {
    pub(crate) index: u32,
    pub(crate) chunk: u64,
    pub(crate) shared: &'f SharedMemory,
    pub(crate) waker: &'f MasterWaker,
    pub(crate) functions: &'f mut FarmFunctions<'a>,
}

impl<'f> Worker<'f, '_> {
    /// Computes items until there are no more. Begins with the items that an earlier worker with the same index has
    /// taken and not finished. Also calls the functions of the program for the start and the end of a worker. Returns
    /// 0, the exit status for the process.
    pub(crate) fn run(&mut self) -> i32 {
        let queue = ItemQueue(self.shared);
        if let Some(start) = &mut self.functions.worker_start {
            start(self.index);
        }
        let mut result = Vec::new();
        // The items that an earlier worker with this index had taken and not finished.
        let mut taken = queue.claimed_items(self.index);
        loop {
            for number in taken.drain(..) {
                self.compute_item(number, &mut result);
            }
            if !self.take_items(queue, &mut taken) {
                break;
            }
        }
        self.shared.worker_controls()[self.index as usize].is_finished.store(1, Ordering::SeqCst);
        if let Some(end) = &mut self.functions.worker_end {
            end(self.index);
        }
        0
    }

    /// Takes items from the queue, and appends their numbers to `taken`. Waits for the first item. Then takes further
    /// items without waiting, up to the number that [`Worker::chunk_limit`] returns. Returns `false` if there are no
    /// more items.
    fn take_items(&self, queue: ItemQueue<'_>, taken: &mut Vec<u64>) -> bool {
        let take_or_end = || match queue.take_next_item(self.index) {
            TakenItem::NothingYet => None,
            item_or_end => Some(item_or_end),
        };
        let TakenItem::Item(first) = self.shared.control().items.0.wait_until(take_or_end) else {
            return false;
        };
        taken.push(first);
        for _ in 1..self.chunk_limit(first) {
            let TakenItem::Item(number) = queue.take_next_item(self.index) else { break };
            taken.push(number);
        }
        true
    }

    /// Returns how many items a worker takes at once if the first one has the number `first`. This is the option
    /// `chunk`, and fewer near the last item, so that all workers end at about the same time.
    fn chunk_limit(&self, first: u64) -> u64 {
        match self.shared.control().total.load(Ordering::SeqCst) {
            UNKNOWN_TOTAL => self.chunk,
            total => {
                (total.saturating_sub(first) / (2 * self.shared.sizes.workers as u64)).clamp(1, self.chunk)
            }
        }
    }

    /// Computes the item with the number `number`, and writes the result into the ring buffer of this worker. Waits
    /// while the ring buffer is full. Wakes the master (the process that started the farm) after each piece of the
    /// result.
    ///
    /// `result` is a buffer that is used for all items, one after the other. Until the whole result is written, the
    /// shared memory shows that this worker computes the item.
    fn compute_item(&mut self, number: u64, result: &mut Vec<u8>) {
        let index = self.index as usize;
        let control = &self.shared.worker_controls()[index];
        // 0 stands for no item.
        control.running.store(number + 1, Ordering::SeqCst);
        result.clear();
        let bytes = self.item_bytes(number);
        let item = WorkItem { number, bytes, worker: self.index };
        let header = match (self.functions.work)(item, result) {
            Ok(()) => ResultHeader::done(number),
            Err(code) => ResultHeader::failed(number, code),
        };
        let ring = ResultRing { control: &control.results, bytes: self.shared.result_ring(index) };
        let mut unsent = &result[..];
        loop {
            let (length, is_last) = ring.control.room.wait_until(|| ring.write_piece(header, unsent));
            self.waker.wake_if_sleeping(&self.shared.control().is_master_sleeping.0);
            unsent = &unsent[length..];
            if is_last {
                break;
            }
        }
        control.running.store(0, Ordering::SeqCst);
    }

    /// Returns the bytes of the item with the number `number`, which this worker has taken. Empty if the farm has no
    /// reader process.
    fn item_bytes(&self, number: u64) -> &'f [u8] {
        let Some(location) = self.shared.item_location(number) else { return &[] };
        let start = location.start.load(Ordering::SeqCst);
        let length = usize::try_from(location.length.load(Ordering::SeqCst)).unwrap_or(0);
        // SAFETY: the reader does not write to these bytes before the master has delivered the result of this item.
        unsafe { self.shared.input_ring().slice(start, length) }
    }
}
