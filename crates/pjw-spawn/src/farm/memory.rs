//! The shared memory of a farm: one anonymous mapping (`MAP_SHARED`) that all its processes inherit.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use nix::errno::Errno;

use super::io_failure::IoFailure;
use super::wake::FutexCondition;

/// The value of [`FarmControl::total`], the number of items of a farm, while this number is unknown: the reader process
/// has not yet reached the end of the input.
pub(crate) const UNKNOWN_TOTAL: u64 = u64::MAX;

/// A type that several processes may use at the same time, and for which bytes of zero are a valid value.
///
/// # Safety
/// The type consists of atomic numbers only.
unsafe trait Shareable {}

/// The variables in the shared memory of a farm that are used by all processes of the farm, such as the number of
/// items.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct FarmControl {
    /// The number of all items, or [`UNKNOWN_TOTAL`].
    pub(crate) total: AtomicU64,
    /// The number of the first item in the window (the range of items that the shared memory describes now). The
    /// results of all items before it were delivered. Only the master process writes this number.
    pub(crate) lowest: AtomicU64,
    /// The total size in bytes of the items before `lowest`. Only the master process writes this number.
    pub(crate) freed_bytes: AtomicU64,
    /// The number of the item at which workers begin to search for an item to compute. All items before it have been
    /// taken.
    pub(crate) next: CacheLine<AtomicU64>,
    /// The condition for which idle workers wait: there is an item to compute, or there will be no further item.
    pub(crate) items: CacheLine<FutexCondition>,
    /// The condition for which the reader process waits: there is room for another item.
    pub(crate) room: FutexCondition,
    /// 1 while the master process sleeps, and otherwise 0.
    pub(crate) is_master_sleeping: CacheLine<AtomicU32>,
    /// The number of items that the reader has published. It may be one too small if the reader was killed.
    pub(crate) filled: AtomicU64,
    /// The reason why the reader process can't continue.
    pub(crate) reader_failure: IoFailure,
    /// The reason why the writer process can't continue.
    pub(crate) writer_failure: IoFailure,
    /// The number of results that the writer has written since the start of the farm.
    pub(crate) written: AtomicU64,
    /// The variables of the ring buffer that transfers results from the master process to the writer process.
    pub(crate) to_writer: RingControl,
}

/// A value that has a cache line of its own, so that processes which use neighbouring values do not slow each other
/// down (false sharing).
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct CacheLine<T>(pub(crate) T);

/// The variables of a ring buffer in the shared memory of a farm: the write position, the read position, and the
/// condition variables of the two processes that use the ring buffer.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct RingControl {
    /// The total number of bytes that were written into the ring buffer.
    pub(crate) head: AtomicU64,
    /// The total number of bytes that were read from the ring buffer.
    pub(crate) tail: CacheLine<AtomicU64>,
    /// The condition for which the sending process waits: there is room in the ring buffer.
    pub(crate) room: FutexCondition,
    /// The condition for which the writer process waits: the ring buffer contains data. The master process does not use
    /// it, because an eventfd wakes this process.
    pub(crate) filled: FutexCondition,
}

/// The variables of one worker process in the shared memory of a farm, such as the number of the item that the worker
/// computes now.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct WorkerControl {
    /// The number of the item that the worker computes now, plus 1. 0 if it computes no item.
    pub(crate) running: AtomicU64,
    /// 1 if the worker has found that no item is left, and otherwise 0.
    pub(crate) is_finished: AtomicU32,
    /// The variables of the ring buffer that transfers results from this worker to the master process.
    pub(crate) results: RingControl,
}

/// The place of the bytes of an item in the ring buffer for items: the position of the first byte, counted from the
/// beginning of all input, and the number of bytes.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct ItemLocation {
    pub(crate) start: AtomicU64,
    pub(crate) length: AtomicU64,
}

impl ItemLocation {
    /// Returns the position behind the last byte of the item.
    pub(crate) fn end(&self) -> u64 {
        self.start.load(Ordering::SeqCst) + self.length.load(Ordering::SeqCst)
    }
}

// SAFETY: the type consists of atomic numbers only.
unsafe impl Shareable for FarmControl {}
// SAFETY: the type consists of atomic numbers only.
unsafe impl Shareable for WorkerControl {}
// SAFETY: the type consists of atomic numbers only.
unsafe impl Shareable for ItemLocation {}
// SAFETY: the type is an atomic number.
unsafe impl Shareable for AtomicU64 {}

