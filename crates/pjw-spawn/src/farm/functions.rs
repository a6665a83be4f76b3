//! The functions of the program that the processes of a farm call.

use nix::errno::Errno;

use super::result::{Item, ItemResult};

/// A function of the program that computes an item and appends the bytes of the result. An error is an error code of
/// the program.
pub(crate) type Work<'a> = Box<dyn FnMut(Item<'_>, &mut Vec<u8>) -> Result<(), i32> + 'a>;
/// A function of the program that reads the item with this number and appends its bytes. Returns `false` if there are
/// no more items.
pub(crate) type Read<'a> = Box<dyn FnMut(u64, &mut Vec<u8>) -> Result<bool, i32> + 'a>;
/// A function of the program that writes a result.
pub(crate) type Write<'a> = Box<dyn FnMut(&ItemResult) -> Result<(), i32> + 'a>;
/// A function of the program that the writer process calls after the last result, to write what it has buffered.
pub(crate) type WriterEndFunction<'a> = Box<dyn FnMut() -> Result<(), i32> + 'a>;
/// A function of the program that a worker process calls at its start or at its end, with the index of the worker.
pub(crate) type WorkerFunction<'a> = Box<dyn FnMut(u32) + 'a>;
/// A function of the program that forks the process instead of fork(2). Returns 0 in the new process, and the process
/// id of the new process in the calling process.
pub(crate) type Fork<'a> = Box<dyn FnMut() -> Result<libc::pid_t, Errno> + 'a>;

/// The functions of the program that the processes of a farm call.
pub(crate) struct Functions<'a> {
    pub(crate) work: Work<'a>,
    pub(crate) worker_start: Option<WorkerFunction<'a>>,
    pub(crate) worker_end: Option<WorkerFunction<'a>>,
    pub(crate) read: Option<Read<'a>>,
    pub(crate) write: Option<Write<'a>>,
    pub(crate) writer_end: Option<WriterEndFunction<'a>>,
    pub(crate) fork: Option<Fork<'a>>,
}
