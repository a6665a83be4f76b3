//! The type [`Job`], by which a program reads the cores of its job, and asks for fewer or more cores.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};

use pjw_core::cpuset::{CpuSet, Pu};
use thiserror::Error;

use crate::directory::{CORE_MAP_FILE_NAME, WANTED_CORES_FILE_NAME, find_job_directory};
use crate::layout::CoreMapContent;
use crate::mask;
use crate::page::{CoreMapError, CoreMapReader};

/// The interval at which a program without a core map checks whether there is one, and whether its mask has changed.
const MASK_INTERVAL: Duration = Duration::from_millis(250);

/// The source from which the CPUs in a [`Cores`] value were read: the core map (a file in which pjwd publishes the CPUs
/// of a job), or the affinity mask of the calling thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CoresSource {
    /// The core map: the CPUs of the job, as pjwd publishes them in the file `coremap` in the directory of
    /// the job.
    CoreMap,
    /// The affinity mask of the calling thread. It is used if pjwd publishes no CPUs for the job, or if they
    /// can't be read and were never read before.
    AffinityMask,
}

/// The cores of a job at one time, as sets of CPUs. The values come from the core map, a file in which pjwd publishes
/// the CPUs of the job. If there is no core map, the values come from the affinity mask of the calling thread.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cores {
    /// The number of the state of the core map from which these values come. Each change of the core map gives it
    /// another number. 0 if `source` is [`CoresSource::AffinityMask`].
    pub epoch: u64,
    /// The source of the other fields: the core map that pjwd published, or the affinity mask of the calling thread.
    pub source: CoresSource,
    /// The CPUs on which the job may run: the CPUs in `own` or `borrowed`, including the CPUs in `lent` and in
    /// `leaving`.
    pub cpus: CpuSet,
    /// The number of physical cores that have at least one CPU in `cpus`.
    pub core_count: u32,
    /// The online CPUs that the job owns. The job loses such a CPU only if an administrator or the batch system takes
    /// the CPU back, or if the owner of the job makes a smaller request. If `source` is [`CoresSource::AffinityMask`],
    /// the set is equal to `cpus`.
    pub own: CpuSet,
    /// The CPUs that this job does not own, and on which it may run. Each of these CPUs is free, or belongs to another
    /// job that does not use it, or is a housekeeping CPU (a CPU that is reserved for the system). A CPU of another job
    /// is taken back when that job needs it, and a free CPU when another job gets it. Empty if `source` is
    /// [`CoresSource::AffinityMask`].
    pub borrowed: CpuSet,
    /// The CPUs in `cpus` that pjwd will take from the job at the time `leaving_at_ns`, or later. Empty if `source` is
    /// [`CoresSource::AffinityMask`].
    pub leaving: CpuSet,
    /// The CPUs in `own` that another job has borrowed. This job may still use these CPUs at any time. Empty if
    /// `source` is [`CoresSource::AffinityMask`].
    pub lent: CpuSet,
    /// The time at which the CPUs in `leaving` are taken from the job, in ns of `CLOCK_MONOTONIC`. If they are taken at
    /// different times, the earliest of these times. `None` if `leaving` is empty.
    pub leaving_at_ns: Option<u64>,
}

impl Cores {
    /// Returns the number of threads that a program of the job should have: one for each CPU of the job, except the
    /// CPUs that will soon be taken from the job. This is the number of CPUs in `cpus` that are not in `leaving`, but
    /// at least 1.
    #[must_use]
    pub fn recommended_thread_count(&self) -> usize {
        self.cpus.difference(&self.leaving).len().max(1)
    }

