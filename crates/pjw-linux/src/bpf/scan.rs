//! The task scan: loads the program, runs it and reads its records.

use std::collections::BTreeSet;
use std::fs::File;
use std::hash::{BuildHasher, RandomState};
use std::io::{self, Read};

use aya::Ebpf;
use aya::maps::{Array, HashMap, MapData, MapError};
use aya::programs::{Iter, ProgramError};
use pjw_core::ids::Pid;

use super::fault::{TaskScanError, TaskScanUnavailable};
use super::object::{BpfPlatform, load_program, refusal_error, scan_error, take_map, unavailable_reason};
use super::task::{MAX_SCANNED_PROCESSES, TaskRecord, TaskScanSummary, TaskScope};
use super::{record, self_check};
use crate::sys::online::OnlinePuReader;

/// The size of the buffer for records, in bytes. Twice the size of the kernel's buffer for an iterator.
const BUFFER_BYTES: usize = 65_536;

/// The settings and the counts of one task scan: `struct pass` of `tasks.bpf.c`. Its values are, by index:
///
/// - 0: 1 if only the threads of the watched processes are reported. 0 if the first thread of every other process is
///   reported too.
/// - 1: The size of an affinity mask, in bytes.
/// - 2, 3: The number of reported tasks, and of skipped tasks.
/// - 4, 5: Two random keys, from which the numbers of address spaces are computed.
type PassValue = [u64; 6];

/// The task scan: a BPF program that iterates over the threads of the machine, and reports their state as
/// binary records. This is faster than reading `/proc`. Dropping this value removes the program from the
/// kernel.
pub struct TaskScan {
    object: Ebpf,
    /// The settings of the next scan, and the numbers of reported and skipped tasks of the last scan.
    pass: Array<MapData, PassValue>,
    /// The processes in the scope of the scan.
    watched: Watched,
    /// The size of an affinity mask of this kernel, in bytes.
    mask_bytes: usize,
    /// The random keys of this value. The number of an address space is computed from the address of the kernel's
    /// `mm_struct` and from these keys.
    keys: [u64; 2],
    /// Reader of the online PUs.
    online: OnlinePuReader,
    /// The records that were read and not parsed yet. Reused by each scan.
    buffer: Vec<u8>,
    /// The affinity mask of the current record. Reused for each record.
    words: Vec<u64>,
}

impl std::fmt::Debug for TaskScan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TaskScan").field("watched", &self.watched).finish_non_exhaustive()
    }
}

impl TaskScan {
    /// Loads the BPF program of the task scan into the kernel, which takes about 100 ms. As a test, scans the
    /// calling thread, and checks that the reported state agrees with `/proc`.
    ///
    /// # Errors
    /// If a requirement is missing, the kernel refuses the program, or the test fails. The error names the
    /// reason and a remedy.
    pub fn load() -> Result<Self, TaskScanUnavailable> {
        Self::load_with_platform(&mut BpfPlatform::detect()?)
    }

    /// Loads the BPF program of the task scan and tests it, as [`TaskScan::load`] does. `platform` contains the facts
    /// about the running kernel, such as its type information.
    ///
    /// # Errors
    /// If the kernel refuses the program, or the test of the program fails.
    pub(super) fn load_with_platform(platform: &mut BpfPlatform) -> Result<Self, TaskScanUnavailable> {
        let online = OnlinePuReader::open().map_err(|error| refusal_error("the online PUs", &error))?;
        let mut object = platform.load(MAX_SCANNED_PROCESSES, |object, btf| {
            let loaded = iterator(object).and_then(|iterator| load_program(|| iterator.load("task", btf)));
            loaded.map_err(|error| unavailable_reason("verifying", &error))
        })?;
        let mut scan = Self {
            pass: Array::try_from(take_map(&mut object, "PASS")?)
                .map_err(|error| refusal_error("PASS", &error))?,
            watched: Watched::new(
                take_map(&mut object, "WATCHED_TGIDS")?
                    .try_into()
                    .map_err(|error| refusal_error("WATCHED_TGIDS", &error))?,
            ),
            object,
            mask_bytes: platform.mask_bytes,
            keys: random_keys(),
            online,
            buffer: vec![0; BUFFER_BYTES],
            words: Vec::new(),
        };
        self_check::check_task_scan(|scope, each| scan.for_each_task(scope, &mut |task| each(task)))?;
        Ok(scan)
    }

