//! The program in the kernel: loaded, told what to report, read.

use std::collections::BTreeSet;
use std::error::Error;
use std::fs::{self, File};
use std::io::{self, Read};

use aya::maps::{Array, MapData};
use aya::programs::{Iter, ProgramError};
use aya::{Btf, BtfError, Ebpf, EbpfLoader};
use nix::sys::resource::{RLIM_INFINITY, Resource, setrlimit};
use pjw_core::cpuset::CpuSet;
use pjw_core::process::Pid;

use super::online::{self, Online};
use super::record::{self, MASK_BYTES, Record};
use super::watched::Watched;
use super::{
    MOST_WATCHED, Mode, PassError, PassSummary, ScanUnavailable, TaskRecord, WatchError, self_check,
};

/// Made of `tasks.bpf.c` by `make bpf`; a test tells if one of the two is not the other's.
const OBJECT: &[u8] = aya::include_bytes_aligned!("tasks.bpf.o");
/// `PROC_PID_INIT_INO` of the kernel's `include/linux/proc_ns.h`.
const FIRST_PID_NAMESPACE: &str = "pid:[4026531836]";
/// Tasks that are remembered per PU. One costs some 90 bytes of the kernel's memory.
const REMEMBERED_PER_PU: u32 = 1024;
const REMEMBERED: std::ops::RangeInclusive<u32> = 65_536..=1_048_576;
/// Twice what the kernel keeps of an iterator's output.
const BUFFER_BYTES: usize = 65_536;
/// Words of an error that are told, if it is longer.
const SAID_AT_FIRST: usize = 12;
const SAID_AT_LAST: usize = 60;

/// `struct pass` of `tasks.bpf.c`: mode, number, bytes of a mask; reported, quiet, unwatched, kernel threads.
type PassValue = [u64; 7];

/// A program in the kernel that tells of every task: see the [module](super). Dropping it removes it.
pub struct TaskScan {
    program: Ebpf,
    pass: Array<MapData, PassValue>,
    watched: Watched,
    mask_bytes: usize,
    online: Online,
    /// Which PUs were online in the last pass of watched tasks; `None` if it did not end well.
    known: Option<CpuSet>,
    number: u32,
    /// Whether the last pass ended well.
    ended: bool,
    buffer: Vec<u8>,
    words: Vec<u64>,
}

impl std::fmt::Debug for TaskScan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TaskScan")
            .field("passes", &self.number)
            .field("watched", &self.watched)
            .finish_non_exhaustive()
    }
}

impl TaskScan {
    /// Loads the program, which takes some 100 ms, and compares what it tells of our own task with /proc.
    ///
    /// # Errors
    /// What is missing here, and what to do about it.
    pub fn load() -> Result<Self, ScanUnavailable> {
        if cfg!(target_endian = "big") {
            return Err(ScanUnavailable::BigEndian);
        }
        let namespace =
            fs::read_link("/proc/self/ns/pid").map_err(|error| refused("/proc/self/ns/pid", &error))?;
        if namespace.as_os_str() != FIRST_PID_NAMESPACE {
            return Err(ScanUnavailable::PidNamespace);
        }
        let possible = online::possible().map_err(|error| refused("the possible PUs", &error))?;
        let mask_bytes = possible.div_ceil(64) as usize * 8;
        if mask_bytes > MASK_BYTES {
            return Err(ScanUnavailable::TooManyPus { possible });
        }
        let online = Online::open().map_err(|error| refused("the online PUs", &error))?;
        let mut program = load_program(possible)?;
        let mut scan = Self {
            pass: Array::try_from(take_map(&mut program, "PASS")?)
                .map_err(|error| refused("PASS", &error))?,
            watched: Watched::new(
                take_map(&mut program, "WATCHED_TGIDS")?
                    .try_into()
                    .map_err(|error| refused("WATCHED_TGIDS", &error))?,
            ),
            program,
            mask_bytes,
            online,
            known: None,
            number: 0,
            ended: false,
            buffer: vec![0; BUFFER_BYTES],
            words: Vec::new(),
        };
        self_check::run(&mut scan)?;
        Ok(scan)
    }

    /// Watches these processes and no others.
    ///
    /// A process is known by its number alone: if that is given to another process, its tasks are reported as new
    /// ones, with their own start.
    ///
    /// # Errors
    /// If there are too many, or the kernel refuses.
    pub fn watch(&mut self, processes: &BTreeSet<Pid>) -> Result<(), WatchError> {
        self.watched.set(processes, self.number)
    }

