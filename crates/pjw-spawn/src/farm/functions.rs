//! The functions of the program that the processes of a farm call.

use nix::errno::Errno;

use super::result::{ItemResult, WorkItem};

/// The type of the program's function that computes an item. The function appends the bytes of the result to the
/// vector, or returns an error code whose meaning the program defines.
pub(crate) type WorkFunction<'a> = Box<dyn FnMut(WorkItem<'_>, &mut Vec<u8>) -> Result<(), i32> + 'a>;
/// The type of the program's function that reads an item. The arguments are the number of the item, and the vector to
/// which the function appends the bytes of the item. Returns `false` if there is no item with this number, or an error
/// code whose meaning the program defines.
pub(crate) type ReadFunction<'a> = Box<dyn FnMut(u64, &mut Vec<u8>) -> Result<bool, i32> + 'a>;
/// The type of the program's function that writes the result of an item. An error is a code whose meaning the program
/// defines.
pub(crate) type WriteFunction<'a> = Box<dyn FnMut(&ItemResult) -> Result<(), i32> + 'a>;
/// The type of the program's function that the writer process calls after the last result, for example to write
/// buffered data. An error is a code whose meaning the program defines.
pub(crate) type WriterEndFunction<'a> = Box<dyn FnMut() -> Result<(), i32> + 'a>;
/// The type of the program's function that a worker process calls at its start or at its end. The argument is the index
/// of the worker, counted from 0.
pub(crate) type WorkerFunction<'a> = Box<dyn FnMut(u32) + 'a>;
/// The type of the program's function that forks the calling process, and that is called instead of fork(2). Returns 0
/// in the new process, and the process id of the new process in the calling process.
pub(crate) type ForkFunction<'a> = Box<dyn FnMut() -> Result<libc::pid_t, Errno> + 'a>;

/// The functions of the program that the processes of a farm call, such as the function that computes an item. A farm
/// is a group of worker processes that compute numbered work items.
pub(crate) struct FarmFunctions<'a> {
    pub(crate) work: WorkFunction<'a>,
    pub(crate) worker_start: Option<WorkerFunction<'a>>,
    pub(crate) worker_end: Option<WorkerFunction<'a>>,
    pub(crate) read: Option<ReadFunction<'a>>,
    pub(crate) write: Option<WriteFunction<'a>>,
    pub(crate) writer_end: Option<WriterEndFunction<'a>>,
    pub(crate) fork: Option<ForkFunction<'a>>,
}
