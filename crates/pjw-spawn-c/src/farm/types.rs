//! The types of `pjw_farm.h` as Rust types, and the conversions of items, results and progress. The types whose fields
//! C programs use have the same layout as in C.

use std::ffi::{c_char, c_int, c_uint, c_void};

use libc::pid_t;
use spawn::ExitStatus;
use spawn::farm::{FarmProgress, ItemResult, Outcome, WorkItem};

/// The C type `pjw_farm_bytes_t`: an array of bytes that grows, for one item or one result of a farm (a group of
/// worker processes that compute items). The functions of the program append bytes by [`super::pjw_farm_append`].
pub struct PjwFarmBytes(pub(crate) Vec<u8>);

/// The C type `pjw_farm_item_t`: one item, which is a unit of work of a farm (a group of worker processes). Contains
/// the number and the bytes of the item, and the index of the worker that computes the item. A worker passes a
/// pointer to this value to the function of the program that computes the item.
#[repr(C)]
pub struct PjwFarmItem {
    number: u64,
    bytes: *const c_void,
    size: usize,
    worker: c_uint,
}

impl PjwFarmItem {
    /// Converts an item to the C type. The C value points to the bytes of `item`.
    pub(crate) fn from_item(item: &WorkItem<'_>) -> Self {
        let (bytes, size) = (item.bytes.as_ptr().cast(), item.bytes.len());
        Self { number: item.number, bytes, size, worker: item.worker }
    }
}

/// The C type `pjw_farm_result_t`: the result of one item that a farm (a group of worker processes) computed.
#[repr(C)]
pub struct PjwFarmResult {
    number: u64,
    outcome: c_int,
    code: c_int,
    attempts: c_uint,
    bytes: *const c_void,
    size: usize,
}

impl PjwFarmResult {
    /// Converts a result to the C type. The C value points to the bytes of `result`.
    pub(crate) fn from_result(result: &ItemResult) -> Self {
        let (outcome, code, attempts, bytes): (_, _, _, &[u8]) = match &result.outcome {
            Outcome::Done(bytes) => (0, 0, 0, bytes),
            Outcome::Failed { code, bytes } => (1, *code, 0, bytes),
            Outcome::Killed { attempts, end: ExitStatus::Signal(signal) } => (2, *signal, *attempts, &[]),
            Outcome::Killed { attempts, end: ExitStatus::Code(code) } => (3, *code, *attempts, &[]),
        };
        let (bytes, size) = (bytes.as_ptr().cast(), bytes.len());
        Self { number: result.number, outcome, code, attempts, bytes, size }
    }
}

/// The C type `pjw_farm_progress_t`: the progress of a farm (a group of worker processes that compute items), such as
/// the number of items and the number of failed items.
#[repr(C)]
pub struct PjwFarmProgress {
    total: u64,
    delivered: u64,
    failed: u64,
    replaced: u64,
    workers: c_uint,
}

impl PjwFarmProgress {
    /// Converts the progress of a farm to the C type.
    pub(crate) fn from_progress(progress: &FarmProgress) -> Self {
        Self {
            total: progress.total.unwrap_or(u64::MAX),
            delivered: progress.delivered,
            failed: progress.failed,
            replaced: progress.replaced,
            workers: progress.workers,
        }
    }
}

/// The C function `work(data, item, result)` of the program, which computes the item `item` in a worker process. The
/// function appends the result to `result`. Returns 0, or an error code of the program. `data` is the pointer from
/// [`PjwFarmOptions`].
pub(crate) type WorkFunction = extern "C" fn(*mut c_void, *const PjwFarmItem, *mut PjwFarmBytes) -> c_int;
/// The C function `read(data, number, item)` of the program, which reads the item with the number `number` in the
/// reader process. The function appends the bytes of the item to `item`. Returns 1, or 0 if there is no such item, or a
/// negative error code of the program. `data` is the pointer from [`PjwFarmOptions`].
pub(crate) type ReadFunction = extern "C" fn(*mut c_void, u64, *mut PjwFarmBytes) -> c_int;
/// The C function `write(data, result)` of the program, which writes the result of an item in the writer process.
/// Returns 0, or an error code of the program. `data` is the pointer from [`PjwFarmOptions`].
pub(crate) type WriteFunction = extern "C" fn(*mut c_void, *const PjwFarmResult) -> c_int;
/// The C function `writer_end(data)` of the program, which the writer process calls after the last result, before the
/// process ends. Returns 0, or an error code of the program. `data` is the pointer from [`PjwFarmOptions`].
pub(crate) type WriterEndFunction = extern "C" fn(*mut c_void) -> c_int;
/// A C function `f(data, worker)` of the program, which each worker process calls at its start or at its end. `worker`
/// is the index of the worker. `data` is the pointer from [`PjwFarmOptions`].
pub(crate) type WorkerFunction = extern "C" fn(*mut c_void, c_uint);
/// The C function `fork_process(data)` of the program, which the farm calls instead of fork(2). Like fork(2), the
/// function returns 0 in the new process, and the process id or -1 in the calling process. `data` is the pointer from
/// [`PjwFarmOptions`].
pub(crate) type ForkFunction = extern "C" fn(*mut c_void) -> pid_t;

/// The C type `pjw_farm_options_t`: the options of a farm (a group of worker processes that compute items), such as
/// the number of its workers, and the functions of the program that the processes of the farm call.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct PjwFarmOptions {
    pub(crate) size: usize,
    pub(crate) workers: c_uint,
    pub(crate) flags: c_int,
    pub(crate) items: u64,
    pub(crate) chunk: u64,
    pub(crate) window: u64,
    pub(crate) ring_bytes: u64,
    pub(crate) input_bytes: u64,
    pub(crate) attempts: c_uint,
    pub(crate) cpus: *const c_char,
    pub(crate) data: *mut c_void,
    pub(crate) work: Option<WorkFunction>,
    pub(crate) read: Option<ReadFunction>,
    pub(crate) write: Option<WriteFunction>,
    pub(crate) worker_start: Option<WorkerFunction>,
    pub(crate) worker_end: Option<WorkerFunction>,
    pub(crate) fork_process: Option<ForkFunction>,
    pub(crate) writer_end: Option<WriterEndFunction>,
}
