//! The thread that reads the memory of jobs. It begins with the first request.
//!
//! A reading of many gigabytes takes seconds of CPU time. So it delays neither a cycle nor the answer to another call.
//! The thread has a low priority, and reads one job at a time. It runs on the PUs that the job holds and does not use,
//! if there are any: on the PU of the control server it would delay the answers by some tens of microseconds.
//!
//! To read the pages of a process, the kernel locks its memory (`mmap_lock`, fs/proc/task_mmu.c, Linux 6.18). A process
//! that maps a file of a file system that does not respond (NFS, FUSE) holds this lock, without end. A thread that
//! waits for such a lock is left to itself, and the next reading starts another thread.

use std::cell::RefCell;
use std::path::Path;
use std::rc::Rc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use pjw_core::cpuset::CpuSet;
use pjw_core::ids::{Pid, Tid};
use pjw_linux::proc::procfs::ProcDir;
use pjw_linux::sys::affinity;
use pjw_linux::sys::nice::set_own_nice_value_and_slice;
use tokio::sync::oneshot;
use tokio::time::timeout;

use super::reading::{
    JobMemoryReading, JobProcess, ProcessesToRead, ReadingError, ReadingKind, ReadingProgress,
    measure_job_memory,
};
use super::turns::MemoryReaderQueue;

/// The nice value of the thread.
const NICE: i32 = 10;
/// The slice of the thread. A reading stays in the kernel for long. The thread of the control server, which answers
/// `status`, may wake up on the same PU meanwhile, and waits until the slice has ended.
const SLICE: Duration = Duration::from_micros(100);
/// The thread is checked at this interval while a caller waits for it.
const CHECK_INTERVAL: Duration = Duration::from_secs(5);
/// The number of consecutive checks that found the thread blocked after which the thread is left to itself.
const MAX_BLOCKED_CHECKS: u32 = 2;
/// The largest number of threads that are left to themselves. If this number is reached, no memory is read. Of these, a
/// user's processes may block as many as are left for others: at most half.
const MAX_BLOCKED_THREADS: usize = 8;

/// [`measure_job_memory`], or what stands for it in tests.
type Measure =
    fn(&[JobProcess], ReadingKind, bool, &dyn ReadingProgress) -> Result<JobMemoryReading, ReadingError>;

/// A request to read the memory of the processes of a job.
#[derive(Debug)]
struct ReadRequest {
    job: ProcessesToRead,
    kind: ReadingKind,
    watches_threads: bool,
    /// The processes whose lock an earlier reading waits for.
    blocked: Vec<Pid>,
    wanted: Weak<()>,
    reply: oneshot::Sender<Result<JobMemoryReading, ReadingError>>,
}

/// The thread of a [`MemoryReader`]: its id, and the process that it reads at present.
#[derive(Debug, Default)]
struct ReaderThread {
    /// `None` until the thread runs.
    tid: Mutex<Option<Tid>>,
    /// The process that is read. `None` between two readings.
    pid: Mutex<Option<Pid>>,
}

impl ReaderThread {
    fn pid(&self) -> Option<Pid> {
        *self.pid.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set_pid(&self, pid: Option<Pid>) {
        *self.pid.lock().unwrap_or_else(PoisonError::into_inner) = pid;
    }

    /// The process that is read and the CPU time of the thread in clock ticks. `None` if the thread reads no process,
    /// or is not in the state `D`: blocked in the kernel (proc(5)).
    fn blocked_at(&self) -> Option<(Pid, u64)> {
        let tid = (*self.tid.lock().unwrap_or_else(PoisonError::into_inner))?;
        let mut proc = ProcDir::open(Path::new("/proc")).ok()?;
        let stat = proc.thread_stat(Pid(std::process::id()), tid).ok()?;
        self.pid().filter(|_| stat.state == 'D').map(|pid| (pid, stat.run_ticks))
    }
}

/// The reading thread that serves requests now, and the threads that wait for a lock.
#[derive(Debug, Default)]
struct ReadingThreads {
    present: Option<(Sender<ReadRequest>, Arc<ReaderThread>)>,
    /// Each with the owner of the job whose memory it reads.
    blocked: Vec<(u32, Weak<ReaderThread>)>,
}

impl ReadingThreads {
    /// The processes whose lock a thread waits for.
    fn blocked_pids(&mut self) -> Vec<Pid> {
        self.blocked.retain(|(_, thread)| thread.strong_count() > 0);
        self.blocked.iter().filter_map(|(_, thread)| thread.upgrade()?.pid()).collect()
    }

