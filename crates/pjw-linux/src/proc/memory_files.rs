//! Reads the files of `/proc` that are in the memory of a process, `environ` and `cmdline`, without waiting for its
//! lock.
//!
//! To read the memory of a process, the kernel locks it (`mmap_lock`, fs/proc/base.c, Linux 6.18). A process that forks
//! or ends holds this lock. On a busy machine it may be preempted meanwhile, and the reader waits until the process
//! runs again: up to seconds beside hundreds of processes, with any priority. A process that maps a file holds the lock
//! too. If the server of the file system (NFS, FUSE) does not reply, the reader waits for ever. So another thread reads
//! the files, and the caller waits for a bounded time.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
use std::thread;
use std::time::Duration;

use nix::errno::Errno;
use pjw_core::ids::{Pid, Uid};

use super::procfs::ProcDir;
use crate::sys::errno::is_gone;
use crate::sys::realtime;

/// How long a caller waits for the files of one process, if the thread that reads them has a real-time priority.
const TIMEOUT: Duration = Duration::from_millis(10);
/// How long a caller waits if this thread has no real-time priority. On a busy machine, the thread waits for a CPU
/// first.
const TIMEOUT_WITHOUT_PRIORITY: Duration = Duration::from_millis(100);
/// The largest number of threads that wait for locks of processes of one user. If this number is reached, no further
/// process of this user is tried.
const MAX_WAITING_OF_USER: usize = 4;
/// The largest number of threads that wait for locks of processes of all users together. pjwd has two values of
/// [`MemoryFiles`], and its unit allows 128 threads (`TasksMax`).
const MAX_WAITING: usize = 24;

/// The environment variables and the command line of one process, from the files `/proc/PID/environ` and
/// `/proc/PID/cmdline`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct EnvironAndCommandLine {
    /// The variables of the environment whose names are wanted. Empty if this user may not read them.
    pub(crate) environ: BTreeMap<String, String>,
    /// The command line, as [`ProcDir::command_line`] returns it.
    pub(crate) command_line: String,
}

/// What was read from the files of one process, or the error of the read.
pub(crate) type Contents = Result<EnvironAndCommandLine, Errno>;
/// A function that reads the files of one process, and of its environment only the variables with the given names.
type ReadFiles = fn(&mut ProcDir, Pid, &BTreeSet<&'static str>) -> Contents;

/// Reads the files `/proc/PID/environ` and `/proc/PID/cmdline` of processes. The content of these files lies in the
/// memory of the process, and reading them blocks while the lock of this memory (`mmap_lock`) is held. The state of the
/// process does not show that: another process that shares the memory (`CLONE_VM`) may hold the lock. So a separate
/// thread reads the files of every process. If a read blocks, this thread is not used again: it waits for the lock and
/// then ends. The next read starts another thread.
#[derive(Debug)]
pub(crate) struct MemoryFiles {
    proc_path: PathBuf,
    wanted: BTreeSet<&'static str>,
    read: ReadFiles,
    reader: Option<Reader>,
    waiting: Vec<WaitingReader>,
}

/// The contents of the files of one process, or the thread that reads them.
#[derive(Debug)]
pub(crate) enum BegunRead {
    /// The contents are known, and nothing is read.
    Known(EnvironAndCommandLine),
    /// A thread reads the files of the process `pid` of the user `uid`.
    ByThread {
        /// The thread.
        reader: Reader,
        /// The process.
        pid: Pid,
        /// The user of the process.
        uid: Uid,
    },
}

/// Why the thread has not read the files of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ReadFailure {
    /// The memory of the process is locked, or too many reads wait for locks already.
    Locked,
    /// The thread can't be started, or can't open `/proc`.
    NoThread,
    /// The files can't be read.
    File(Errno),
}

impl From<ReadFailure> for Errno {
    fn from(failure: ReadFailure) -> Self {
        match failure {
            ReadFailure::Locked | ReadFailure::NoThread => Self::EAGAIN,
            ReadFailure::File(errno) => errno,
        }
    }
}

/// A thread that reads the files of the processes whose pids are sent to it. After this value is dropped, the thread
/// completes its present read and ends.
#[derive(Debug)]
pub(crate) struct Reader {
    requests: Sender<Pid>,
    contents: Receiver<Contents>,
    /// How long a caller waits for the files of one process.
    timeout: Duration,
}

/// A thread that waits for the lock of the process `pid` of the user `uid`. It puts the contents into `contents` and
/// ends when it has the lock.
#[derive(Debug)]
struct WaitingReader {
    pid: Pid,
    uid: Uid,
    contents: Receiver<Contents>,
}

impl MemoryFiles {
    /// Makes a reader that reads the environment variables with the names in `wanted`. Starts no thread yet.
    pub(crate) fn new(wanted: BTreeSet<&'static str>) -> Self {
        Self::with_proc_path(Path::new("/proc"), wanted)
    }

