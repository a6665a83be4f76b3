//! The queues through which a result passes in the master: ordered if requested, then to the writer, then to the
//! program.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::Ordering;

use super::memory::SharedMemory;
use super::result::{FarmProgress, ItemResult, Outcome};
use super::ring::ResultHeader;
use super::window::{ItemQueue, ItemState, ItemStatus};
use super::writer;

/// The results that the master process of a farm has received from the workers. The master puts the results into order
/// if requested, sends them to the writer process if the farm has one, and keeps them until the program takes them.
#[derive(Debug, Default)]
pub(crate) struct ResultQueue {
    is_in_order: bool,
    has_reader: bool,
    pub(crate) has_writer: bool,
    /// Results that arrived before the result of an item with a lower number, by item number.
    out_of_order: BTreeMap<u64, Outcome>,
    /// The number of the item whose result is the next in order.
    next_in_order: u64,
    /// Results that are not yet, or not completely, in the ring buffer to the writer.
    outgoing: VecDeque<ItemResult>,
    /// The bytes of the first result in `outgoing` that were already written into the ring buffer.
    sent_bytes: usize,
    /// Results that were sent to the writer and are not written yet.
    unwritten: VecDeque<ItemResult>,
    /// The number of results that the writer has written.
    written: u64,
    /// Results for the program.
    ready: VecDeque<ItemResult>,
    pub(crate) progress: FarmProgress,
}

impl ResultQueue {
    /// Makes an empty queue. If `is_in_order` is true, the queue returns the results in the order of their items.
    /// `has_reader` says whether the farm has a process that reads the items. `has_writer` says whether the farm has a
    /// process that writes the results.
    pub(crate) fn new(is_in_order: bool, has_reader: bool, has_writer: bool) -> Self {
        Self { is_in_order, has_reader, has_writer, ..Self::default() }
    }

    /// Removes and returns the next result that is ready for the program. `None` if no result is ready.
    pub(crate) fn pop(&mut self) -> Option<ItemResult> {
        self.ready.pop_front()
    }

    /// Returns whether at least one result is ready for the program.
    pub(crate) fn has_results(&self) -> bool {
        !self.ready.is_empty()
    }

    /// Returns whether a result, or a part of a result, must still be sent to the writer process. If so after a call of
    /// [`ResultQueue::send_to_writer`], the ring buffer to the writer process is full.
    pub(crate) fn has_unsent_results(&self) -> bool {
        !self.outgoing.is_empty()
    }

    /// Returns the number of the item whose result the writer process must write next. 0 if there is no such result.
    pub(crate) fn first_unwritten_item(&self) -> u64 {
        self.unwritten.front().or(self.outgoing.front()).map_or(0, |result| result.number)
    }

    /// Records `outcome` as the result of the item `number`, which the worker with the index `owner` has computed.
    /// Returns `false`, and records nothing, if the item was not assigned to this worker. `shared` is the shared memory
    /// of the farm.
    pub(crate) fn record_result(
        &mut self,
        shared: &SharedMemory,
        owner: u32,
        number: u64,
        outcome: Outcome,
    ) -> bool {
        let queue = ItemQueue(shared);
        if queue.item_state(number) != (ItemState { position: number, owner, status: ItemStatus::Claimed }) {
            return false;
        }
        queue.store_item_state(ItemState::new(number, ItemStatus::Returned));
        if !self.is_in_order {
            self.emit(shared, ItemResult { number, outcome });
            return true;
        }
        self.out_of_order.insert(number, outcome);
        while let Some(outcome) = self.out_of_order.remove(&self.next_in_order) {
            self.emit(shared, ItemResult { number: self.next_in_order, outcome });
            self.next_in_order += 1;
        }
        true
    }

    /// Passes a result on: to the writer process if the farm has one, or else to the program.
    fn emit(&mut self, shared: &SharedMemory, result: ItemResult) {
        if self.has_writer {
            self.outgoing.push_back(result);
        } else {
            self.deliver(shared, result);
        }
    }

