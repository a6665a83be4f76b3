//! The PUs that are online and active.
//!
//! The kernel lists the online PUs, runs threads on the active PUs, and cuts reported masks to the active PUs. It
//! deactivates a PU some time before the PU leaves the list, and activates a PU some time after the PU entered the
//! list (kernel/sched/core.c, `sched_cpu_deactivate`). In between the kernel moves threads off the PU and changes
//! masks behind cpusets. Such a change could not be distinguished from an affinity request. So a PU counts as online
//! here only if it is listed and active. sched_getaffinity(2) leaves out inactive PUs, for a thread whose mask names
//! them.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use pjw_core::cpuset::{CpuSet, Pu};
use pjw_core::ids::Tid;

use crate::sys::affinity;

const ONLINE: &str = "/sys/devices/system/cpu/online";
const POSSIBLE: &str = "/sys/devices/system/cpu/possible";
/// A list of 8,192 PUs with every other PU online has about 20,000 bytes. sysfs ends at a page.
const MAX_LIST_BYTES: usize = 65_536;

/// Threads whose masks are read with sched_getaffinity(2), and their `status` files: the calling thread, and kthreadd.
/// Usually one of them may use every PU.
const REFERENCE_THREADS: [(Tid, &str); 2] =
    [(Tid(0), "/proc/thread-self/status"), (Tid(2), "/proc/2/status")];

/// Reads the online PUs (logical CPUs) repeatedly and fast: keeps the file with the list open, and parses the list
/// only if its text has changed. A PU counts as online only if the kernel also schedules threads on it.
#[derive(Debug)]
pub(crate) struct OnlinePuReader {
    file: File,
    buffer: Vec<u8>,
    /// The text of the list as last read.
    list_text: Vec<u8>,
    /// The PUs in the list.
    listed: CpuSet,
    not_scheduled: NotScheduled,
    /// The PUs that are listed and active, as last read.
    online: CpuSet,
}

/// The online PUs on which the kernel does not schedule threads, as last computed. Stays valid while the masks of the
/// reference threads ([`REFERENCE_THREADS`]) are unchanged.
#[derive(Debug, Default)]
struct NotScheduled {
    /// The listed PUs that are not in the mask of any reference thread.
    outside_masks: CpuSet,
    /// Those of the PUs in `outside_masks` on which the kernel does not schedule threads.
    pus: CpuSet,
}

impl OnlinePuReader {
    /// Opens the file in sysfs that lists the online PUs (logical CPUs), and reads the list.
    pub(crate) fn open() -> io::Result<Self> {
        let file = File::open(ONLINE)?;
        let mut reader = Self {
            file,
            buffer: vec![0; MAX_LIST_BYTES],
            list_text: Vec::new(),
            listed: CpuSet::new(),
            not_scheduled: NotScheduled::default(),
            online: CpuSet::new(),
        };
        reader.read()?;
        Ok(reader)
    }

    /// Reads again which PUs (logical CPUs) are online now, and returns them.
    ///
    /// # Errors
    /// If the list in sysfs can't be read or parsed.
    pub(crate) fn read(&mut self) -> io::Result<&CpuSet> {
        let length = self.file.read_at(&mut self.buffer, 0)?;
        let text = &self.buffer[..length];
        if self.list_text != text {
            self.listed = parse(text)?;
            self.list_text.clear();
            self.list_text.extend_from_slice(text);
        }
        let not_scheduled = self.not_scheduled.find_unscheduled(&self.listed);
        self.online = if not_scheduled.is_empty() {
            self.listed.clone()
        } else {
            self.listed.difference(not_scheduled)
        };
        Ok(&self.online)
    }

    /// Returns the PUs (logical CPUs) that were online at the last call of [`OnlinePuReader::read`].
    #[cfg(feature = "bpf")]
    pub(crate) fn online_pus(&self) -> &CpuSet {
        &self.online
    }
}

/// Returns the PUs (logical CPUs) that are online now. [`OnlinePuReader`] is faster if they are read repeatedly.
///
/// # Errors
/// If the list in sysfs can't be read or parsed.
pub(crate) fn read_online_pus() -> io::Result<CpuSet> {
    OnlinePuReader::open().map(|reader| reader.online)
}

