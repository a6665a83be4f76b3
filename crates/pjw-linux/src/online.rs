//! The PUs that are online: the kernel lists them, schedules on them, and cuts the masks that it tells to them.
//!
//! It stops scheduling on a PU some time before it takes it from the list, and begins some time after it put it there
//! (kernel/sched/core.c, `sched_cpu_deactivate`). In between it drives threads out of the PU and writes masks behind
//! cpusets without it, which would look like somebody's choice. So a PU is online here when both hold. What is scheduled on
//! is told by sched_getaffinity(2), which leaves out what isn't, of a thread that may run there.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use pjw_core::cpuset::CpuSet;
use pjw_core::process::Tid;

use crate::affinity;

const ONLINE: &str = "/sys/devices/system/cpu/online";
#[cfg(feature = "bpf")]
const POSSIBLE: &str = "/sys/devices/system/cpu/possible";
/// A list of 8,192 PUs of which every other is online has some 20,000 bytes; sysfs ends at a page.
const LONGEST: usize = 65_536;

/// This thread, for sched_getaffinity(2), and that which starts kernel threads: mostly one of them may run everywhere.
const WITNESSES: [Tid; 2] = [Tid(0), Tid(2)];
const STATUS: [&str; 2] = ["/proc/thread-self/status", "/proc/2/status"];

/// The PUs that are online, read again for each look; their list is parsed only if it changed.
#[derive(Debug)]
pub(crate) struct Online {
    file: File,
    text: Vec<u8>,
    read: Vec<u8>,
    listed: CpuSet,
    unscheduled: Unscheduled,
    set: CpuSet,
}

/// What was found out last: it holds as long as the witnesses say the same.
#[derive(Debug, Default)]
struct Unscheduled {
    /// Those that neither witness was told, of the list.
    unknown: CpuSet,
    /// Those of them that nothing was scheduled on.
    known: CpuSet,
}

impl Online {
    pub(crate) fn open() -> io::Result<Self> {
        let file = File::open(ONLINE)?;
        let mut online = Self {
            file,
            text: Vec::new(),
            read: vec![0; LONGEST],
            listed: CpuSet::new(),
            unscheduled: Unscheduled::default(),
            set: CpuSet::new(),
        };
        online.read()?;
        Ok(online)
    }

    /// Looks again.
    pub(crate) fn read(&mut self) -> io::Result<&CpuSet> {
        let length = self.file.read_at(&mut self.read, 0)?;
        let text = &self.read[..length];
        if self.text != text {
            self.listed = parse(text)?;
            self.text.clear();
            self.text.extend_from_slice(text);
        }
        let unscheduled = self.unscheduled.of(&self.listed);
        self.set =
            if unscheduled.is_empty() { self.listed.clone() } else { self.listed.difference(unscheduled) };
        Ok(&self.set)
    }

    /// As last read.
    #[cfg(feature = "bpf")]
    pub(crate) fn set(&self) -> &CpuSet {
        &self.set
    }
}

/// The PUs that are online now, for whoever asks once.
pub(crate) fn now() -> io::Result<CpuSet> {
    Online::open().map(|online| online.set)
}

impl Unscheduled {
    /// Those of the list that nothing is scheduled on, as far as it can be known.
    fn of(&mut self, listed: &CpuSet) -> &CpuSet {
        let mut unknown = listed.clone();
        for witness in WITNESSES {
            unknown = unknown.difference(&affinity::get(witness).unwrap_or_default());
            if unknown.is_empty() {
                break;
            }
        }
        // On a tuned node there always are some on which neither may run.
        if unknown != self.unknown {
            self.known = by_status(&unknown);
            self.unknown = unknown;
        }
        &self.known
    }
}

/// Those of them that are left out of a witness's mask: mostly none, for neither may run there.
fn by_status(unknown: &CpuSet) -> CpuSet {
    let told = WITNESSES.iter().zip(STATUS).filter_map(|(&witness, status)| {
        let masks = || mask_of(&std::fs::read_to_string(status).ok()?);
        let (before, now, after) = (masks()?, affinity::get(witness).ok()?, masks()?);
        Some(left_out(&before.intersection(&after), &now))
    });
    told.fold(CpuSet::new(), |all, told| all.union(&told)).intersection(unknown)
}

/// The PUs that sched_getaffinity(2) left out of a mask. Of a thread that it finds nowhere it tells nothing.
fn left_out(mask: &CpuSet, now: &CpuSet) -> CpuSet {
    if now.is_empty() { CpuSet::new() } else { mask.difference(now) }
}

/// The whole mask, as it was given: of a `status` of proc_pid_status(5).
fn mask_of(status: &str) -> Option<CpuSet> {
    status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?.trim().parse().ok()
}

/// How many PUs there may ever be: one more than the highest number.
#[cfg(feature = "bpf")]
pub(crate) fn possible() -> io::Result<u32> {
    let set = parse(&std::fs::read(POSSIBLE)?)?;
    set.last().map(|pu| pu.0 + 1).ok_or_else(|| io::Error::other(format!("{POSSIBLE} names no PU")))
}

fn parse(text: &[u8]) -> io::Result<CpuSet> {
    let text = std::str::from_utf8(text).map_err(io::Error::other)?;
    text.parse().map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(list: &str) -> CpuSet {
        list.parse().unwrap()
    }

    #[test]
    fn what_is_left_out_of_a_mask_is_what_nothing_is_scheduled_on() {
        assert_eq!(left_out(&set("0-7"), &set("0-3,5-7")), set("4"));
        assert_eq!(left_out(&set("0-3"), &set("0-3")), set(""));
        assert_eq!(left_out(&set("4"), &set("")), set(""));
    }

    #[test]
    fn a_thread_that_may_not_run_everywhere_takes_no_pu_away() {
        let one = CpuSet::from(now().unwrap().first().unwrap());
        let thread = std::thread::spawn(move || {
            affinity::set(Tid(0), &one).unwrap();
            Online::open().unwrap()
        });
        let online = thread.join().unwrap();
        assert_eq!(online.set, online.listed);
    }

    #[test]
    fn all_pus_of_this_machine_that_are_listed_are_scheduled_on() {
        let online = Online::open().unwrap();
        assert_eq!(online.set, online.listed);
        assert!(!online.set.is_empty());
    }
}
