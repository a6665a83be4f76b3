//! How a program describes and starts a farm.

use nix::errno::Errno;

use super::cpus::WorkerCpus;
use super::error::FarmError;
use super::functions::{AtWorker, Fork, Functions, Work, Write, WriterEnd};
use super::master::RunningFarm;
use super::process::check_master;
use super::result::{Item, ItemResult};
use super::settings::Settings;

/// The options of a farm. [`Farm::start`] or [`Farm::start_with_reader`] forks its workers.
///
/// # Example
/// ```
/// use pjw_spawn::farm::{Farm, Outcome};
///
/// // What the workers share: it is there once, as long as no process writes to it.
/// let squares: Vec<u64> = (0..1000).map(|number| number * number).collect();
/// let farm = Farm::new(2).in_order();
/// # // SAFETY: the function only computes.
/// # let farm = unsafe { farm.allow_threads() };
/// let farm = farm.start(1000, |item, result| {
///     let square = squares[item.number as usize];
///     result.extend_from_slice(&square.to_ne_bytes());
///     Ok(())
/// })?;
/// for (number, result) in (0..).zip(farm) {
///     let result = result?;
///     assert_eq!(result.number, number);
///     assert_eq!(result.outcome, Outcome::Done((number * number).to_ne_bytes().to_vec()));
/// }
/// # Ok::<(), pjw_spawn::farm::FarmError>(())
/// ```
pub struct Farm<'a> {
    settings: Settings,
    worker_start: Option<AtWorker<'a>>,
    worker_end: Option<AtWorker<'a>>,
    write: Option<Write<'a>>,
    writer_end: Option<WriterEnd<'a>>,
    fork: Option<Fork<'a>>,
}

impl std::fmt::Debug for Farm<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Farm").field("settings", &self.settings).finish_non_exhaustive()
    }
}

impl<'a> Farm<'a> {
    /// Returns the options of a farm with `workers` workers, 1 to 16,384. Results come in the order in which they are ready.
    #[must_use]
    pub fn new(workers: u32) -> Self {
        let settings = Settings::new(workers);
        Self { settings, worker_start: None, worker_end: None, write: None, writer_end: None, fork: None }
    }

    /// Sets how many items a worker takes from the queue at once, 1 to 4,096. The default is 1. Near the end of the items a
    /// worker takes fewer. A greater number helps if neighbouring items use the same data, or take less than about 10 µs.
    #[must_use]
    pub fn chunk(mut self, items: u64) -> Self {
        self.settings.chunk = items;
        self
    }

    /// Sets after how many deaths of a worker at the same item this item is given up, 1 to 1,000. The default is 3. The
    /// result of such an item is [`super::Outcome::Killed`]. The number also limits the deaths of the reader and of the
    /// writer at one item, after which the farm ends with an error.
    #[must_use]
    pub fn attempts(mut self, attempts: u32) -> Self {
        self.settings.attempts = attempts;
        self
    }

    /// Makes the results come in the order of the numbers of the items. Results of later items are kept in the memory of the
    /// master until then.
    #[must_use]
    pub fn in_order(mut self) -> Self {
        self.settings.is_in_order = true;
        self
    }

    /// Sets how far the items that are handed out may be ahead of the first one whose result was not delivered. The number
    /// is rounded up to a power of two. The default is 4,096 in order or with a reader, otherwise 1,048,576.
    #[must_use]
    pub fn window(mut self, items: u64) -> Self {
        self.settings.window = Some(items);
        self
    }

    /// Sets the bytes of shared memory for the results of each worker, and for those on the way to the writer. The number is
    /// rounded up to a power of two. The default is 256 KiB. A longer result passes in pieces.
    #[must_use]
    pub fn ring_bytes(mut self, bytes: u64) -> Self {
        self.settings.ring_bytes = bytes;
        self
    }

    /// Sets the bytes of shared memory for the items that the reader has read, of all workers together. No item may be
    /// longer. The default is 16 MiB.
    #[must_use]
    pub fn input_bytes(mut self, bytes: u64) -> Self {
        self.settings.input_bytes = bytes;
        self
    }

    /// Sets on which CPUs the workers run. The default is [`WorkerCpus::Inherit`].
    #[must_use]
    pub fn cpus(mut self, cpus: WorkerCpus) -> Self {
        self.settings.cpus = cpus;
        self
    }

    /// Sets a function that each worker calls before its first item, with its index. There a program opens files of its own
    /// or changes the directory. A worker that replaces another one calls it too.
    #[must_use]
    pub fn on_worker_start(mut self, function: impl FnMut(u32) + 'a) -> Self {
        self.worker_start = Some(Box::new(function));
        self
    }