    /// Calls `handle_task` with a record for every task (thread) in `scope`, in ascending order of the thread
    /// ids. Returns how many tasks were reported, and how many were skipped because they are not in `scope`.
    /// The records are no atomic snapshot: tasks start and end during the scan, and a new task can be missing.
    ///
    /// # Errors
    /// If `scope` names more than [`MAX_SCANNED_PROCESSES`] processes, a system call fails, or a record is
    /// malformed. Records that were passed to `handle_task` before the error are valid.
    pub fn for_each_task(
        &mut self,
        scope: TaskScope<'_>,
        handle_task: &mut impl FnMut(TaskRecord<'_>),
    ) -> Result<TaskScanSummary, TaskScanError> {
        self.online.read().map_err(|error| scan_error("the online PUs", &error))?;
        let (mode, processes) = match scope {
            TaskScope::AllProcessesAndThreadsOf(processes) => (0, processes),
            TaskScope::ThreadsOf(processes) => (1, processes),
        };
        self.watched.set_processes(processes)?;
        let [first_key, second_key] = self.keys;
        let settings = [mode, self.mask_bytes as u64, 0, 0, first_key, second_key];
        self.pass.set(0, settings, 0).map_err(|error| scan_error("starting", &error))?;
        let file = self.open_iterator().map_err(|error| scan_error("opening", &error))?;
        self.read_records(file, handle_task)?;
        let [_, _, reported_tasks, skipped_tasks, _, _] =
            self.pass.get(&0, 0).map_err(|error| scan_error("ending", &error))?;
        Ok(TaskScanSummary { reported_tasks, skipped_tasks })
    }

    /// Opens a new file of the BPF iterator. When the file is read, the kernel iterates over its tasks once.
    fn open_iterator(&mut self) -> Result<File, ProgramError> {
        let iterator = iterator(&mut self.object)?;
        let link = iterator.attach()?;
        let file = iterator.take_link(link)?.into_file();
        file.map_err(|error| ProgramError::IOError(io::Error::other(error)))
    }

    /// Reads the records that the BPF program writes to `file`, up to the end of the file. Calls `handle_task`
    /// with each record.
    ///
    /// # Errors
    /// If `file` can't be read, or if a record is malformed or incomplete.
    fn read_records(
        &mut self,
        mut file: File,
        handle_task: &mut impl FnMut(TaskRecord<'_>),
    ) -> Result<(), TaskScanError> {
        let mut filled = 0;
        loop {
            match file.read(&mut self.buffer[filled..]) {
                Ok(0) if filled == 0 => return Ok(()),
                Ok(0) => return Err(TaskScanError::Malformed),
                Ok(length) => filled += length,
                // After a million skipped tasks in a row, the kernel interrupts the read.
                Err(error)
                    if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
                Err(error) => return Err(scan_error("reading", &error)),
            }
            let mut unparsed = &self.buffer[..filled];
            while let Some((record, following)) =
                record::parse_first_record(unparsed).map_err(|_| TaskScanError::Malformed)?
            {
                unparsed = following;
                record::decode_mask(record.mask, self.online.online_pus().words(), &mut self.words);
                handle_task(TaskRecord { mask_words: &self.words, ..record.task });
            }
            // Each read returns complete records, unless the buffer is too short.
            let unparsed_bytes = unparsed.len();
            self.buffer.copy_within(filled - unparsed_bytes..filled, 0);
            filled = unparsed_bytes;
        }
    }
}

/// Two random numbers. The standard library seeds [`RandomState`] with random bytes of the kernel (getrandom(2)).
fn random_keys() -> [u64; 2] {
    let random = RandomState::new();
    [random.hash_one(0_u8), random.hash_one(1_u8)]
}

fn iterator(object: &mut Ebpf) -> Result<&mut Iter, ProgramError> {
    object.program_mut("scan").ok_or(ProgramError::UnexpectedProgramType)?.try_into()
}

/// The processes of which the task scan reports all threads: the BPF map with their pids, and a copy of this map.
#[derive(Debug)]
struct Watched {
    map: HashMap<MapData, u32, u32>,
    pids: BTreeSet<Pid>,
}

impl Watched {
    fn new(map: HashMap<MapData, u32, u32>) -> Self {
        Self { map, pids: BTreeSet::new() }
    }

    /// Sets the processes of which the next scan reports all threads: makes the BPF map contain exactly the pids in
    /// `processes`. Writes only the entries that differ.
    ///
    /// # Errors
    /// If there are more than [`MAX_SCANNED_PROCESSES`] pids, or if the kernel refuses a change of the map.
    fn set_processes(&mut self, processes: &BTreeSet<Pid>) -> Result<(), TaskScanError> {
        if processes.len() > MAX_SCANNED_PROCESSES as usize {
            return Err(TaskScanError::TooManyProcesses { processes: processes.len() });
        }
        let gone: Vec<Pid> = self.pids.difference(processes).copied().collect();
        for pid in gone {
            match self.map.remove(&pid.0) {
                Ok(()) | Err(MapError::KeyNotFound) => {}
                Err(error) => return Err(scan_error("watching", &error)),
            }
            self.pids.remove(&pid);
        }
        for &pid in processes {
            if self.pids.contains(&pid) {
                continue;
            }
            self.map.insert(pid.0, 0, 0).map_err(|error| scan_error("watching", &error))?;
            self.pids.insert(pid);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masks_of_the_maximum_length_are_reported() {
        let Some(mut scan) = crate::bpf::tests::scan() else { return };
        scan.mask_bytes = record::MASK_BYTES;
        let own_pid = BTreeSet::from([Pid(std::process::id())]);
        let own_tid = crate::sys::affinity::own_thread();
        let mut reported = Vec::new();
        let summary = scan
            .for_each_task(TaskScope::ThreadsOf(&own_pid), &mut |task| {
                reported.push((task.tid, task.allowed_pus()));
            })
            .unwrap();
        assert_eq!(summary.reported_tasks, reported.len() as u64);
        let allowed = reported.into_iter().find(|(tid, _)| *tid == own_tid).unwrap().1;
        assert_eq!(allowed, crate::sys::affinity::get_mask(own_tid).unwrap());
    }
}