    /// Returns the cores in `content`, the content of the core map of the job.
    fn from_core_map(content: CoreMapContent) -> Self {
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

    /// Returns the cores in the affinity mask of the calling thread. Used if pjwd publishes no core map for the job.
    fn from_affinity_mask() -> Self {
        let cpus = mask::own_mask();
        Self {
            epoch: 0,
            source: CoresSource::AffinityMask,
            core_count: mask::core_count(&cpus),
            own: cpus.clone(),
            cpus,
            borrowed: CpuSet::new(),
            leaving: CpuSet::new(),
            lent: CpuSet::new(),
            leaving_at_ns: None,
        }
    }
}

/// Error: a program can't tell pjwd how many cores its job wants. The program must write this number into the file
/// `want` in the directory of the job. The file is missing, or can't be written.
#[derive(Debug, Error)]
pub enum WantError {
    /// No file `want` was found. Either the environment names no directory of a job ([`find_job_directory`]), or
    /// the directory has no such file, for example because the job has ended.
    #[error("no pjwd keeps this program in a job: start it with pjwctl run, or set PJW_JOB_DIR")]
    NoJob,
    /// The file `want` in the directory of the job can't be written, for example because the user does not
    /// own the job.
    #[error("can't write {path}: {source}; only the owner of the job may", path = path.display())]
    WriteFailed {
        /// The path of the file.
        path: PathBuf,
        /// The error of the system call.
        source: io::Error,
    },
}

/// A handle of a job, for the programs of this job. With the handle, a program can read which cores the job has, wait
/// for changes of these cores, and inform pjwd how many cores the job can use. If pjwd publishes no files for the job,
/// the handle returns the cores in the affinity mask of the calling thread. Several threads of a program can share one
/// handle.
#[derive(Debug)]
pub struct Job {
    /// The directory with the files of the job.
    directory: Option<PathBuf>,
    /// The core map (the file `coremap`, in which pjwd publishes the CPUs of the job), as it was opened last. `None` if
    /// there is no such file.
    page: RwLock<Option<Arc<CoreMapReader>>>,
    /// The content of the core map that was read last. `None` if there was no core map at the last reading.
    last_content: RwLock<Option<CoreMapContent>>,
}

impl Job {
    /// Opens the job to which this process belongs. [`find_job_directory`] finds the directory with the files of the
    /// job from the environment variables. If there is no such directory, the cores of the job are those in the
    /// affinity mask of the calling thread.
    #[must_use]
    pub fn of_this_process() -> Self {
        Self::of_directory(find_job_directory())
    }

    /// Opens the job whose files are in `directory`. All users may read which cores a job has, so this can be the job
    /// of another user. As long as the directory contains no core map (the file `coremap` with the CPUs of the job),
    /// the cores of the job are those in the affinity mask of the calling thread.
    #[must_use]
    pub fn in_directory(directory: &Path) -> Self {
        Self::of_directory(Some(directory.to_owned()))
    }

    fn of_directory(directory: Option<PathBuf>) -> Self {
        let job = Self { directory, page: RwLock::new(None), last_content: RwLock::new(None) };
        job.open_page();
        job
    }

    /// Returns the path of the directory with the files of the job. `None` if [`Job::of_this_process`] found no
    /// directory. A path that was passed to [`Job::in_directory`] is returned even if no such directory exists.
    #[must_use]
    pub fn directory(&self) -> Option<&Path> {
        self.directory.as_deref()
    }

    /// Returns the cores that the job has now. The cores come from the core map: the file `coremap` in which pjwd
    /// publishes the CPUs of the job. The file stays mapped into memory, so further calls usually make no system
    /// call. If there is no core map, the cores are those in the affinity mask of the calling thread.
    ///
    /// While pjwd writes the core map, the call waits for at most 100 ms. If the write is not complete then, for
    /// example because pjwd was killed during the write, the call returns the cores that were read last. If none were
    /// read before, the cores are those in the affinity mask. Further calls do not wait for this write again.
    #[must_use]
    pub fn cores(&self) -> Cores {
        self.read().map_or_else(Cores::from_affinity_mask, |(_, content)| Cores::from_core_map(content))
    }