    /// Sets a function that each worker calls after its last item, with its index. After it the worker ends by `_exit`: it
    /// runs neither handlers of atexit(3) nor destructors. A worker that fails here makes the farm return
    /// [`FarmError::EndFailed`] after the last result.
    #[must_use]
    pub fn on_worker_end(mut self, function: impl FnMut(u32) + 'a) -> Self {
        self.worker_end = Some(Box::new(function));
        self
    }

    /// Adds a writer: a process that calls `function` for each result. The master then gets each result without its
    /// bytes, after the writer has written it.
    ///
    /// The function may return an error, a code of the program: the farm ends then. If the writer is killed, a new one
    /// continues with the first result that was not written. A result that was being written then is written again, so the
    /// function should write it to a place that follows from its number, or be able to see that it is there.
    ///
    /// A result counts as written when the function returns. What the function holds back in a buffer then is lost if the
    /// writer dies, or at its end: the writer ends by `_exit`. So write each result in its call, or write the rest in
    /// [`Farm::on_writer_end`].
    #[must_use]
    pub fn writer(mut self, function: impl FnMut(&ItemResult) -> Result<(), i32> + 'a) -> Self {
        self.write = Some(Box::new(function));
        self
    }

    /// Sets a function that the writer calls after the last result, before it ends by `_exit`. There a program writes what
    /// it holds back in buffers. If the function returns an error, a code of the program, the farm returns
    /// [`FarmError::IoProcessEndFailed`] after the last result, with the code as exit status, or 1 if the code is not from
    /// 1 to 255. The function is not called if the writer dies, or in a farm without a writer.
    #[must_use]
    pub fn on_writer_end(mut self, function: impl FnMut() -> Result<(), i32> + 'a) -> Self {
        self.writer_end = Some(Box::new(function));
        self
    }

    /// Sets a function that forks the process: it returns 0 in the new process and the process id in the calling one. This
    /// is for runtimes that have to prepare a fork, such as Python's `os.fork`. A negative number, or 0 in the calling
    /// process, is the error `EINVAL`. The default is fork(2) of the C library.
    #[must_use]
    pub fn fork_with(mut self, function: impl FnMut() -> Result<libc::pid_t, Errno> + 'a) -> Self {
        self.fork = Some(Box::new(function));
        self
    }

    /// Allows the master to have more than one thread. The workers are killed when the thread that calls
    /// [`Farm::start`] and the other functions of the farm ends.
    ///
    /// # Safety
    /// A forked process has only the thread that forks, and locks that other threads held stay locked for ever. The
    /// functions of the farm must not wait for such a lock. malloc(3) of the GNU C library can be used.
    #[must_use]
    pub unsafe fn allow_threads(mut self) -> Self {
        self.settings.allows_threads = true;
        self
    }

    /// Forks the workers now, for the items 0 to `items - 1`. `work` computes one item and writes the bytes of its result.
    /// It may return an error, a code of the program: the result is then [`super::Outcome::Failed`]. A panic ends the worker
    /// with the exit status 101.
    ///
    /// There are not more workers than items.
    ///
    /// # Errors
    /// If an option has a value that is not allowed, if the process has several threads or ignores `SIGCHLD`, or if the
    /// shared memory or a process can't be made. No process is left then.
    pub fn start(
        self,
        items: u64,
        work: impl FnMut(Item<'_>, &mut Vec<u8>) -> Result<(), i32> + 'a,
    ) -> Result<RunningFarm<'a>, FarmError> {
        self.start_processes(Some(items), None, Box::new(work))
    }

    /// Forks the workers and a reader now. The reader calls `read` with the numbers 0, 1, 2 and so on, until `read`
    /// returns `Ok(false)`. Each call writes the bytes of one item. `work` computes an item, as in [`Farm::start`].
    ///
    /// `read` may return an error, a code of the program: the farm ends then. If the reader is killed, a new one continues
    /// with the first item that was not passed on. It is a fork of the master, so it shares the offsets of files that the
    /// master has opened: `read` should use the number to find its place.
    ///
    /// # Errors
    /// Those of [`Farm::start`].
    pub fn start_with_reader(
        self,
        read: impl FnMut(u64, &mut Vec<u8>) -> Result<bool, i32> + 'a,
        work: impl FnMut(Item<'_>, &mut Vec<u8>) -> Result<(), i32> + 'a,
    ) -> Result<RunningFarm<'a>, FarmError> {
        self.start_processes(None, Some(Box::new(read)), Box::new(work))
    }

    fn start_processes(
        self,
        items: Option<u64>,
        read: Option<super::functions::Read<'a>>,
        work: Work<'a>,
    ) -> Result<RunningFarm<'a>, FarmError> {
        let Self { settings, worker_start, worker_end, write, writer_end, fork } = self;
        settings.check(items)?;
        let masks = settings.cpus.masks()?;
        check_master(settings.allows_threads)?;
        let functions = Functions { work, worker_start, worker_end, read, write, writer_end, fork };
        RunningFarm::start(settings, masks, functions, items)
    }
}
