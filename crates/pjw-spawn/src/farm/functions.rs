//! The functions of the program that the processes of a farm call.

use nix::errno::Errno;

use super::result::{Item, ItemResult};

/// Computes an item, and writes the bytes of its result. An error is a code of the program.
pub(crate) type Work<'a> = Box<dyn FnMut(Item<'_>, &mut Vec<u8>) -> Result<(), i32> + 'a>;
/// Reads the item with a number. Returns `false` if there is none.
pub(crate) type Read<'a> = Box<dyn FnMut(u64, &mut Vec<u8>) -> Result<bool, i32> + 'a>;
/// Writes a result.
pub(crate) type Write<'a> = Box<dyn FnMut(&ItemResult) -> Result<(), i32> + 'a>;
/// Writes what the writer holds back, after the last result.
pub(crate) type WriterEnd<'a> = Box<dyn FnMut() -> Result<(), i32> + 'a>;
/// Is called with the index of a worker.
pub(crate) type AtWorker<'a> = Box<dyn FnMut(u32) + 'a>;
/// Forks the process: returns 0 in the new process, and its id in the calling one.
pub(crate) type Fork<'a> = Box<dyn FnMut() -> Result<libc::pid_t, Errno> + 'a>;

/// The functions of a farm.
pub(crate) struct Functions<'a> {
    pub(crate) work: Work<'a>,
    pub(crate) worker_start: Option<AtWorker<'a>>,
    pub(crate) worker_end: Option<AtWorker<'a>>,
    pub(crate) read: Option<Read<'a>>,
    pub(crate) write: Option<Write<'a>>,
    pub(crate) writer_end: Option<WriterEnd<'a>>,
    pub(crate) fork: Option<Fork<'a>>,
}