    /// Copies results into the ring buffer to the writer process, until all are copied or the buffer is full. Returns
    /// whether anything was copied. `shared` is the shared memory of the farm.
    pub(crate) fn send_to_writer(&mut self, shared: &SharedMemory) -> bool {
        let mut is_any_sent = false;
        while let Some(result) = self.outgoing.front() {
            let ring = writer::ring(shared);
            let header = ResultHeader::from_outcome(result.number, &result.outcome);
            let unsent = result.outcome.bytes().get(self.sent_bytes..).unwrap_or_default();
            let Some((length, is_last)) = ring.write_piece(header, unsent) else { break };
            is_any_sent = true;
            self.sent_bytes += length;
            if is_last {
                self.sent_bytes = 0;
                self.unwritten.extend(self.outgoing.pop_front());
            }
        }
        if is_any_sent {
            writer::ring(shared).control.filled.notify();
        }
        is_any_sent
    }

    /// Finds the results that the writer process has written since the last call, and makes these results available to
    /// the program. Returns whether there were such results. `shared` is the shared memory of the farm.
    pub(crate) fn deliver_written(&mut self, shared: &SharedMemory) -> bool {
        let written = shared.control().written.load(Ordering::SeqCst);
        let is_any_new = written != self.written;
        while self.written < written {
            self.written += 1;
            let Some(result) = self.unwritten.pop_front() else { break };
            let outcome = result.outcome.without_bytes();
            self.deliver(shared, ItemResult { number: result.number, outcome });
        }
        is_any_new
    }

    /// Prepares the results for a new writer process after the old one was killed. Empties the ring buffer, and queues
    /// again each result that was sent to the old process but not written. Must be called while no process uses the
    /// ring buffer.
    pub(crate) fn requeue_unwritten(&mut self, shared: &SharedMemory) {
        self.deliver_written(shared);
        writer::ring(shared).reset();
        self.sent_bytes = 0;
        while let Some(result) = self.unwritten.pop_back() {
            self.outgoing.push_front(result);
        }
    }

    /// Makes a result ready for the program, and records its item as delivered.
    fn deliver(&mut self, shared: &SharedMemory, result: ItemResult) {
        self.progress.delivered += 1;
        self.progress.failed += u64::from(!matches!(result.outcome, Outcome::Done(_)));
        ItemQueue(shared).store_item_state(ItemState::new(result.number, ItemStatus::Delivered));
        self.ready.push_back(result);
        self.advance_window(shared);
    }

    /// Moves the window past the delivered items at its beginning. The window is the range of items whose state is in
    /// the shared memory. There, each item has a state word with its number and its status.
    ///
    /// - The bytes of the items that leave the window become free for further items.
    /// - The state word of each such item goes to the item that enters the window, if the farm has one.
    /// - If an item has entered the window, wakes the reader. A farm without a reader wakes the workers.
    fn advance_window(&self, shared: &SharedMemory) {
        let (queue, control) = (ItemQueue(shared), shared.control());
        let total = control.total.load(Ordering::SeqCst);
        let mut lowest = control.lowest.load(Ordering::SeqCst);
        let mut has_any_entered = false;
        while queue.item_state(lowest) == ItemState::new(lowest, ItemStatus::Delivered) {
            let entering = lowest + queue.window_size();
            if let Some(location) = shared.item_location(lowest) {
                control.freed_bytes.store(location.end(), Ordering::SeqCst);
            }
            lowest += 1;
            control.lowest.store(lowest, Ordering::SeqCst);
            if entering < total {
                let status = if self.has_reader { ItemStatus::Free } else { ItemStatus::Ready };
                queue.store_item_state(ItemState::new(entering, status));
                has_any_entered = true;
            }
        }
        if has_any_entered && self.has_reader {
            control.room.notify();
        } else if has_any_entered {
            control.items.0.notify();
        }
    }
}