    /// Makes a reader as [`MemoryFiles::new`] does, for a file system of the format of `/proc` at `proc_path`.
    pub(crate) fn with_proc_path(proc_path: &Path, wanted: BTreeSet<&'static str>) -> Self {
        let proc_path = proc_path.to_owned();
        Self { proc_path, wanted, read: read_files, reader: None, waiting: Vec::new() }
    }

    /// Begins to read the environment variables and the command line of a process of the user `uid`. `pid` is the id of
    /// the process or of one of its threads. [`MemoryFiles::finish_read`] returns the contents. A thread reads the
    /// files meanwhile, so the caller should do other work before it calls `finish_read`.
    ///
    /// # Errors
    /// `EAGAIN` in these cases:
    ///
    /// - An earlier read of the process still waits for the lock of its memory.
    /// - 4 reads of processes of the user wait for locks, or 24 reads of processes of all users.
    /// - The thread can't be started.
    pub(crate) fn begin_read(&mut self, pid: Pid, uid: Uid) -> Result<BegunRead, Errno> {
        Ok(self.begin_by_thread(pid, uid)?)
    }

    /// Returns the contents of a read that [`MemoryFiles::begin_read`] has begun.
    ///
    /// # Errors
    /// `EAGAIN` if the memory of the process is locked for 10 ms from this call on, or for 100 ms if the thread has no
    /// real-time priority. The caller can then read the files later. `ENOENT` or `ESRCH` if the process has ended.
    pub(crate) fn finish_read(&mut self, begun: BegunRead) -> Contents {
        Ok(self.wait_for_contents(begun, None)?)
    }

    /// Returns whether the lock of the memory (`mmap_lock`) of the process `pid` is possibly held for longer than
    /// `max_wait`. `uid` is the user of the process. Waits until the lock is free, but not longer than `max_wait`. Also
    /// true if the state of the lock is unknown, because too many other reads wait for locks, or because no thread can
    /// be started.
    pub(crate) fn may_be_locked(&mut self, pid: Pid, uid: Uid, max_wait: Duration) -> bool {
        let contents =
            self.begin_by_thread(pid, uid).and_then(|begun| self.wait_for_contents(begun, Some(max_wait)));
        matches!(contents, Err(ReadFailure::Locked | ReadFailure::NoThread))
    }

    /// Makes a thread read the files of the process `pid` of the user `uid`. Starts the thread if no thread is free.
    /// [`MemoryFiles::wait_for_contents`] returns the contents.
    ///
    /// # Errors
    /// [`ReadFailure::Locked`] if an earlier read of the process still waits for the lock of its memory, or if too
    /// many reads wait for such locks already. [`ReadFailure::NoThread`] if the thread can't be started or has ended.
    fn begin_by_thread(&mut self, pid: Pid, uid: Uid) -> Result<BegunRead, ReadFailure> {
        self.waiting.retain(|waiting| matches!(waiting.contents.try_recv(), Err(TryRecvError::Empty)));
        // One process that keeps its lock must not use up all threads of its user, and one user must not use up
        // those of all users.
        let is_waiting_for_process = self.waiting.iter().any(|waiting| waiting.pid == pid);
        let waiting_of_user = self.waiting.iter().filter(|waiting| waiting.uid == uid).count();
        let is_full = waiting_of_user >= MAX_WAITING_OF_USER || self.waiting.len() >= MAX_WAITING;
        if is_waiting_for_process || is_full {
            return Err(ReadFailure::Locked);
        }
        let reader = match self.reader.take() {
            Some(reader) => reader,
            None => self.start_reader()?,
        };
        reader.requests.send(pid).map_err(|_| ReadFailure::NoThread)?;
        Ok(BegunRead::ByThread { reader, pid, uid })
    }

    /// Waits until the read `begun` is complete, and returns the contents. Waits at most `max_wait`. Without
    /// `max_wait`, waits at most the time limit of the thread ([`Reader::timeout`]). If the time passes, the memory
    /// of the process is locked: the thread is left waiting for the lock, and is not used again.
    ///
    /// # Errors
    /// [`ReadFailure::Locked`] if the time passes. [`ReadFailure::NoThread`] if the thread has ended.
    /// [`ReadFailure::File`] if the files can't be read.
    fn wait_for_contents(
        &mut self,
        begun: BegunRead,
        max_wait: Option<Duration>,
    ) -> Result<EnvironAndCommandLine, ReadFailure> {
        let (reader, pid, uid) = match begun {
            BegunRead::Known(contents) => return Ok(contents),
            BegunRead::ByThread { reader, pid, uid } => (reader, pid, uid),
        };
        match reader.contents.recv_timeout(max_wait.unwrap_or(reader.timeout)) {
            Ok(contents) => {
                self.reader = Some(reader);
                contents.map_err(ReadFailure::File)
            }
            Err(RecvTimeoutError::Timeout) => {
                self.waiting.push(WaitingReader { pid, uid, contents: reader.contents });
                Err(ReadFailure::Locked)
            }
            Err(RecvTimeoutError::Disconnected) => Err(ReadFailure::NoThread),
        }
    }