    /// Whether one more thread may wait for the lock of a process of the user `owner`.
    fn has_room_for(&self, owner: u32) -> bool {
        let blocked_by_owner = self.blocked.iter().filter(|(user, _)| *user == owner).count();
        blocked_by_owner < MAX_BLOCKED_THREADS.saturating_sub(self.blocked.len())
    }

    /// Leaves `thread` to itself. The thread ends when it has got the lock of a process of the user `owner`.
    fn abandon(&mut self, thread: &Arc<ReaderThread>, owner: u32) {
        self.present.take_if(|(_, present)| Arc::ptr_eq(present, thread));
        self.blocked.push((owner, Arc::downgrade(thread)));
    }
}

/// Measures the memory use of jobs in a background thread, one job at a time. The first request starts the thread.
/// After this value is dropped, the thread handles the requests that were already sent, and then ends.
#[derive(Debug)]
pub struct MemoryReader {
    threads: Rc<RefCell<ReadingThreads>>,
    measure: Measure,
    check_interval: Duration,
    blocked_at: fn(&ReaderThread) -> Option<(Pid, u64)>,
    /// The queue of the callers that wait for this reader. A caller must have a turn from this queue before it calls
    /// [`MemoryReader::request_reading`].
    pub turns: MemoryReaderQueue,
}

/// The background threads that measure the memory use of jobs. There is one thread for walks over all pages, one for
/// samples of pages, and one for all other measurements. So the short measurements do not wait for a
/// walk over pages, which can take minutes.
#[derive(Debug, Default)]
pub struct MemoryReaders {
    pages: MemoryReader,
    estimates: MemoryReader,
    samples: MemoryReader,
}

impl MemoryReaders {
    /// Returns the background thread that measures the memory use of jobs by the method `kind`.
    #[must_use]
    pub fn reader_of(&self, kind: ReadingKind) -> &MemoryReader {
        match kind {
            ReadingKind::Estimate | ReadingKind::Counters => &self.estimates,
            ReadingKind::Pages | ReadingKind::PagesByNode => &self.pages,
            ReadingKind::NodeSample => &self.samples,
        }
    }
}

impl Default for MemoryReader {
    fn default() -> Self {
        Self {
            threads: Rc::default(),
            measure: measure_job_memory,
            check_interval: CHECK_INTERVAL,
            blocked_at: ReaderThread::blocked_at,
            turns: MemoryReaderQueue::default(),
        }
    }
}

impl MemoryReader {
    /// Requests a measurement of the memory use of a job from the background thread. The returned future waits for the
    /// result.
    ///
    /// - `owner` is the user id of the job's owner.
    /// - `job` has the processes of the job and its idle PUs (logical CPUs). During the measurement, the background
    ///   thread runs on these PUs. If the job has no idle PUs, the thread runs where the control server runs.
    /// - `kind` is the method of the measurement.
    /// - If `watches_threads` is true, the measurement also finds threads of the job that wait for one another to map
    ///   or unmap memory ([`measure_job_memory`]).
    ///
    /// The caller must keep the `Arc` behind `wanted` for as long as the result is wanted. When the last clone of this
    /// `Arc` has been dropped, the background thread skips the request. If the thread is already reading the pages of
    /// processes, the thread stops before the next process. The result is then [`ReadingError::Abandoned`].
    ///
    /// # Errors
    /// The future returns one of these errors:
    ///
    /// - [`ReadingError::NoThread`] if the background thread can't be started or has ended.
    /// - [`ReadingError::Blocked`] if the thread waited for at least 5 s for the memory lock of a process
    ///   (`mmap_lock`). Later measurements run on a new thread. They leave out this process until the lock is released.
    /// - [`ReadingError::TooManyBlocked`] if too many former background threads still wait for such locks. The threads
    ///   that wait for processes of `owner` count twice, and all others once. The limit is reached at 8. So processes
    ///   of one user can't use up the whole limit, and measurements of other users' jobs remain possible.
    /// - The errors of [`measure_job_memory`].
    pub fn request_reading(
        &self,
        owner: u32,
        job: ProcessesToRead,
        kind: ReadingKind,
        watches_threads: bool,
        wanted: Weak<()>,
    ) -> impl Future<Output = Result<JobMemoryReading, ReadingError>> + use<> {
        let (reply, mut reading) = oneshot::channel();
        let blocked = self.threads.borrow_mut().blocked_pids();
        let has_room = self.threads.borrow().has_room_for(owner);
        let sent = if has_room {
            self.send(ReadRequest { job, kind, watches_threads, blocked, wanted, reply })
        } else {
            Err(ReadingError::TooManyBlocked { pids: blocked })
        };
        let (threads, check_interval, blocked_at) =
            (Rc::clone(&self.threads), self.check_interval, self.blocked_at);
        async move {
            let thread = sent?;
            let (mut last_blocked, mut checks) = (None, 0);
            loop {
                if let Ok(reading) = timeout(check_interval, &mut reading).await {
                    return reading.map_err(|_| ReadingError::NoThread("it has ended".to_owned()))?;
                }
                let blocked_now = blocked_at(&thread);
                checks = if blocked_now.is_some() && blocked_now == last_blocked { checks + 1 } else { 1 };
                last_blocked = blocked_now;
                if let Some((pid, _)) = blocked_now
                    && checks >= MAX_BLOCKED_CHECKS
                {
                    threads.borrow_mut().abandon(&thread, owner);
                    return Err(ReadingError::Blocked { pid });
                }
            }
        }
    }

