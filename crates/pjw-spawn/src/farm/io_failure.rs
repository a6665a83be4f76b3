//! Why the reader or the writer of a farm ends before its work is done: a place in the shared memory, for the master.

use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};

/// Values of [`IoFailure::kind`]. 0 stands for none: the shared memory is zero at first.
const FUNCTION_FAILED: u32 = 1;
const ITEM_TOO_LARGE: u32 = 2;
const INVALID_MESSAGE: u32 = 3;

/// The reason why the reader process or the writer process of a farm ends, and the farm with it. Another process in its
/// place would meet the same error or the same item, or would use memory that is not sound.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum IoFailureReason {
    /// The function of the program that reads the item `number`, or writes its result, returned the error `code`.
    FunctionFailed { number: u64, code: i32 },
    /// The item `number` has `size` bytes, and does not fit into the shared memory for items.
    ItemTooLarge { number: u64, size: u64 },
    /// The writer process has read a message that the master process did not write. The message may name a wrong
    /// result. The master knows which result it has sent.
    InvalidMessage,
}

/// The place in the shared memory where the reader process or the writer process of a farm stores the reason of its
/// end.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct IoFailure {
    kind: AtomicU32,
    code: AtomicI32,
    number: AtomicU64,
    size: AtomicU64,
}

impl IoFailure {
    /// Stores `reason`, so that the master can report it. Returns 1, the exit status for the process.
    pub(crate) fn store(&self, reason: IoFailureReason) -> i32 {
        let (kind, number, code, size) = match reason {
            IoFailureReason::FunctionFailed { number, code } => (FUNCTION_FAILED, number, code, 0),
            IoFailureReason::ItemTooLarge { number, size } => (ITEM_TOO_LARGE, number, 0, size),
            IoFailureReason::InvalidMessage => (INVALID_MESSAGE, 0, 0, 0),
        };
        self.code.store(code, Ordering::SeqCst);
        self.number.store(number, Ordering::SeqCst);
        self.size.store(size, Ordering::SeqCst);
        // Stored last: a process that is killed before this store has stored no reason.
        self.kind.store(kind, Ordering::SeqCst);
        1
    }

    /// Returns the stored reason. `None` if the process has stored none.
    pub(crate) fn load(&self) -> Option<IoFailureReason> {
        let number = self.number.load(Ordering::SeqCst);
        match self.kind.load(Ordering::SeqCst) {
            FUNCTION_FAILED => {
                Some(IoFailureReason::FunctionFailed { number, code: self.code.load(Ordering::SeqCst) })
            }
            ITEM_TOO_LARGE => {
                Some(IoFailureReason::ItemTooLarge { number, size: self.size.load(Ordering::SeqCst) })
            }
            INVALID_MESSAGE => Some(IoFailureReason::InvalidMessage),
            _ => None,
        }
    }
}