    /// Starts a thread that reads the files of each process whose pid it receives. Gives the thread a real-time
    /// priority if possible. Otherwise, callers wait longer for the contents.
    ///
    /// # Errors
    /// [`ReadFailure::NoThread`] if the thread can't be started.
    fn start_reader(&self) -> Result<Reader, ReadFailure> {
        let (requests, requested) = channel::<Pid>();
        let (send_contents, contents) = channel();
        let (proc_path, wanted, read) = (self.proc_path.clone(), self.wanted.clone(), self.read);
        let run = move || {
            let Ok(mut proc) = ProcDir::open(&proc_path) else { return };
            for pid in requested {
                if send_contents.send(read(&mut proc, pid, &wanted)).is_err() {
                    return;
                }
            }
        };
        let thread = thread::Builder::new().name("proc-reader".to_owned()).spawn(run);
        let thread = thread.map_err(|_| ReadFailure::NoThread)?;
        // With the normal policy, the caller would wait until the thread gets a CPU.
        let has_priority = realtime::set_thread_realtime(&thread).is_ok();
        let timeout = if has_priority { TIMEOUT } else { TIMEOUT_WITHOUT_PRIORITY };
        Ok(Reader { requests, contents, timeout })
    }
}

fn read_files(proc: &mut ProcDir, pid: Pid, wanted: &BTreeSet<&'static str>) -> Contents {
    let environ = match proc.environ(pid, wanted) {
        Err(errno) if is_gone(errno) => return Err(errno),
        environ => environ.unwrap_or_default(),
    };
    Ok(EnvironAndCommandLine { environ, command_line: proc.command_line(pid)? })
}

#[cfg(test)]
mod tests {
    use std::ops::RangeInclusive;
    use std::sync::Mutex;

    use super::*;
    use crate::tests::until;

    /// These processes hold the lock.
    const LOCKED: RangeInclusive<Pid> = Pid(100)..=Pid(199);
    /// The lock of a process that holds it, in these tests.
    static LOCK: Mutex<()> = Mutex::new(());

    fn read_when_unlocked(_: &mut ProcDir, pid: Pid, _: &BTreeSet<&'static str>) -> Contents {
        let _held = LOCKED.contains(&pid).then(|| LOCK.lock());
        Ok(EnvironAndCommandLine { command_line: pid.to_string(), ..EnvironAndCommandLine::default() })
    }

    fn read(files: &mut MemoryFiles, pid: Pid, uid: Uid) -> Contents {
        let begun = files.begin_read(pid, uid)?;
        files.finish_read(begun)
    }

    const USER: Uid = Uid(1000);
    const OTHER_USER: Uid = Uid(1001);

    #[test]
    fn a_locked_process_does_not_delay_the_files_of_others_and_is_read_later() {
        let mut files = MemoryFiles { read: read_when_unlocked, ..MemoryFiles::new(BTreeSet::new()) };
        let read_later = |files: &mut MemoryFiles, pid, uid| {
            let attempt = || read(files, pid, uid).ok();
            until("the files are read", attempt).command_line
        };
        let held = LOCK.lock().unwrap();
        for _ in 0..2 * MAX_WAITING_OF_USER {
            assert_eq!(read(&mut files, Pid(100), USER), Err(Errno::EAGAIN));
        }
        assert_eq!(files.waiting.len(), 1, "one thread waits for one process");
        assert!(
            files.may_be_locked(Pid(100), USER, TIMEOUT)
                && !files.may_be_locked(Pid(3), USER, Duration::from_secs(600))
        );
        assert_eq!(read_later(&mut files, Pid(3), USER), "3", "by another thread");
        for pid in 101..=110 {
            assert_eq!(read(&mut files, Pid(pid), USER), Err(Errno::EAGAIN));
        }
        assert_eq!(files.waiting.len(), MAX_WAITING_OF_USER, "the number of threads is bounded");
        assert_eq!(read(&mut files, Pid(3), USER), Err(Errno::EAGAIN));
        assert_eq!(
            read_later(&mut files, Pid(4), OTHER_USER),
            "4",
            "the locks of one user do not delay another one"
        );
        drop(held);
        assert_eq!(read_later(&mut files, Pid(100), USER), "100");
        until("the other threads have read", || {
            read(&mut files, Pid(3), USER).ok().filter(|_| files.waiting.is_empty())
        });
    }

    #[test]
    fn the_environment_and_the_command_line_are_those_of_the_process() {
        let mut proc = ProcDir::open(Path::new("/proc")).unwrap();
        let own = Pid(std::process::id());
        let mut files = MemoryFiles::new(BTreeSet::from(["PATH"]));
        let read = until("the files are read", || read(&mut files, own, USER).ok());
        assert_eq!(read.environ["PATH"], std::env::var("PATH").unwrap());
        assert_eq!(read.command_line, proc.command_line(own).unwrap());
    }
}