    /// Sends `request` to the memory reader thread, and returns the thread. Starts the thread first if it does not run.
    fn send(&self, request: ReadRequest) -> Result<Arc<ReaderThread>, ReadingError> {
        let present = &mut self.threads.borrow_mut().present;
        let (sender, thread) = match present.take() {
            Some(present) => present,
            None => start_thread(self.measure)?,
        };
        sender.send(request).map_err(|_| ReadingError::NoThread("it has ended".to_owned()))?;
        // A thread that has ended is started again for the next request.
        *present = Some((sender, Arc::clone(&thread)));
        Ok(thread)
    }
}

/// Starts the memory reader thread. Returns the sender for its requests, and the thread.
fn start_thread(measure: Measure) -> Result<(Sender<ReadRequest>, Arc<ReaderThread>), ReadingError> {
    let (sender, requests) = mpsc::channel();
    let thread = Arc::new(ReaderThread::default());
    let served = Arc::clone(&thread);
    let run = move || serve_requests(&requests, &served, measure);
    let spawned = std::thread::Builder::new().name("memory-reader".to_owned()).spawn(run);
    spawned.map_err(|error| ReadingError::NoThread(error.to_string()))?;
    Ok((sender, thread))
}

/// Runs in the memory reader thread until the sender of `requests` is dropped. Measures the memory for each request
/// by the function `measure`, one request after the other, and replies with the reading. If nobody waits for the
/// reading any more, replies with an error instead. First gives this thread a low CPU priority, and stores its id in
/// `thread`.
fn serve_requests(requests: &Receiver<ReadRequest>, thread: &ReaderThread, measure: Measure) {
    // Without the low priority, the readings are right too, and other programs have a little less CPU time.
    let _ = set_own_nice_value_and_slice(NICE, SLICE);
    let tid = affinity::own_thread();
    *thread.tid.lock().unwrap_or_else(PoisonError::into_inner) = Some(tid);
    while let Ok(ReadRequest { job, kind, watches_threads, blocked, wanted, reply }) = requests.recv() {
        let progress = RequestProgress { wanted, blocked, thread };
        let reading = if progress.is_wanted() {
            move_to_idle_cpus(tid, &job.idle_cpus);
            measure(&job.processes, kind, watches_threads, &progress)
        } else {
            Err(ReadingError::Abandoned)
        };
        thread.set_pid(None);
        let _ = reply.send(reading);
    }
}

/// Binds the thread `tid` to `idle_cpus`. If this set is empty or the kernel refuses it, binds the thread to the PUs of
/// the control server, which is the first thread of this process. If that fails too, the thread stays where it is: the
/// reading is right in any case.
fn move_to_idle_cpus(tid: Tid, idle_cpus: &CpuSet) {
    let is_bound = !idle_cpus.is_empty() && affinity::set_mask(tid, idle_cpus).is_ok();
    if !is_bound && let Ok(cpus) = affinity::get_mask(Tid(std::process::id())) {
        let _ = affinity::set_mask(tid, &cpus);
    }
}

/// The progress of the reading for one request.
struct RequestProgress<'a> {
    wanted: Weak<()>,
    blocked: Vec<Pid>,
    thread: &'a ReaderThread,
}

