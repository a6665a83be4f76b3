//! The reader: one process that reads all items into the shared memory.

use std::sync::atomic::Ordering;

use super::functions::ReadFunction;
use super::io_failure::IoFailureReason;
use super::memory::{ItemLocation, SharedMemory, UNKNOWN_TOTAL};
use super::wake::MasterWaker;
use super::window::{ItemQueue, ItemState, ItemStatus, MAX_ITEMS};

/// The reader process of a farm: reads the items, and puts their bytes into the shared memory for the workers.
pub(crate) struct Reader<'f> {
    pub(crate) shared: &'f SharedMemory,
    pub(crate) waker: &'f MasterWaker,
}

impl Reader<'_> {
    /// Reads items by calling `read` until there are no more items or an error occurs. Returns the exit status for the
    /// process: 0, or 1 after an error.
    pub(crate) fn run(&self, read: &mut ReadFunction<'_>) -> i32 {
        let control = self.shared.control();
        // An earlier reader may have been killed before it woke the workers.
        control.items.0.notify_always();
        let mut number = self.first_unpublished();
        let mut bytes = Vec::new();
        while control.total.load(Ordering::SeqCst) == UNKNOWN_TOTAL {
            control.filled.store(number, Ordering::SeqCst);
            bytes.clear();
            match read(number, &mut bytes) {
                Err(code) => {
                    return control.reader_failure.store(IoFailureReason::FunctionFailed { number, code });
                }
                Ok(true) if bytes.len() > self.shared.sizes.input => {
                    let size = bytes.len() as u64;
                    return control.reader_failure.store(IoFailureReason::ItemTooLarge { number, size });
                }
                Ok(true) if number < MAX_ITEMS => self.publish(number, &bytes),
                // The input has ended, or a farm can't have more items.
                Ok(_) => control.total.store(number, Ordering::SeqCst),
            }
            number += 1;
            control.items.0.notify();
        }
        self.waker.wake_if_sleeping(&control.is_master_sleeping.0);
        0
    }

    /// Returns the number of the first item that no reader has put into the shared memory. A killed reader may have
    /// put in one item more than it has counted.
    fn first_unpublished(&self) -> u64 {
        let queue = ItemQueue(self.shared);
        let mut number = self.shared.control().filled.load(Ordering::SeqCst);
        loop {
            let state = queue.item_state(number);
            // The state is still that of an earlier item, or no reader has put in this item yet.
            if state.position < number || state == ItemState::new(number, ItemStatus::Free) {
                return number;
            }
            number += 1;
        }
    }

    /// Waits until there is room for the item `number`. Then puts its bytes into the shared memory, and makes the
    /// item ready for the workers.
    fn publish(&self, number: u64, bytes: &[u8]) {
        let start = self.shared.control().room.wait_until(|| self.input_position(number, bytes.len()));
        // SAFETY: the range contains no item that is still needed, and no other process writes items.
        unsafe { self.shared.input_ring().write(start, bytes) };
        if let Some(location) = self.shared.item_location(number) {
            location.start.store(start, Ordering::SeqCst);
            location.length.store(bytes.len() as u64, Ordering::SeqCst);
        }
        ItemQueue(self.shared).store_item_state(ItemState::new(number, ItemStatus::Ready));
    }

    /// Returns the position in the ring buffer for items at which the item `number` can be written. Its `length`
    /// bytes must lie there in one piece. `None` in two cases:
    ///
    /// - There is not enough free space yet.
    /// - The state of an earlier item is still at the place for the state of this item in the shared memory.
    fn input_position(&self, number: u64, length: usize) -> Option<u64> {
        if ItemQueue(self.shared).item_state(number) != ItemState::new(number, ItemStatus::Free) {
            return None;
        }
        let control = self.shared.control();
        let (capacity, length) = (self.shared.sizes.input as u64, length as u64);
        let previous = number.checked_sub(1).and_then(|previous| self.shared.item_location(previous));
        let head = previous.map_or(0, ItemLocation::end);
        let fits_before_end = head % capacity + length <= capacity;
        let start = if fits_before_end { head } else { head.next_multiple_of(capacity) };
        // The results of all earlier items were delivered.
        let is_empty = control.lowest.load(Ordering::SeqCst) == number;
        let freed = control.freed_bytes.load(Ordering::SeqCst);
        (is_empty || start + length - freed <= capacity).then_some(start)
    }
}