    /// Has the kernel walk its tasks, and calls `each` for those it reports.
    ///
    /// A pass is no snapshot: tasks are born and die meanwhile, and those born late may be missed.
    ///
    /// # Errors
    /// If the kernel refuses to go on.
    pub fn pass(
        &mut self,
        mode: Mode,
        each: &mut impl FnMut(TaskRecord<'_>),
    ) -> Result<PassSummary, PassError> {
        self.ended = false;
        // 0 means "never" in the kernel's map.
        self.number = self.number.checked_add(1).unwrap_or(1);
        self.online.read().map_err(|error| stopped("the online PUs", &error))?;
        let unchanged = self.known.as_ref() == Some(self.online.set());
        let kernel_mode = match mode {
            Mode::Everything => 0,
            // A PU that went off or came back changes what tasks may use, and not their masks.
            Mode::Changed if unchanged => 2,
            Mode::Watched | Mode::Changed => 1,
        };
        let known = self.known.take();
        let order = [kernel_mode, self.number.into(), self.mask_bytes as u64, 0, 0, 0, 0];
        self.pass.set(0, order, 0).map_err(|error| stopped("beginning", &error))?;
        let file = self.open().map_err(|error| stopped("opening", &error))?;
        self.read(file, each)?;
        let [_, _, _, reported, quiet, unwatched, kernel] =
            self.pass.get(&0, 0).map_err(|error| stopped("ending", &error))?;
        self.known = if mode == Mode::Everything { known } else { Some(self.online.set().clone()) };
        self.ended = true;
        Ok(PassSummary { reported, quiet, unwatched, kernel })
    }

    /// The watched processes of which the last pass met no task at all: they are gone. Those that are watched since
    /// that pass are not among them, and nobody is if it failed.
    ///
    /// A process whose first thread ended is met as long as it has others, or nobody has waited for it. A security
    /// module may keep a process from BPF programs that /proc shows: ask /proc once before it is given up.
    pub fn vanished(&self) -> impl Iterator<Item = Pid> {
        self.watched.not_met(self.number).filter(|_| self.ended)
    }

    /// A file that, when read, makes the kernel walk its tasks once.
    fn open(&mut self) -> Result<File, ProgramError> {
        let program = iterator(&mut self.program)?;
        let link = program.attach()?;
        let file = program.take_link(link)?.into_file();
        file.map_err(|error| ProgramError::IOError(io::Error::other(error)))
    }

    fn read(&mut self, mut file: File, each: &mut impl FnMut(TaskRecord<'_>)) -> Result<(), PassError> {
        let mut filled = 0;
        loop {
            match file.read(&mut self.buffer[filled..]) {
                Ok(0) if filled == 0 => return Ok(()),
                Ok(0) => return Err(PassError::Malformed),
                Ok(length) => filled += length,
                // After a million tasks of which none was reported the kernel lets others run.
                Err(error)
                    if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
                Err(error) => return Err(stopped("reading", &error)),
            }
            let mut rest = &self.buffer[..filled];
            while let Some((record, others)) = record::first(rest).map_err(|_| PassError::Malformed)? {
                rest = others;
                match record {
                    Record::Alive { slot } => self.watched.note(slot, self.number),
                    Record::Task { slot, task, mask } => {
                        if let Some(slot) = slot {
                            self.watched.note(slot, self.number);
                        }
                        record::decode_mask(mask, self.online.set().words(), &mut self.words);
                        each(TaskRecord { allowed_words: &self.words, ..task });
                    }
                }
            }
            // The kernel ends a read with a whole record, unless the buffer is too short.
            let left = rest.len();
            self.buffer.copy_within(filled - left..filled, 0);
            filled = left;
        }
    }
}

fn load_program(possible: u32) -> Result<Ebpf, ScanUnavailable> {
    let btf = Btf::from_sys_fs().map_err(|error| ScanUnavailable::NoBtf { why: chain(&error) })?;
    let remembered = possible.saturating_mul(REMEMBERED_PER_PU).clamp(*REMEMBERED.start(), *REMEMBERED.end());
    let load = || {
        let mut program = EbpfLoader::new()
            .btf(Some(&btf))
            .map_max_entries("WATCHED_TGIDS", MOST_WATCHED)
            .map_max_entries("KNOWN", remembered)
            .load(OBJECT)
            .map_err(|error| unavailable("loading", &error))?;
        iterator(&mut program)
            .and_then(|iterator| iterator.load("task", &btf))
            .map_err(|error| unavailable("verifying", &error))?;
        Ok(program)
    };
    match load() {
        // Before Linux 5.11 maps count as locked memory, and EPERM is said if there is too much of it.
        Err(ScanUnavailable::NotPermitted { .. })
            if setrlimit(Resource::RLIMIT_MEMLOCK, RLIM_INFINITY, RLIM_INFINITY).is_ok() =>
        {
            load()
        }
        other => other,
    }
}

fn iterator(program: &mut Ebpf) -> Result<&mut Iter, ProgramError> {
    program.program_mut("scan").ok_or(ProgramError::UnexpectedProgramType)?.try_into()
}

fn take_map(program: &mut Ebpf, name: &'static str) -> Result<aya::maps::Map, ScanUnavailable> {
    program
        .take_map(name)
        .ok_or(ScanUnavailable::Refused { step: name, why: String::from("the object lacks it") })
}

/// What an error of loading means.
fn unavailable(step: &'static str, error: &(dyn Error + 'static)) -> ScanUnavailable {
    let denied = errors(error).filter_map(|error| error.downcast_ref::<io::Error>());
    let denied = denied.filter_map(io::Error::raw_os_error).any(|number| number == libc::EPERM);
    let unknown = errors(error).filter_map(|error| error.downcast_ref::<BtfError>());
    let too_old = unknown.into_iter().any(|error| matches!(error, BtfError::UnknownBtfTypeName { .. }));
    let locked = fs::read_to_string("/sys/kernel/security/lockdown");
    if locked.is_ok_and(|state| state.contains("[confidentiality]")) {
        ScanUnavailable::LockedDown
    } else if too_old {
        let release = nix::sys::utsname::uname().map(|name| name.release().to_string_lossy().into_owned());
        ScanUnavailable::KernelTooOld { release: release.unwrap_or_default() }
    } else if denied {
        ScanUnavailable::NotPermitted { step, why: chain(error) }
    } else {
        refused(step, error)
    }
}

fn refused(step: &'static str, error: &(dyn Error + 'static)) -> ScanUnavailable {
    ScanUnavailable::Refused { step, why: chain(error) }
}