/// The sizes of the parts of a farm's shared memory, from which the layout of the memory is computed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MemorySizes {
    pub(crate) workers: usize,
    /// The number of items that the shared memory describes at the same time (the window). It is a power of two.
    pub(crate) window: usize,
    /// The size of each ring buffer in bytes, a power of two.
    pub(crate) ring: usize,
    /// The size in bytes of the memory for the items that the reader process has read. 0 if the farm has no reader
    /// process.
    pub(crate) input: usize,
    pub(crate) has_writer: bool,
}

/// The shared memory of a farm, which is a group of worker processes that compute numbered work items. The memory has
/// the same address in all processes of the farm.
#[derive(Debug)]
pub(crate) struct SharedMemory {
    start: NonNull<u8>,
    length: usize,
    pub(crate) sizes: MemorySizes,
    /// The offset in bytes at which each part begins.
    workers_at: usize,
    states_at: usize,
    locations_at: usize,
    rings_at: usize,
    input_at: usize,
}

impl SharedMemory {
    /// Maps shared memory with parts of the sizes `sizes`. Must be called before the processes of the farm are forked,
    /// because they inherit the mapping.
    ///
    /// # Errors
    /// The error of mmap(2). `ENOMEM` also if the sum of the sizes overflows.
    pub(crate) fn map(sizes: MemorySizes) -> Result<Self, Errno> {
        let mut length = 0_usize;
        let mut add_part = |bytes: Option<usize>| {
            let at = length;
            let bytes = bytes.and_then(|bytes| bytes.checked_next_multiple_of(4096));
            length = bytes.and_then(|bytes| length.checked_add(bytes)).ok_or(Errno::ENOMEM)?;
            Ok::<usize, Errno>(at)
        };
        add_part(Some(size_of::<FarmControl>()))?;
        let workers_at = add_part(sizes.workers.checked_mul(size_of::<WorkerControl>()))?;
        let states_at = add_part(sizes.window.checked_mul(size_of::<AtomicU64>()))?;
        let location_count = if sizes.input > 0 { sizes.window } else { 0 };
        let locations_at = add_part(location_count.checked_mul(size_of::<ItemLocation>()))?;
        let rings_at = add_part((sizes.workers + usize::from(sizes.has_writer)).checked_mul(sizes.ring))?;
        let input_at = add_part(Some(sizes.input))?;
        let (access, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_ANONYMOUS);
        // SAFETY: the kernel chooses an address where nothing is mapped.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), length, access, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(Errno::last());
        }
        let start = NonNull::new(start.cast()).ok_or(Errno::ENOMEM)?;
        let shared = Self { start, length, sizes, workers_at, states_at, locations_at, rings_at, input_at };
        shared.control().total.store(UNKNOWN_TOTAL, Ordering::SeqCst);
        Ok(shared)
    }

    /// Returns the `count` values of the part that begins at the offset `at`, which [`SharedMemory::map`] has computed.
    fn part<T: Shareable>(&self, at: usize, count: usize) -> &[T] {
        debug_assert!(at + count * size_of::<T>() <= self.length);
        // SAFETY: the part lies inside of the mapping, which lives as long as `self`, and begins at a page. All bytes
        // were zero at first, which is a value of the type, and are only changed as atomic numbers.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr().add(at).cast(), count) }
    }

    /// Returns the variables that are used by all processes of the farm.
    pub(crate) fn control(&self) -> &FarmControl {
        &self.part(0, 1)[0]
    }

    /// Returns the variables of the workers. The position in the slice is the index of the worker.
    pub(crate) fn worker_controls(&self) -> &[WorkerControl] {
        self.part(self.workers_at, self.sizes.workers)
    }

    /// Returns the state words of the items in the window. The window is the range of items that the shared memory
    /// describes now. [`super::window::ItemState`] is the content of a state word.
    pub(crate) fn state_words(&self) -> &[AtomicU64] {
        self.part(self.states_at, self.sizes.window)
    }

    /// Returns the place of the bytes of the item with the number `number`, which must be in the window (the range of
    /// items that the shared memory describes now). `None` if the farm has no reader process.
    pub(crate) fn item_location(&self, number: u64) -> Option<&ItemLocation> {
        if self.sizes.input == 0 {
            return None;
        }
        let index = usize::try_from(number % self.sizes.window as u64).ok()?;
        let locations: &[ItemLocation] = self.part(self.locations_at, self.sizes.window);
        locations.get(index)
    }

    /// Returns the memory of a ring buffer for results. If `index` is the index of a worker, the ring buffer transfers
    /// results from this worker to the master. If `index` is the number of workers, the ring buffer transfers results
    /// from the master to the writer process.
    pub(crate) fn result_ring(&self, index: usize) -> RingMemory {
        debug_assert!(index < self.sizes.workers + usize::from(self.sizes.has_writer));
        self.bytes(self.rings_at + index * self.sizes.ring, self.sizes.ring)
    }

    /// Returns the memory of the ring buffer into which the reader process writes the bytes of the items.
    pub(crate) fn input_ring(&self) -> RingMemory {
        self.bytes(self.input_at, self.sizes.input)
    }

    fn bytes(&self, at: usize, length: usize) -> RingMemory {
        debug_assert!(at + length <= self.length);
        // SAFETY: the range lies inside of the mapping.
        RingMemory { start: unsafe { self.start.add(at) }, length }
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: the mapping is from mmap(2), and no reference to it outlives `self`.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.length) };
    }
}