impl NotScheduled {
    /// Returns the PUs in `listed` on which the kernel does not schedule threads now. Computes them from the affinity
    /// masks of the reference threads ([`REFERENCE_THREADS`]). Stores the result, and computes it again only if these
    /// masks have changed.
    fn find_unscheduled(&mut self, listed: &CpuSet) -> &CpuSet {
        let mut outside_masks = listed.clone();
        for (reference, _) in REFERENCE_THREADS {
            outside_masks = outside_masks.difference(&affinity::get_mask(reference).unwrap_or_default());
            if outside_masks.is_empty() {
                break;
            }
        }
        // On a machine with isolated PUs, no reference thread may use some PUs.
        if outside_masks != self.outside_masks {
            self.pus = not_scheduled_by_status(&outside_masks);
            self.outside_masks = outside_masks;
        }
        &self.pus
    }
}

/// Returns those PUs of `candidates` that the `status` file of a reference thread names, and that sched_getaffinity(2)
/// leaves out of the mask of this thread. Nothing is known of a PU that neither of the two names.
fn not_scheduled_by_status(candidates: &CpuSet) -> CpuSet {
    let missing = REFERENCE_THREADS.into_iter().filter_map(|(reference, status)| {
        let masks = || parse_requested_mask(&std::fs::read_to_string(status).ok()?);
        let (before, now, after) = (masks()?, affinity::get_mask(reference).ok()?, masks()?);
        Some(missing_pus(&before.intersection(&after), &now))
    });
    missing.fold(CpuSet::new(), |all, one| all.union(&one)).intersection(candidates)
}

/// Returns the PUs of the mask `requested` that are not in `effective`, the result of sched_getaffinity(2). Empty if
/// `effective` is empty.
fn missing_pus(requested: &CpuSet, effective: &CpuSet) -> CpuSet {
    if effective.is_empty() { CpuSet::new() } else { requested.difference(effective) }
}

/// The full requested mask from the `status` file of a thread, proc_pid_status(5).
fn parse_requested_mask(status: &str) -> Option<CpuSet> {
    status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?.trim().parse().ok()
}

/// Returns the number of possible PUs (logical CPUs) of this machine: the highest PU number plus one. Possible PUs
/// include those that can be added while the machine runs.
///
/// # Errors
/// If the list in sysfs can't be read or parsed.
#[cfg(feature = "bpf")]
pub(crate) fn possible_pu_count() -> io::Result<u32> {
    let set = parse(&std::fs::read(POSSIBLE)?)?;
    set.last().map(|pu| pu.0 + 1).ok_or_else(|| io::Error::other(format!("{POSSIBLE} names no PU")))
}

/// Returns all possible PUs (logical CPUs) of this machine. These include PUs that can be added while the machine
/// runs. Returns only PU 0 if sysfs can't be read.
pub(crate) fn possible_cpus() -> CpuSet {
    list_or_first(POSSIBLE)
}

/// Returns the numbers of all possible NUMA nodes of this machine. Returns only node 0 if sysfs can't be read.
pub(crate) fn possible_nodes() -> CpuSet {
    list_or_first("/sys/devices/system/node/possible")
}

fn list_or_first(file: &str) -> CpuSet {
    let text = std::fs::read_to_string(file).unwrap_or_default();
    text.parse().ok().filter(|set: &CpuSet| !set.is_empty()).unwrap_or_else(|| CpuSet::from(Pu(0)))
}

fn parse(text: &[u8]) -> io::Result<CpuSet> {
    let text = std::str::from_utf8(text).map_err(io::Error::other)?;
    text.parse().map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use pjw_core::testing::cpu_set;

    use super::*;

    #[test]
    fn pus_missing_from_a_mask_are_inactive() {
        assert_eq!(missing_pus(&cpu_set("0-7"), &cpu_set("0-3,5-7")), cpu_set("4"));
        assert_eq!(missing_pus(&cpu_set("0-3"), &cpu_set("0-3")), cpu_set(""));
        assert_eq!(missing_pus(&cpu_set("4"), &cpu_set("")), cpu_set(""));
    }

    #[test]
    fn a_narrow_mask_of_the_reading_thread_removes_no_pu() {
        let one = CpuSet::from(read_online_pus().unwrap().first().unwrap());
        let thread = std::thread::spawn(move || {
            affinity::set_mask(Tid(0), &one).unwrap();
            OnlinePuReader::open().unwrap()
        });
        let reader = thread.join().unwrap();
        assert_eq!(reader.online, reader.listed);
    }

    #[test]
    fn all_listed_pus_of_this_machine_are_active() {
        let reader = OnlinePuReader::open().unwrap();
        assert_eq!(reader.online, reader.listed);
        assert!(!reader.online.is_empty());
    }
}
