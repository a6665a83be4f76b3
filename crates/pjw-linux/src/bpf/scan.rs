//! The program in the kernel: loaded, told what to report, read.

use std::error::Error;
use std::fs::{self, File};
use std::io::{self, Read};

use aya::maps::{Array, MapData};
use aya::programs::{Iter, ProgramError};
use aya::{Btf, BtfError, Ebpf, EbpfLoader};
use nix::sys::resource::{RLIM_INFINITY, Resource, setrlimit};

use super::record::{self, MASK_BYTES};
use super::watched::Watched;
use super::{MOST_WATCHED, PassError, PassSummary, ScanUnavailable, TaskRecord, Whom, self_check};
use crate::online::{self, Online};

/// Made of `tasks.bpf.c` by `make bpf`; a test tells if one of the two is not the other's.
const OBJECT: &[u8] = aya::include_bytes_aligned!("tasks.bpf.o");
/// `PROC_PID_INIT_INO` of the kernel's `include/linux/proc_ns.h`.
const FIRST_PID_NAMESPACE: &str = "pid:[4026531836]";
/// Twice what the kernel keeps of an iterator's output.
const BUFFER_BYTES: usize = 65_536;
/// Words of an error that are told, if it is longer.
const SAID_AT_FIRST: usize = 12;
const SAID_AT_LAST: usize = 60;

/// `struct pass` of `tasks.bpf.c`: mode, bytes of a mask; tasks that were reported, and that were passed over.
type PassValue = [u64; 4];

/// A program in the kernel that tells of every task: see the [module](super). Dropping it removes it.
pub struct TaskScan {
    program: Ebpf,
    pass: Array<MapData, PassValue>,
    watched: Watched,
    mask_bytes: usize,
    online: Online,
    buffer: Vec<u8>,
    words: Vec<u64>,
}

impl std::fmt::Debug for TaskScan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TaskScan").field("watched", &self.watched).finish_non_exhaustive()
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
        let mut program = load_program()?;
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
            buffer: vec![0; BUFFER_BYTES],
            words: Vec::new(),
        };
        self_check::run(&mut scan)?;
        Ok(scan)
    }

    /// Has the kernel walk its tasks, and calls `each` for those that were asked for, by rising thread number.
    ///
    /// A pass is no snapshot: tasks are born and die meanwhile, and those born late may be missed.
    ///
    /// # Errors
    /// If the kernel refuses to go on.
    pub fn pass(
        &mut self,
        whom: Whom<'_>,
        each: &mut impl FnMut(TaskRecord<'_>),
    ) -> Result<PassSummary, PassError> {
        self.online.read().map_err(|error| stopped("the online PUs", &error))?;
        let (mode, processes) = match whom {
            Whom::Everybody(processes) => (0, processes),
            Whom::These(processes) => (1, processes),
        };
        self.watched.set(processes)?;
        let order = [mode, self.mask_bytes as u64, 0, 0];
        self.pass.set(0, order, 0).map_err(|error| stopped("beginning", &error))?;
        let file = self.open().map_err(|error| stopped("opening", &error))?;
        self.read(file, each)?;
        let [_, _, reported, passed_over] =
            self.pass.get(&0, 0).map_err(|error| stopped("ending", &error))?;
        Ok(PassSummary { reported, passed_over })
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
                record::decode_mask(record.mask, self.online.set().words(), &mut self.words);
                each(TaskRecord { allowed_words: &self.words, ..record.task });
            }
            // The kernel ends a read with a whole record, unless the buffer is too short.
            let left = rest.len();
            self.buffer.copy_within(filled - left..filled, 0);
            filled = left;
        }
    }
}

fn load_program() -> Result<Ebpf, ScanUnavailable> {
    let btf = Btf::from_sys_fs().map_err(|error| ScanUnavailable::NoBtf { why: chain(&error) })?;
    let load = || {
        let mut program = EbpfLoader::new()
            .btf(Some(&btf))
            .map_max_entries("WATCHED_TGIDS", MOST_WATCHED)
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

pub(super) fn stopped(step: &'static str, error: &(dyn Error + 'static)) -> PassError {
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
    use std::collections::BTreeSet;

    use pjw_core::process::Pid;

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
        let us = BTreeSet::from([Pid(std::process::id())]);
        let ours = pjw_core::process::Tid(nix::unistd::gettid().as_raw().cast_unsigned());
        let mut told = Vec::new();
        let summary = scan.pass(Whom::These(&us), &mut |task| told.push((task.tid, task.allowed()))).unwrap();
        assert_eq!(summary.reported, told.len() as u64);
        let allowed = told.into_iter().find(|(tid, _)| *tid == ours).unwrap().1;
        assert_eq!(allowed, crate::affinity::get(ours).unwrap());
    }
}