    /// Returns whether the job may run on the CPU `cpu`: the job owns the CPU, or borrows it from another job. The call
    /// reads this from the core map, the file `coremap` in which pjwd publishes the CPUs of the job. The file stays
    /// mapped into memory, so further calls usually make no system call. If there is no core map, returns whether the
    /// CPU is in the affinity mask of the calling thread.
    ///
    /// For example, a thread that waits for a spin lock can call this function with the CPU on which the holder of
    /// the lock last ran. If the job no longer has this CPU, the holder is perhaps not running, and the waiting
    /// thread should sleep.
    #[must_use]
    pub fn has_cpu(&self, cpu: Pu) -> bool {
        let quick = self.page().and_then(|page| page.has_cpu(cpu));
        let slow = || self.read().map_or_else(mask::own_mask, |(_, content)| content.cpus()).contains(cpu);
        quick.unwrap_or_else(slow)
    }

    /// Waits until the cores of the job change, and returns the new cores. Each change gives the core map (the file
    /// in which pjwd publishes the CPUs of the job) a new number, the epoch. `epoch` should be [`Cores::epoch`] of
    /// the cores that the program uses. If the present epoch already differs, the call returns at once. Returns
    /// `None` if the time `timeout` has passed. If `timeout` is `None`, waits without a limit.
    ///
    /// If pjwd publishes no core map, the cores are those in the affinity mask of the calling thread, with the epoch
    /// 0. If `epoch` is not 0, the call returns these cores at once. If `epoch` is 0, the call checks every 250 ms
    /// whether there is a core map or the affinity mask has changed.
    #[must_use]
    pub fn wait_for_change(&self, epoch: u64, timeout: Option<Duration>) -> Option<Cores> {
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let mask = mask::own_mask();
        loop {
            let remaining = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            let pause = remaining.unwrap_or(MASK_INTERVAL).min(MASK_INTERVAL);
            match self.read() {
                Some((_, content)) if content.epoch != epoch => return Some(Cores::from_core_map(content)),
                Some((page, _)) => match page.wait_for_change(epoch, remaining) {
                    Ok(Some(content)) if content.is_live => {
                        self.set_last_content(Some(&content));
                        return Some(Cores::from_core_map(content));
                    }
                    Ok(None) => return None,
                    // The job has ended, or its directory was made again. The next round opens the core map again.
                    Ok(Some(_)) => continue,
                    Err(_) => std::thread::sleep(pause),
                },
                None if epoch != 0 || mask::own_mask() != mask => return Some(Cores::from_affinity_mask()),
                None => std::thread::sleep(pause),
            }
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return None;
            }
        }
    }

    /// Tells pjwd that the job wants `cores` cores at present. The number can be smaller or larger than the number of
    /// cores that the job has. 0 means that the job needs no core. pjwd replaces a number above a limit by this
    /// limit:
    ///
    /// - For a job of the class besteffort (without cores of its own), the limit is the number of cores of the
    ///   machine.
    /// - For any other job, the limit is the number of cores that the job requested. If the job was granted more
    ///   cores than it requested, the limit is the number of granted cores.
    ///
    /// The number is written into the file `want` in the directory of the job, and is valid until the next number is
    /// written. pjwd usually reads the number after a few milliseconds. This can take up to 200 ms, because pjwd
    /// reads changed `want` files at most once in 200 ms.
    ///
    /// # Errors
    /// [`WantError::NoJob`] if there is no file `want`. [`WantError::WriteFailed`] if the file can't be written: only
    /// the user who owns the job may write it.
    pub fn set_wanted_cores(&self, cores: u32) -> Result<(), WantError> {
        self.write_want(&format!("{cores}\n"))
    }

    /// Cancels the number that [`Job::set_wanted_cores`] wrote. The job then wants all cores that pjwd or the batch
    /// system granted to it.
    ///
    /// # Errors
    /// The errors of [`Job::set_wanted_cores`].
    pub fn reset_wanted_cores(&self) -> Result<(), WantError> {
        self.write_want("\n")
    }

