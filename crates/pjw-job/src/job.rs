//! A job, as a program in it sees it.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};

use pjw_core::cpuset::{CpuSet, Pu};
use thiserror::Error;

use crate::directory::{PAGE_FILE_NAME, WANT_FILE_NAME, find_directory};
use crate::layout::PageContent;
use crate::mask;
use crate::page::{PageError, PageReader};

/// How often a program without a core map looks for one, and for a change of its mask.
const MASK_INTERVAL: Duration = Duration::from_millis(250);

/// The source of a [`Cores`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CoresSource {
    /// The core map that pjwd publishes.
    CoreMap,
    /// The affinity mask of the calling thread: there is no core map.
    AffinityMask,
}

/// The cores of a job at one time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cores {
    /// A number that differs after each change. 0 if the source is the affinity mask.
    pub epoch: u64,
    /// The source of the other fields.
    pub source: CoresSource,
    /// The CPUs on which the job may run: its own and the borrowed ones.
    pub cpus: CpuSet,
    /// The number of physical cores of these CPUs.
    pub core_count: u32,
    /// The CPUs that the job owns. Nobody takes them from it.
    pub own: CpuSet,
    /// The CPUs that other jobs own and leave idle. They are taken back when their owner needs them.
    pub borrowed: CpuSet,
    /// The CPUs that are about to be taken from the job.
    pub leaving: CpuSet,
    /// The own CPUs that another job borrows now. The job may use them at any time.
    pub lent: CpuSet,
    /// The time at which the leaving CPUs are taken, in ns of `CLOCK_MONOTONIC`. `None` if no CPU is leaving.
    pub leaving_at_ns: Option<u64>,
}

impl Cores {
    /// Returns the number of CPUs on which the job may run and that stay, but at least 1: the number of threads with which a
    /// program uses its cores to the full.
    #[must_use]
    pub fn thread_count(&self) -> usize {
        self.cpus.difference(&self.leaving).len().max(1)
    }

    fn of_page(content: PageContent) -> Self {
        Self {
            epoch: content.epoch,
            source: CoresSource::CoreMap,
            cpus: content.cpus(),
            core_count: content.core_count,
            own: content.own,
            borrowed: content.borrowed,
            leaving: content.leaving,
            lent: content.lent,
            leaving_at_ns: content.leaving_at_ns,
        }
    }

    fn of_mask() -> Self {
        let cpus = mask::own_mask();
        let none = CpuSet::new;
        Self {
            epoch: 0,
            source: CoresSource::AffinityMask,
            core_count: mask::core_count(&cpus),
            own: cpus.clone(),
            cpus,
            borrowed: none(),
            leaving: none(),
            lent: none(),
            leaving_at_ns: None,
        }
    }
}

/// The reasons why a number of wanted cores can't be passed to pjwd.
#[derive(Debug, Error)]
pub enum WantError {
    /// The program runs in no job of a daemon.
    #[error("no pjwd keeps this program in a job: start it with pjwctl run, or set PJW_JOB_DIR")]
    NoJob,
    /// The file can't be written.
    #[error("can't write {path}: {source}; only the owner of the job may", path = path.display())]
    File {
        /// The path of the file.
        path: PathBuf,
        /// The error of the system call.
        source: io::Error,
    },
}

/// A job, as a program in it sees it. The threads of a program can share one value.
#[derive(Debug)]
pub struct Job {
    /// The directory with the files of the job.
    directory: Option<PathBuf>,
    /// The page, as it was opened last. `None` if there is none.
    page: RwLock<Option<Arc<PageReader>>>,
}

impl Job {
    /// Opens the job of this process. The variables of the environment say which it is: see [`find_directory`]. Without a
    /// job the result has the cores of the affinity mask.
    #[must_use]
    pub fn open() -> Self {
        Self::of_directory(find_directory())
    }

    /// Opens the job whose files are in `directory`. This can be any job: all users may read the core maps. If there is no
    /// core map, the result has the cores of the affinity mask until there is one.
    #[must_use]
    pub fn open_directory(directory: &Path) -> Self {
        Self::of_directory(Some(directory.to_owned()))
    }

    fn of_directory(directory: Option<PathBuf>) -> Self {
        let job = Self { directory, page: RwLock::new(None) };
        job.open_page();
        job
    }

