//! How a program describes and starts a farm.

use nix::errno::Errno;

use super::cpus::WorkerCpus;
use super::error::FarmError;
use super::functions::{
    FarmFunctions, ForkFunction, WorkFunction, WorkerFunction, WriteFunction, WriterEndFunction,
};
use super::master::RunningFarm;
use super::process::check_master;
use super::result::{ItemResult, WorkItem};
use super::settings::FarmSettings;

/// A farm that is not started yet, with its options. A farm is a group of worker processes that compute numbered work
/// items. [`Farm::start`] or [`Farm::start_with_reader`] forks the workers from the calling process. A worker shares
/// the memory that the calling process had at the fork, as long as neither of them writes to this memory.
///
/// # Example
/// ```
/// use pjw_spawn::farm::{Farm, Outcome};
///
/// // The workers share this vector: it exists once in memory, because no process writes to it.
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
    settings: FarmSettings,
    worker_start: Option<WorkerFunction<'a>>,
    worker_end: Option<WorkerFunction<'a>>,
    write: Option<WriteFunction<'a>>,
    writer_end: Option<WriterEndFunction<'a>>,
    fork: Option<ForkFunction<'a>>,
}

impl std::fmt::Debug for Farm<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Farm").field("settings", &self.settings).finish_non_exhaustive()
    }
}

impl<'a> Farm<'a> {
    /// Makes a farm with `workers` worker processes, 1 to 16,384, and starts no process yet. All other options have
    /// their defaults. With any other number of workers, the start of the farm fails.
    #[must_use]
    pub fn new(workers: u32) -> Self {
        let settings = FarmSettings::new(workers);
        Self { settings, worker_start: None, worker_end: None, write: None, writer_end: None, fork: None }
    }

    /// Sets the number of items that a worker takes at once. The number must be 1 to 4,096. With any other number, the
    /// start of the farm fails. The default is 1. When few items are left, a worker takes fewer, so that all workers
    /// finish at about the same time. A larger number helps if neighbouring items use the same data, or if an item
    /// takes less than about 10 µs.
    #[must_use]
    pub fn chunk(mut self, items: u64) -> Self {
        self.settings.chunk = items;
        self
    }

    /// Sets how many workers may die while they compute the same item. After that many deaths, the item is given up,
    /// and its result is [`super::Outcome::Killed`]. The number must be 1 to 1,000. With any other number, the start of
    /// the farm fails. The default is 3.
    ///
    /// The number also applies to the reader process, which reads the items, and to the writer process, which writes
    /// the results. If one of these two dies that often at the same item, the farm ends with
    /// [`FarmError::IoProcessDies`].
    #[must_use]
    pub fn attempts(mut self, attempts: u32) -> Self {
        self.settings.attempts = attempts;
        self
    }

    /// Makes the farm return the results in the order of the item numbers. By default, the farm returns results in the
    /// order in which they are ready. A result that is ready too early is kept in the memory of the calling process
    /// until all earlier results were returned.
    #[must_use]
    pub fn in_order(mut self) -> Self {
        self.settings.is_in_order = true;
        self
    }

    /// Sets how many items the workers may take while one item takes long. Workers take only the next `items` items,
    /// counted from the first item whose result was not delivered yet. The number must be 1 to 16,777,216, and is
    /// rounded up to a power of two. With any other number, the start of the farm fails.
    ///
    /// The default is 4,096 if results are returned in order, or if the farm has a reader (a process that reads the
    /// input for the workers). Otherwise the default is 1,048,576. In a large farm, the default can be higher: it is at
    /// least four times the number of workers, multiplied by the number of items that a worker takes at once
    /// ([`Farm::chunk`]).
    #[must_use]
    pub fn window(mut self, items: u64) -> Self {
        self.settings.window = Some(items);
        self
    }

    /// Sets the size in bytes of each ring buffer in shared memory through which results are passed. Each worker has
    /// one ring buffer for its results. A farm with a writer process ([`Farm::writer`]) has a further one, which
    /// contains the results for the writer. The default is 256 KiB. A result that is larger than the buffer is sent in
    /// pieces. The size must be 4,096 to 2³⁰, and is rounded up to a power of two. With any other size, the start of
    /// the farm fails.
    #[must_use]
    pub fn ring_bytes(mut self, bytes: u64) -> Self {
        self.settings.ring_bytes = bytes;
        self
    }