fn stopped(step: &'static str, error: &(dyn Error + 'static)) -> PassError {
    PassError::Kernel { step, why: chain(error) }
}

fn errors<'a>(error: &'a (dyn Error + 'static)) -> impl Iterator<Item = &'a (dyn Error + 'static)> {
    let mut next = Some(error);
    std::iter::from_fn(move || {
        let error = next?;
        next = error.source();
        Some(error)
    })
}

/// An error and its causes, in a line. The verifier says pages; what is wrong stands at their end.
pub(super) fn chain(error: &(dyn Error + 'static)) -> String {
    let mut text = String::new();
    for error in errors(error) {
        let part = error.to_string();
        if !text.contains(&part) {
            text.push_str(if text.is_empty() { "" } else { ": " });
            text.push_str(&part);
        }
    }
    let words: Vec<&str> = text.split_whitespace().collect();
    let (begin, end) = (words.len().min(SAID_AT_FIRST), words.len().saturating_sub(SAID_AT_LAST));
    if begin < end { [&words[..begin], &["…"], &words[end..]].concat().join(" ") } else { words.join(" ") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_verifier_says_is_told_from_both_ends() {
        let words = |count: usize| (0..count).map(|n| n.to_string()).collect::<Vec<_>>().join("\n ");
        let told = chain(&io::Error::other(words(1000)));
        assert!(
            told.starts_with("0 1 2 3 ") && told.contains(" 11 … 940 ") && told.ends_with(" 998 999"),
            "{told}"
        );
        assert_eq!(chain(&io::Error::other(words(30))), words(30).replace('\n', ""));
    }

    #[test]
    fn a_refusal_for_want_of_a_capability_is_told_from_others() {
        let eperm = io::Error::from_raw_os_error(libc::EPERM);
        assert!(matches!(unavailable("loading", &eperm), ScanUnavailable::NotPermitted { .. }));
        let einval = io::Error::from_raw_os_error(libc::EINVAL);
        assert!(matches!(unavailable("loading", &einval), ScanUnavailable::Refused { .. }));
        let unknown = BtfError::UnknownBtfTypeName { type_name: String::from("bpf_iter_task") };
        assert!(matches!(unavailable("verifying", &unknown), ScanUnavailable::KernelTooOld { .. }));
    }

    #[test]
    fn masks_as_long_as_the_longest_are_told_and_compared() {
        let Some(mut scan) = crate::bpf::tests::scan() else { return };
        scan.mask_bytes = MASK_BYTES;
        let us = std::process::id();
        scan.watch(&BTreeSet::from([Pid(us)])).unwrap();
        let ours = pjw_core::process::Tid(nix::unistd::gettid().as_raw().cast_unsigned());
        for mode in [Mode::Watched, Mode::Changed] {
            // Our run time is brought up to date with every tick of the clock, and this loop ends with one.
            crate::bpf::tests::until("we are reported", || {
                let mut told = Vec::new();
                let summary = scan.pass(mode, &mut |task| told.push((task.tid, task.allowed()))).unwrap();
                assert_eq!(summary.reported, told.len() as u64);
                let allowed = told.into_iter().find(|(tid, _)| *tid == ours);
                allowed.map(|(_, allowed)| assert_eq!(allowed, crate::affinity::get(ours).unwrap()))
            });
        }
    }

    #[test]
    fn when_pus_went_off_or_came_back_all_who_are_watched_are_told() {
        let Some(mut scan) = crate::bpf::tests::scan() else { return };
        scan.watch(&BTreeSet::from([Pid(std::process::id())])).unwrap();
        scan.pass(Mode::Watched, &mut |_| {}).unwrap();
        crate::bpf::tests::until("somebody is quiet", || {
            Some(scan.pass(Mode::Changed, &mut |_| {}).unwrap()).filter(|summary| summary.quiet > 0)
        });
        scan.known = Some(CpuSet::from(pjw_core::cpuset::Pu(4711)));
        let summary = scan.pass(Mode::Changed, &mut |_| {}).unwrap();
        assert!(summary.quiet == 0 && summary.reported > 0, "{summary:?}");
        assert_eq!(scan.known, Some(scan.online.set().clone()), "the next pass tells changes again");
    }
}