/// The memory of a ring buffer, which is a range of the shared memory of a farm. The position `p` in the transferred
/// data is the byte `p % length` of the range.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RingMemory {
    start: NonNull<u8>,
    length: usize,
}

impl RingMemory {
    /// Returns the length of the ring buffer in bytes.
    pub(crate) fn len(self) -> usize {
        self.length
    }

    fn offset(self, at: u64) -> usize {
        usize::try_from(at % (self.length.max(1) as u64)).unwrap_or(0)
    }

    /// Writes `bytes` into the ring buffer from the position `at` on, and continues at the beginning of the buffer
    /// after its end. Writes nothing if `bytes` is longer than the buffer.
    ///
    /// # Safety
    /// The shared memory must still be mapped, and no other process may use these bytes during the call.
    pub(crate) unsafe fn write(self, at: u64, bytes: &[u8]) {
        if bytes.len() > self.length {
            return;
        }
        let offset = self.offset(at);
        let (first, second) = bytes.split_at(bytes.len().min(self.length - offset));
        // SAFETY: both pieces lie in the ring buffer: the first ends at its end at the latest, and the second begins at
        // its beginning and is not longer than the buffer.
        unsafe {
            self.start.add(offset).as_ptr().copy_from_nonoverlapping(first.as_ptr(), first.len());
            self.start.as_ptr().copy_from_nonoverlapping(second.as_ptr(), second.len());
        }
    }

    /// Appends `length` bytes of the ring buffer, from the position `at` on, to `to`. After the end of the buffer,
    /// continues at its beginning. Appends nothing if `length` is more than the length of the buffer.
    ///
    /// # Safety
    /// The shared memory must still be mapped, and no other process may write these bytes during the call.
    pub(crate) unsafe fn read(self, at: u64, length: usize, to: &mut Vec<u8>) {
        if length > self.length {
            return;
        }
        let offset = self.offset(at);
        let first_length = length.min(self.length - offset);
        // SAFETY: both pieces lie in the ring buffer, as in `write`.
        unsafe {
            to.extend_from_slice(std::slice::from_raw_parts(self.start.add(offset).as_ptr(), first_length));
            to.extend_from_slice(std::slice::from_raw_parts(self.start.as_ptr(), length - first_length));
        }
    }

    /// Returns `length` bytes of the ring buffer from the position `at` on, without copying them. The slice is empty if
    /// these bytes would pass the end of the buffer.
    ///
    /// # Safety
    /// The shared memory must be mapped, and no process may write these bytes, as long as the slice is used.
    pub(crate) unsafe fn slice<'a>(self, at: u64, length: usize) -> &'a [u8] {
        let offset = self.offset(at);
        if offset + length > self.length {
            return &[];
        }
        // SAFETY: the bytes lie in the ring buffer.
        unsafe { std::slice::from_raw_parts(self.start.add(offset).as_ptr(), length) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_shared_memory_than_the_machine_can_address_is_refused() {
        let sizes = MemorySizes { workers: 1, window: 8, ring: 4096, input: 1 << 50, has_writer: false };
        assert_eq!(SharedMemory::map(sizes).map(drop), Err(Errno::ENOMEM));
        let sizes = MemorySizes { input: usize::MAX, ..sizes };
        assert_eq!(SharedMemory::map(sizes).map(drop), Err(Errno::ENOMEM));
    }
}