    /// Sets the size in bytes of the shared memory for the items that the reader (a process that reads the input for
    /// the workers) has read and that have no result yet. All workers share this memory. The default is 16 MiB. An item
    /// that is larger than this memory ends the farm with [`FarmError::ItemTooLarge`]. A farm without a reader does not
    /// use this memory. The size must be 4,096 to 2⁴⁰, and is rounded up to a multiple of 4,096. With any other size,
    /// the start of the farm fails, also for a farm without a reader.
    #[must_use]
    pub fn input_bytes(mut self, bytes: u64) -> Self {
        self.settings.input_bytes = bytes;
        self
    }

    /// Sets the CPUs on which the worker processes of the farm run. With the default [`WorkerCpus::Inherit`], each
    /// worker has the affinity mask of the calling process.
    #[must_use]
    pub fn cpus(mut self, cpus: WorkerCpus) -> Self {
        self.settings.cpus = cpus;
        self
    }

    /// Sets a function that each worker process calls before its first item. The argument is the index of the worker,
    /// from 0. The function can, for example, open files of the worker or change its working directory. If a worker
    /// dies, the worker that replaces it has the same index and also calls the function.
    #[must_use]
    pub fn on_worker_start(mut self, function: impl FnMut(u32) + 'a) -> Self {
        self.worker_start = Some(Box::new(function));
        self
    }

    /// Sets a function that each worker process calls after its last item. The argument is the index of the worker,
    /// from 0. After the call, the worker ends by `_exit`, so no handlers of atexit(3) and no destructors run.
    ///
    /// If the function panics, or ends the process with an exit status other than 0, the farm returns
    /// [`FarmError::EndFailed`] after the last result. The same holds if a signal kills the worker in the function.
    #[must_use]
    pub fn on_worker_end(mut self, function: impl FnMut(u32) + 'a) -> Self {
        self.worker_end = Some(Box::new(function));
        self
    }

    /// Adds a writer to the farm: a process that calls `function` for each result. After the call, the process that
    /// started the farm also gets the result, but without its bytes. If `function` returns an error, the farm ends
    /// with [`FarmError::IoProcessFailed`], which contains the returned code. The caller chooses the meanings of the
    /// codes.
    ///
    /// A writer that is killed is replaced. The new writer gets all results for which `function` has not returned. So
    /// `function` can be called again for a result that is already written in part, or completely. Such a second call
    /// must do no harm: `function` should, for example, write each result to a place that depends only on the item
    /// number.
    ///
    /// When `function` has returned, the result counts as written. Data that is then still in a buffer of the program
    /// is lost if the writer is killed. At its end the writer calls `_exit`, which also writes no buffers of the
    /// program. [`Farm::on_writer_end`] sets a function that can write them.
    #[must_use]
    pub fn writer(mut self, function: impl FnMut(&ItemResult) -> Result<(), i32> + 'a) -> Self {
        self.write = Some(Box::new(function));
        self
    }

    /// Sets a function that the writer process calls after the last result, for example to write the data in its
    /// buffers. After the call, the writer ends by `_exit`. If the function returns an error, the farm returns
    /// [`FarmError::IoProcessEndFailed`] after the last result. The exit status in this error is the returned code,
    /// or 1 if the code is not from 1 to 255. The function is not called if the writer dies, or if the farm has no
    /// writer.
    #[must_use]
    pub fn on_writer_end(mut self, function: impl FnMut() -> Result<(), i32> + 'a) -> Self {
        self.writer_end = Some(Box::new(function));
        self
    }

    /// Sets the function that the farm calls instead of fork(2) to fork the calling process. Like fork(2), it must
    /// return 0 in the new process, and the id of the new process in the calling process. Runtimes need this if they
    /// have to prepare a fork, such as Python's `os.fork`. If the function returns a negative number, or returns 0 in
    /// the calling process, the fork has failed with the error `EINVAL`.
    #[must_use]
    pub fn fork_with(mut self, function: impl FnMut() -> Result<libc::pid_t, Errno> + 'a) -> Self {
        self.fork = Some(Box::new(function));
        self
    }