impl ReadingProgress for RequestProgress<'_> {
    fn is_wanted(&self) -> bool {
        self.wanted.strong_count() > 0
    }

    fn is_mmap_lock_awaited(&self, pid: Pid) -> bool {
        self.blocked.contains(&pid)
    }

    fn begin_process(&self, pid: Pid) {
        self.thread.set_pid(Some(pid));
    }
}

#[cfg(test)]
mod tests {
    use pjw_core::ids::ProcessId;

    use super::super::reading::DeniedProcess;
    use super::super::reading::tests::Sleeper;
    use super::*;

    /// The lock of the memory of process 1, in these tests.
    static LOCK: Mutex<()> = Mutex::new(());
    const LOCKED: Pid = Pid(1);

    fn read_when_unlocked(
        processes: &[JobProcess],
        kind: ReadingKind,
        watches_threads: bool,
        progress: &dyn ReadingProgress,
    ) -> Result<JobMemoryReading, ReadingError> {
        if processes.iter().any(|process| process.id.pid == LOCKED) && !progress.is_mmap_lock_awaited(LOCKED)
        {
            progress.begin_process(LOCKED);
            drop(LOCK.lock());
        }
        measure_job_memory(processes, kind, watches_threads, progress)
    }

    #[test]
    fn the_blocked_readings_of_one_user_leave_room_for_those_of_others() {
        let mut threads = ReadingThreads::default();
        let blocked: [Arc<ReaderThread>; MAX_BLOCKED_THREADS] = Default::default();
        let owners = blocked.each_ref().map(|thread| {
            let owner = (1..=4).find(|user| threads.has_room_for(*user)).unwrap();
            threads.abandon(thread, owner);
            owner
        });
        assert_eq!(owners, [1, 1, 1, 1, 2, 2, 3, 4]);
        assert!(!threads.has_room_for(5), "of all together there are as many as may be");
        drop(blocked);
        assert!(threads.blocked_pids().is_empty() && threads.has_room_for(1));
    }

    #[test]
    fn estimates_of_a_user_go_on_while_as_many_samples_as_may_be_are_blocked() {
        let readers = MemoryReaders::default();
        let blocked: [Arc<ReaderThread>; MAX_BLOCKED_THREADS] = Default::default();
        let room = |kind| readers.reader_of(kind).threads.borrow().has_room_for(7);
        for thread in &blocked {
            readers.reader_of(ReadingKind::NodeSample).threads.borrow_mut().abandon(thread, 7);
        }
        assert!(!room(ReadingKind::NodeSample));
        assert!(room(ReadingKind::Counters) && room(ReadingKind::Estimate) && room(ReadingKind::Pages));
    }