    /// Returns the directory with the files of the job. `None` if the program runs in no job.
    #[must_use]
    pub fn directory(&self) -> Option<&Path> {
        self.directory.as_deref()
    }

    /// Returns the cores that the job has now. Makes no system call if there is a core map.
    #[must_use]
    pub fn cores(&self) -> Cores {
        self.read().map_or_else(Cores::of_mask, |(_, content)| Cores::of_page(content))
    }

    /// Whether the job has this CPU now. A spin lock asks this of the CPU on which the holder of the lock was seen. Reads
    /// two words and makes no system call if there is a core map.
    #[must_use]
    pub fn has_cpu(&self, cpu: Pu) -> bool {
        let quick = self.page().and_then(|page| page.has_cpu(cpu));
        quick.unwrap_or_else(|| self.cores().cpus.contains(cpu))
    }

    /// Waits until the epoch differs from `epoch`, or the time has passed (`None`: without end). Returns the new cores;
    /// `None` if the time has passed. Pass the epoch of the [`Cores`] that the program uses: then no change is missed.
    ///
    /// Without a core map the call returns when there is one. It also returns when the mask of the calling thread is not
    /// what it was at the beginning of the call. Both are looked at each 250 ms.
    #[must_use]
    pub fn wait(&self, epoch: u64, timeout: Option<Duration>) -> Option<Cores> {
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let mask = mask::own_mask();
        loop {
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            match self.read() {
                Some((_, content)) if content.epoch != epoch => return Some(Cores::of_page(content)),
                Some((page, _)) => match page.wait(epoch, left) {
                    Ok(Some(content)) if content.is_live => return Some(Cores::of_page(content)),
                    Ok(None) => return None,
                    // The job has ended, or its directory was made again: look once more.
                    Ok(Some(_)) => continue,
                    Err(_) => std::thread::sleep(left.map_or(MASK_INTERVAL, |left| left.min(MASK_INTERVAL))),
                },
                None if epoch != 0 || mask::own_mask() != mask => return Some(Cores::of_mask()),
                None => std::thread::sleep(left.map_or(MASK_INTERVAL, |left| left.min(MASK_INTERVAL))),
            }
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return None;
            }
        }
    }

    /// Asks pjwd for `cores` cores: fewer than the job has, or more. 0 says that the job needs none at present. pjwd notices
    /// the number within some milliseconds. It keeps the last number and counts a larger one than the job may have as
    /// this limit. The next change of the core map shows what came of it.
    ///
    /// # Errors
    /// If the program runs in no job, or its user may not ask for cores: only the owner of the job may.
    pub fn want(&self, cores: u32) -> Result<(), WantError> {
        self.write_want(&format!("{cores}\n"))
    }

    /// Takes back the last [`Job::want`]: the job wants what it was granted.
    ///
    /// # Errors
    /// As [`Job::want`].
    pub fn want_default(&self) -> Result<(), WantError> {
        self.write_want("\n")
    }

    fn write_want(&self, text: &str) -> Result<(), WantError> {
        let path = self.directory.as_ref().ok_or(WantError::NoJob)?.join(WANT_FILE_NAME);
        let mut options = OpenOptions::new();
        options.write(true).truncate(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
        let written = options.open(&path).and_then(|mut file| file.write_all(text.as_bytes()));
        written.map_err(|source| match source.kind() {
            io::ErrorKind::NotFound => WantError::NoJob,
            _ => WantError::File { path, source },
        })
    }

    fn page(&self) -> Option<Arc<PageReader>> {
        self.page.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The live page with its content. Opens the page again if it is no longer live. `None` if there is none.
    fn read(&self) -> Option<(Arc<PageReader>, PageContent)> {
        let live = |page: Arc<PageReader>| match page.read() {
            Ok(content) if content.is_live => Some((page, content)),
            Ok(_) | Err(PageError::Unfinished | PageError::File { .. } | PageError::Unknown { .. }) => None,
        };
        self.page().and_then(live).or_else(|| self.open_page().and_then(live))
    }

    fn open_page(&self) -> Option<Arc<PageReader>> {
        let path = self.directory.as_ref()?.join(PAGE_FILE_NAME);
        let opened = PageReader::open(&path).ok().map(Arc::new);
        self.page.write().unwrap_or_else(PoisonError::into_inner).clone_from(&opened);
        opened
    }
}