    /// Allows the calling process to have more than one thread when the farm is started. Without this call, the start
    /// of the farm fails with [`FarmError::MultipleThreads`] if the process has several threads.
    ///
    /// The kernel kills each process of the farm when the thread that forked this process ends (`PR_SET_PDEATHSIG`).
    /// So the thread that calls [`Farm::start`] or waits for results must not end before the farm.
    ///
    /// # Safety
    /// A forked process has only the thread that called fork(2). If another thread held a lock at the fork, this lock
    /// stays locked in the forked process for ever. So none of the functions that the caller passes to the farm may
    /// wait for a lock that another thread can hold. The locks of malloc(3) are an exception with the GNU C library.
    #[must_use]
    pub unsafe fn allow_threads(mut self) -> Self {
        self.settings.allows_threads = true;
        self
    }

    /// Starts the farm for the items with the numbers 0 to `items - 1`: forks the workers from the calling process.
    /// The farm has at most as many workers as items. `work` runs in a worker. It computes one item, and appends the
    /// bytes of the result to an empty vector. If `work` returns an error, the result is [`super::Outcome::Failed`]
    /// with the returned code, whose meaning the caller chooses. If `work` panics, the worker ends with exit status
    /// 101 and is replaced.
    ///
    /// # Errors
    /// The start fails in these cases, and no process of the farm remains:
    ///
    /// - An option has an invalid value.
    /// - The process has more than one thread, and [`Farm::allow_threads`] was not called.
    /// - The process ignores `SIGCHLD`.
    /// - The shared memory or a process can't be made.
    pub fn start(
        self,
        items: u64,
        work: impl FnMut(WorkItem<'_>, &mut Vec<u8>) -> Result<(), i32> + 'a,
    ) -> Result<RunningFarm<'a>, FarmError> {
        self.start_processes(Some(items), None, Box::new(work))
    }

    /// Starts the farm for items that a reader process reads: forks the workers and the reader from the calling
    /// process. The reader calls `read` with the item numbers 0, 1, 2 and so on. `read` appends the bytes of the item
    /// to an empty vector and returns `Ok(true)`. `Ok(false)` means that there is no such item: the input has ended.
    /// If `read` returns an error, the farm ends with [`FarmError::IoProcessFailed`], which contains the returned
    /// code. `work` runs in a worker and computes one item, as in [`Farm::start`].
    ///
    /// A reader that is killed is replaced. The new reader begins with the first item that the workers did not get.
    /// Both readers are forks of the calling process and share the offset of each file that the calling process had
    /// opened. So `read` should find its position in a file from the item number.
    ///
    /// # Errors
    /// The errors of [`Farm::start`].
    pub fn start_with_reader(
        self,
        read: impl FnMut(u64, &mut Vec<u8>) -> Result<bool, i32> + 'a,
        work: impl FnMut(WorkItem<'_>, &mut Vec<u8>) -> Result<(), i32> + 'a,
    ) -> Result<RunningFarm<'a>, FarmError> {
        self.start_processes(None, Some(Box::new(read)), Box::new(work))
    }

    /// Checks the options, and starts the farm for `items` items. If `items` is `None`, a reader process reads the
    /// items by `read`. Fails if an option is invalid, or if the calling process can't be the master of a farm.
    fn start_processes(
        self,
        items: Option<u64>,
        read: Option<super::functions::ReadFunction<'a>>,
        work: WorkFunction<'a>,
    ) -> Result<RunningFarm<'a>, FarmError> {
        let Self { settings, worker_start, worker_end, write, writer_end, fork } = self;
        settings.check(items)?;
        let masks = settings.cpus.masks()?;
        check_master(settings.allows_threads)?;
        let functions = FarmFunctions { work, worker_start, worker_end, read, write, writer_end, fork };
        RunningFarm::start(settings, masks, functions, items)
    }
}