    #[test]
    fn a_blocked_reading_is_given_up_and_later_ones_leave_its_process_out() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let reader = MemoryReader {
            measure: read_when_unlocked,
            // A thread that only waits for a CPU while it reads the process is not blocked.
            blocked_at: |thread| {
                let is_blocked = |pid: &Pid| *pid == LOCKED && LOCK.try_lock().is_err();
                thread.pid().filter(is_blocked).map(|pid| (pid, 0))
            },
            check_interval: Duration::from_millis(1),
            ..MemoryReader::default()
        };
        let mut proc = ProcDir::open(Path::new("/proc")).unwrap();
        let locked = JobProcess::from(ProcessId { pid: LOCKED, start: proc.stat(LOCKED).unwrap().start });
        // Not this process: it is left out while a thread that does another test waits in the state `D`.
        let sleeper = Sleeper::start();
        let readable = JobProcess::from(sleeper.id());
        let caller = Arc::new(());
        let read = |processes: &[JobProcess]| {
            let wanted = Arc::downgrade(&caller);
            let job = ProcessesToRead { processes: processes.to_vec(), ..ProcessesToRead::default() };
            let reading = reader.request_reading(0, job, ReadingKind::Pages, false, wanted);
            runtime.block_on(reading)
        };
        let held = LOCK.lock().unwrap();
        assert_eq!(read(&[locked]).err(), Some(ReadingError::Blocked { pid: LOCKED }));
        let reading = read(&[locked, readable]).unwrap();
        assert_eq!(reading.processes.iter().map(|read| read.pid).collect::<Vec<_>>(), [readable.id.pid]);
        assert!(reading.denied[0].pid == LOCKED && reading.denied[0].reason.contains("locked"));
        drop(held);
        while !reader.threads.borrow_mut().blocked_pids().is_empty() {
            std::thread::yield_now();
        }
        let reading = read(&[locked, readable]).unwrap();
        let is_locked = |denied: &DeniedProcess| denied.reason.contains("locked");
        assert!(!reading.denied.iter().any(is_locked), "it is read again: {:?}", reading.denied);
    }

    /// The mask of the thread at its last reading, in the test below.
    static MASK_WHILE_READING: Mutex<Option<CpuSet>> = Mutex::new(None);

    fn store_mask(
        _: &[JobProcess],
        _: ReadingKind,
        _: bool,
        _: &dyn ReadingProgress,
    ) -> Result<JobMemoryReading, ReadingError> {
        *MASK_WHILE_READING.lock().unwrap() = affinity::get_mask(affinity::own_thread()).ok();
        Err(ReadingError::Abandoned)
    }

    #[test]
    fn the_thread_runs_on_the_idle_pus_of_the_job_and_without_them_where_the_control_server_runs() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let reader = MemoryReader { measure: store_mask, ..MemoryReader::default() };
        let caller = Arc::new(());
        let mask_for = |idle_cpus: &CpuSet| {
            let job = ProcessesToRead { idle_cpus: idle_cpus.clone(), ..ProcessesToRead::default() };
            let wanted = Arc::downgrade(&caller);
            let read = reader.request_reading(0, job, ReadingKind::Pages, false, wanted);
            assert_eq!(runtime.block_on(read).err(), Some(ReadingError::Abandoned));
            MASK_WHILE_READING.lock().unwrap().take().unwrap()
        };
        let of_first_thread = affinity::get_mask(Tid(std::process::id())).unwrap();
        let one = CpuSet::from(of_first_thread.first().unwrap());
        assert_eq!(mask_for(&one), one);
        assert_eq!(mask_for(&CpuSet::new()), of_first_thread);
        let absent: CpuSet = "8191".parse().unwrap();
        assert_eq!(mask_for(&absent), of_first_thread, "the thread can't be bound to this PU");
    }
}
