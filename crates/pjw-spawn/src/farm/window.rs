//! The queue of the items: a window of positions (item numbers) that moves over all items.
//!
//! The item at position p has the state word with the index `p % window` in the shared memory. The word contains the
//! position, the worker that took the item (the owner), and the status. A worker takes an item by one
//! compare-and-exchange of this word, so there is no moment at which an item is taken and its owner is unknown. `next`
//! only says from where to search: a worker that is killed before it moves `next` costs the others one step.
//!
//! The owner changes the word only once, from READY to CLAIMED. All further changes are made by the master.

use std::sync::atomic::{AtomicU64, Ordering};

use super::memory::{SharedMemory, UNKNOWN_TOTAL};

/// The largest number of items of a farm. Item numbers up to this one fit into the 44 bits for the item number in a
/// state word ([`ItemState`]).
pub(crate) const MAX_ITEMS: u64 = 1 << 43;
/// The largest number of workers of a farm. Their indexes fit into the 16 bits for the worker index in a state word
/// ([`ItemState`]).
pub(crate) const MAX_WORKERS: u32 = 1 << 14;

/// The first bit of the item number in a state word ([`ItemState`]).
const POSITION_SHIFT: u32 = 20;
/// The first bit of the worker index in a state word. The status is in the bits below.
const OWNER_SHIFT: u32 = 4;

/// The status of an item in the queue of a farm, from not yet read to delivered to the program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ItemStatus {
    /// The reader process has not read the item yet.
    Free = 0,
    /// The item can be taken by a worker.
    Ready = 1,
    /// A worker has taken the item.
    Claimed = 2,
    /// The master process has received the result of the item.
    Returned = 3,
    /// The result of the item was delivered to the program.
    Delivered = 4,
}

/// The content of a state word in the shared memory, which describes one item of a farm: the number of the item
/// (`position`), the index of the worker that has taken the item (`owner`), and the status.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ItemState {
    pub(crate) position: u64,
    pub(crate) owner: u32,
    pub(crate) status: ItemStatus,
}

impl ItemState {
    /// Returns the state of the item with the number `position` and the status `status`, without a worker: `owner` is
    /// 0.
    pub(crate) fn new(position: u64, status: ItemStatus) -> Self {
        Self { position, owner: 0, status }
    }

    fn to_word(self) -> u64 {
        self.position << POSITION_SHIFT | u64::from(self.owner) << OWNER_SHIFT | self.status as u64
    }

    fn from_word(word: u64) -> Self {
        let status = match word & 0xF {
            0 => ItemStatus::Free,
            1 => ItemStatus::Ready,
            2 => ItemStatus::Claimed,
            3 => ItemStatus::Returned,
            _ => ItemStatus::Delivered,
        };
        let owner = u32::try_from(word >> OWNER_SHIFT & 0xFFFF).unwrap_or(0);
        Self { position: word >> POSITION_SHIFT, owner, status }
    }
}

/// The result of the attempt of a worker to take an item from the queue ([`ItemQueue::take_next_item`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TakenItem {
    /// The worker has taken an item. The variant contains the number of the item.
    Item(u64),
    /// No item can be taken now.
    NothingYet,
    /// No item can be taken now or later.
    End,
}

/// The queue of the items of a farm. The shared memory contains the states of a limited number of successive items, the
/// window. The window advances when results are delivered.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ItemQueue<'a>(pub(crate) &'a SharedMemory);