    /// Writes `text` into the file `want` in the directory of the job, in place of the earlier content. By this file,
    /// a program tells pjwd how many cores the job wants.
    ///
    /// # Errors
    /// The errors of [`Job::set_wanted_cores`].
    fn write_want(&self, text: &str) -> Result<(), WantError> {
        let path = self.directory.as_ref().ok_or(WantError::NoJob)?.join(WANTED_CORES_FILE_NAME);
        let mut options = OpenOptions::new();
        options.write(true).truncate(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
        let written = options.open(&path).and_then(|mut file| file.write_all(text.as_bytes()));
        written.map_err(|source| match source.kind() {
            io::ErrorKind::NotFound => WantError::NoJob,
            _ => WantError::WriteFailed { path, source },
        })
    }

    fn page(&self) -> Option<Arc<CoreMapReader>> {
        self.page.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Reads the core map (the file `coremap`, in which pjwd publishes the CPUs of the job). Returns the core map and
    /// its content.
    ///
    /// - Opens the file again in three cases: no file is mapped yet, pjwd no longer keeps the mapped file up to date,
    ///   or a write of pjwd is still not complete after 100 ms. Only the first call waits for a write that stays
    ///   incomplete, and a file that is opened again waits only if it is another one.
    /// - If the write is not complete in the opened file either, returns the content that was read last. This content
    ///   is better than the affinity mask of the calling thread, because the program may have bound the thread to
    ///   fewer CPUs.
    /// - `None` if there is no file that pjwd keeps up to date. Also `None` if the write is not complete, and no
    ///   content was read before.
    fn read(&self) -> Option<(Arc<CoreMapReader>, CoreMapContent)> {
        let if_live = |content: CoreMapContent| content.is_live.then_some(content);
        let mut page = self.page();
        let mut content = page.as_ref().and_then(|page| page.read_with_one_wait().ok()).and_then(if_live);
        if content.is_none() {
            page = self.open_page();
            content = match page.as_ref().map(|page| page.read_with_one_wait()) {
                Some(Ok(content)) => if_live(content),
                Some(Err(CoreMapError::Unfinished)) => self.last_content(),
                None | Some(Err(CoreMapError::OpenFailed { .. } | CoreMapError::Unknown { .. })) => None,
            };
        }
        self.set_last_content(content.as_ref());
        page.zip(content)
    }

    fn last_content(&self) -> Option<CoreMapContent> {
        self.last_content.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Keeps `content` for a later reading that finds the core map unfinished.
    fn set_last_content(&self, content: Option<&CoreMapContent>) {
        let is_equal = self.last_content.read().unwrap_or_else(PoisonError::into_inner).as_ref() == content;
        if !is_equal {
            *self.last_content.write().unwrap_or_else(PoisonError::into_inner) = content.cloned();
        }
    }

    /// Opens the core map again, and returns it. If the file is the one that is mapped already, keeps its reader,
    /// which knows for which write it has waited.
    fn open_page(&self) -> Option<Arc<CoreMapReader>> {
        let path = self.directory.as_ref()?.join(CORE_MAP_FILE_NAME);
        let opened = CoreMapReader::open(&path).ok().map(Arc::new);
        let mut page = self.page.write().unwrap_or_else(PoisonError::into_inner);
        let both = page.as_ref().zip(opened.as_ref());
        if !both.is_some_and(|(mapped, opened)| mapped.has_same_file_as(opened)) {
            *page = opened;
        }
        page.clone()
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;
    use crate::layout::SEQUENCE_OFFSET;
    use crate::writer::CoreMapWriter;

    #[test]
    fn an_unfinished_core_map_is_mapped_again_only_if_it_is_another_file() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(CORE_MAP_FILE_NAME);
        let content = CoreMapContent { is_live: true, ..CoreMapContent::default() };
        let create = || CoreMapWriter::create(&path, &directory.path().join("temporary"), &content).unwrap();
        let first = create();
        let job = Job::in_directory(directory.path());
        let mapped = job.page().unwrap();
        let file = OpenOptions::new().write(true).open(&path).unwrap();
        file.write_all_at(&1_u32.to_ne_bytes(), SEQUENCE_OFFSET as u64).unwrap();
        assert_eq!(job.cores().source, CoresSource::AffinityMask);
        assert!(Arc::ptr_eq(&mapped, &job.page().unwrap()), "the reader that has waited is kept");
        let second = create();
        assert_eq!(job.cores().source, CoresSource::CoreMap);
        assert!(!Arc::ptr_eq(&mapped, &job.page().unwrap()), "the file was replaced");
        drop((first, second));
    }
}