impl<'a> ItemQueue<'a> {
    fn state_word(self, position: u64) -> &'a AtomicU64 {
        let states = self.0.state_words();
        // The window is a power of two.
        &states[usize::try_from(position).unwrap_or(usize::MAX) & (states.len() - 1)]
    }

    /// Returns the state of the item with the number `position`. If this item is not in the window, returns the state
    /// of an earlier or later item, which has a different number.
    pub(crate) fn item_state(self, position: u64) -> ItemState {
        ItemState::from_word(self.state_word(position).load(Ordering::SeqCst))
    }

    /// Stores `state` as the state of the item with the number `state.position`.
    pub(crate) fn store_item_state(self, state: ItemState) {
        self.state_word(state.position).store(state.to_word(), Ordering::SeqCst);
    }

    /// Returns the size of the window: the number of items whose states are in the shared memory.
    pub(crate) fn window_size(self) -> u64 {
        self.0.sizes.window as u64
    }

    /// Takes the next ready item from the queue, for the worker with the index `owner`. Does not wait:
    /// [`TakenItem::NothingYet`] if no item is ready now, and [`TakenItem::End`] if all items of the farm have been
    /// taken.
    pub(crate) fn take_next_item(self, owner: u32) -> TakenItem {
        let control = self.0.control();
        let mut position = control.next.0.load(Ordering::SeqCst);
        loop {
            let total = control.total.load(Ordering::SeqCst);
            if total != UNKNOWN_TOTAL && position >= total {
                return TakenItem::End;
            }
            let word = self.state_word(position);
            let current = word.load(Ordering::SeqCst);
            let state = ItemState::from_word(current);
            // The word is still that of an earlier item, or the reader has not read this item yet.
            if state.position < position || state == ItemState::new(position, ItemStatus::Free) {
                return TakenItem::NothingYet;
            }
            if state == ItemState::new(position, ItemStatus::Ready) {
                let claimed = ItemState { position, owner, status: ItemStatus::Claimed };
                let exchange =
                    word.compare_exchange(current, claimed.to_word(), Ordering::SeqCst, Ordering::SeqCst);
                if exchange.is_ok() {
                    control.next.0.fetch_max(position + 1, Ordering::SeqCst);
                    return TakenItem::Item(position);
                }
            }
            position += 1;
        }
    }

    /// Returns the numbers of the items that the worker with the index `owner` has taken, and whose results the
    /// master has not received. The numbers are in ascending order. The process of this worker must have ended, or be
    /// the caller.
    ///
    /// Also moves the place where workers begin to search for an item (`next` in the shared memory) past the items
    /// found. A worker that was killed may have taken one item and not moved `next`. So the search here ends behind
    /// `next`, by one item for each worker. If `next` were not moved, the number of such items would grow with each
    /// worker that dies.
    pub(crate) fn claimed_items(self, owner: u32) -> Vec<u64> {
        let control = self.0.control();
        let lowest = control.lowest.load(Ordering::SeqCst);
        let end = control.next.0.load(Ordering::SeqCst) + self.0.sizes.workers as u64;
        let is_own = |position: &u64| {
            self.item_state(*position)
                == ItemState { position: *position, owner, status: ItemStatus::Claimed }
        };
        let claimed: Vec<u64> = (lowest..end.min(lowest + self.window_size())).filter(is_own).collect();
        if let Some(last) = claimed.last() {
            control.next.0.fetch_max(last + 1, Ordering::SeqCst);
        }
        claimed
    }

    /// Returns whether workers have taken all items of the farm. `false` while the number of items is unknown.
    pub(crate) fn is_exhausted(self) -> bool {
        let control = self.0.control();
        // `next` may lie before taken items: a worker may have been killed before it moved `next`.
        let mut position = control.next.0.load(Ordering::SeqCst);
        let total = control.total.load(Ordering::SeqCst);
        while position < total && self.item_state(position).position >= position {
            if matches!(self.item_state(position).status, ItemStatus::Free | ItemStatus::Ready) {
                return false;
            }
            position += 1;
        }
        position >= total
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::farm::memory::MemorySizes;

    fn shared() -> SharedMemory {
        let sizes = MemorySizes { workers: 3, window: 8, ring: 4096, input: 0, has_writer: false };
        SharedMemory::map(sizes).unwrap()
    }

    #[test]
    fn a_word_holds_position_owner_and_status() {
        let state = ItemState { position: MAX_ITEMS, owner: MAX_WORKERS, status: ItemStatus::Returned };
        assert_eq!(ItemState::from_word(state.to_word()), state);
    }

    #[test]
    fn items_are_taken_in_order_and_once() {
        let shared = shared();
        let queue = ItemQueue(&shared);
        (0..8).for_each(|position| queue.store_item_state(ItemState::new(position, ItemStatus::Ready)));
        assert_eq!(queue.take_next_item(0), TakenItem::Item(0));
        assert_eq!(queue.take_next_item(1), TakenItem::Item(1));
        assert_eq!(queue.take_next_item(0), TakenItem::Item(2));
        assert_eq!(queue.claimed_items(0), [0, 2]);
        shared.control().total.store(4, Ordering::SeqCst);
        assert_eq!(queue.take_next_item(2), TakenItem::Item(3));
        assert_eq!(queue.take_next_item(2), TakenItem::End);
        assert!(queue.is_exhausted());
    }

    #[test]
    fn a_worker_that_is_killed_right_after_taking_an_item_hides_none() {
        let shared = shared();
        let queue = ItemQueue(&shared);
        (0..4).for_each(|position| queue.store_item_state(ItemState::new(position, ItemStatus::Ready)));
        // Two workers took an item each, and were killed before they moved `next`.
        queue.store_item_state(ItemState { position: 0, owner: 1, status: ItemStatus::Claimed });
        queue.store_item_state(ItemState { position: 1, owner: 2, status: ItemStatus::Claimed });
        assert_eq!(queue.claimed_items(1), [0]);
        assert_eq!(queue.claimed_items(2), [1]);
        assert_eq!(queue.take_next_item(0), TakenItem::Item(2));
        assert_eq!(shared.control().next.0.load(Ordering::SeqCst), 3);
        assert!(!queue.is_exhausted());
    }

    #[test]
    fn a_worker_that_is_killed_again_and_again_right_after_taking_an_item_hides_none() {
        let shared = shared();
        let queue = ItemQueue(&shared);
        (0..8).for_each(|position| queue.store_item_state(ItemState::new(position, ItemStatus::Ready)));
        // The worker is killed more often than there are workers, each time before it moves `next`.
        for position in 0..8 {
            queue.store_item_state(ItemState { position, owner: 1, status: ItemStatus::Claimed });
            assert_eq!(queue.claimed_items(1), Vec::from_iter(0..=position));
        }
    }

    #[test]
    fn a_position_that_is_not_filled_is_waited_for() {
        let shared = shared();
        let queue = ItemQueue(&shared);
        (0..8).for_each(|position| queue.store_item_state(ItemState::new(position, ItemStatus::Free)));
        assert_eq!(queue.take_next_item(0), TakenItem::NothingYet);
        queue.store_item_state(ItemState::new(0, ItemStatus::Ready));
        assert_eq!(queue.take_next_item(0), TakenItem::Item(0));
        // The window is full: position 8 has the word of position 0.
        (1..8).for_each(|position| {
            queue.store_item_state(ItemState { position, owner: 1, status: ItemStatus::Claimed });
        });
        assert_eq!(queue.take_next_item(0), TakenItem::NothingYet);
        queue.store_item_state(ItemState::new(8, ItemStatus::Ready));
        assert_eq!(queue.take_next_item(0), TakenItem::Item(8));
    }
}
