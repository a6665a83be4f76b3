//! Loads the object files that contain the BPF programs, and classifies errors.

use std::error::Error;
use std::{fs, io};

use aya::maps::Map;
use aya::{Btf, BtfError, Ebpf, EbpfLoader};
use nix::sys::resource::{RLIM_INFINITY, Resource, setrlimit};

use super::fault::{BpfStepError, TaskScanError, TaskScanUnavailable};
use super::record::MASK_BYTES;
use crate::sys::{online, version};

/// Compiled from `tasks.bpf.c` by `make bpf`. A test compares the checksums of both files.
const OBJECT: &[u8] = aya::include_bytes_aligned!("tasks.bpf.o");
/// `PROC_PID_INIT_INO` of the kernel's `include/linux/proc_ns.h`.
const FIRST_PID_NAMESPACE: &str = "pid:[4026531836]";
/// Capability numbers of `include/uapi/linux/capability.h`.
const CAP_SYS_ADMIN: u32 = 21;
const CAP_PERFMON: u32 = 38;
const CAP_BPF: u32 = 39;
/// The maximum number of attempts to load a program, as in libbpf.
const LOAD_ATTEMPTS: usize = 5;
/// The number of words that are kept at the beginning of a long error.
const FIRST_WORDS: usize = 12;
/// The number of words that are kept at the end of a long error.
const LAST_WORDS: usize = 60;

/// The facts about the running kernel that pjw needs to load its BPF programs: the type information of the kernel
/// (BTF), and the size of an affinity mask. [`BpfPlatform::detect`] determines them.
#[derive(Debug)]
pub(super) struct BpfPlatform {
    /// The kernel's BTF type information, some megabytes.
    pub(super) btf: Btf,
    /// One loader for all object files: each new loader parses the kernel's type information again, which takes some
    /// 50 ms.
    loader: EbpfLoader<'static>,
    /// The size of the affinity mask in a record of the BPF programs, in bytes.
    pub(super) mask_bytes: usize,
}

impl BpfPlatform {
    /// Checks whether this process can load BPF programs into the running kernel, and returns the facts about the
    /// kernel that loading needs.
    ///
    /// # Errors
    /// The first requirement that is missing, for example the capability `CAP_BPF` or the type information of the
    /// kernel (BTF).
    pub(super) fn detect() -> Result<Self, TaskScanUnavailable> {
        if cfg!(target_endian = "big") {
            return Err(TaskScanUnavailable::BigEndian);
        }
        let namespace =
            fs::read_link("/proc/self/ns/pid").map_err(|error| refusal_error("/proc/self/ns/pid", &error))?;
        if namespace.as_os_str() != FIRST_PID_NAMESPACE {
            return Err(TaskScanUnavailable::PidNamespace);
        }
        // Without the capabilities, the following steps would take 200 ms and fail.
        if fs::read_to_string("/proc/self/status").is_ok_and(|status| !may_load(&status)) {
            let cause = String::from("this process lacks CAP_BPF or CAP_PERFMON");
            return Err(TaskScanUnavailable::NotPermitted(BpfStepError { step: "capabilities", cause }));
        }
        let possible =
            online::possible_pu_count().map_err(|error| refusal_error("the possible PUs", &error))?;
        let mask_bytes = possible.div_ceil(64) as usize * 8;
        if mask_bytes > MASK_BYTES {
            return Err(TaskScanUnavailable::TooManyPus(possible));
        }
        let btf = Btf::from_sys_fs().map_err(|error| TaskScanUnavailable::NoBtf(error_chain_text(&error)))?;
        Ok(Self { btf, loader: EbpfLoader::new(), mask_bytes })
    }

    /// Loads the object file with the BPF programs of the task scan and the affinity monitor. `watched` is the maximum
    /// number of processes whose threads a task scan can report. `verify` must load one program of the object file into
    /// the kernel, which verifies the program.
    ///
    /// # Errors
    /// The error of `verify`, or the reason why the object file can't be loaded.
    pub(super) fn load(
        &mut self,
        watched: u32,
        verify: impl Fn(&mut Ebpf, &Btf) -> Result<(), TaskScanUnavailable>,
    ) -> Result<Ebpf, TaskScanUnavailable> {
        self.load_object(OBJECT, ("WATCHED_TGIDS", watched), verify)
    }

    /// Parses `file`, the content of an object file with BPF programs, and creates its BPF maps in the kernel. `map` is
    /// the name of one of these maps, and `entries` is the maximum number of entries that it gets. Returns the loaded
    /// object. No program is attached yet.
    ///
    /// `verify` must load one program of the object into the kernel. So an error shows at once that the kernel refuses
    /// the program. If the kernel refuses a step with `EPERM`, the function removes the limit of this process for
    /// locked memory (`RLIMIT_MEMLOCK`) and repeats all steps once. Kernels before Linux 5.11 need this.
    ///
    /// # Errors
    /// The error of `verify`, or the reason why the object file can't be loaded.
    pub(super) fn load_object(
        &mut self,
        file: &[u8],
        (map, entries): (&'static str, u32),
        verify: impl Fn(&mut Ebpf, &Btf) -> Result<(), TaskScanUnavailable>,
    ) -> Result<Ebpf, TaskScanUnavailable> {
        let mut load = || {
            let loader = self.loader.map_max_entries(map, entries);
            let mut object = loader.load(file).map_err(|error| unavailable_reason("loading", &error))?;
            verify(&mut object, &self.btf)?;
            Ok(object)
        };
        match load() {
            // Before Linux 5.11 maps count as locked memory, and the kernel returns EPERM above the limit.
            Err(TaskScanUnavailable::NotPermitted(_))
                if setrlimit(Resource::RLIMIT_MEMLOCK, RLIM_INFINITY, RLIM_INFINITY).is_ok() =>
            {
                load()
            }
            other => other,
        }
    }
}

/// Whether a process with this `/proc/PID/status` file (proc_pid_status(5)) has the capabilities to load BPF programs
/// (capabilities(7)). True if the file has no valid line `CapEff`.
fn may_load(status: &str) -> bool {
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let Some(effective) = effective.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok()) else {
        return true;
    };
    let has = |capability: u32| effective >> capability & 1 == 1;
    has(CAP_SYS_ADMIN) || (has(CAP_BPF) && has(CAP_PERFMON))
}

/// Removes the BPF map with the name `name` from `object`, a loaded object file, and returns the map.
///
/// # Errors
/// If the object file has no map with this name.
pub(super) fn take_map(object: &mut Ebpf, name: &'static str) -> Result<Map, TaskScanUnavailable> {
    object.take_map(name).ok_or_else(|| refusal_error(name, &io::Error::other("the object has no such map")))
}

/// Calls `load`, which must load a BPF program into the kernel with the system call `bpf(BPF_PROG_LOAD)`. If a signal
/// interrupts this system call, it fails with `EAGAIN`. Then `load` is called again, at most 5 times in total.
///
/// # Errors
/// The error of the last call of `load`.
pub(super) fn load_program<E: Error + 'static>(mut load: impl FnMut() -> Result<(), E>) -> Result<(), E> {
    for _ in 1..LOAD_ATTEMPTS {
        match load() {
            Err(error) if has_errno(&error, libc::EAGAIN) => {}
            loaded => return loaded,
        }
    }
    load()
}

fn has_errno(error: &(dyn Error + 'static), errno: i32) -> bool {
    let mut causes = error_chain(error).filter_map(|error| error.downcast_ref::<io::Error>());
    causes.any(|error| error.raw_os_error() == Some(errno))
}

/// Returns the reason why the BPF programs can't be used, after a step of loading them failed. `step` is the name of
/// the step, such as `attaching`, and `error` is its error. The reason is, for example, a missing permission or a
/// kernel that is too old.
pub(super) fn unavailable_reason(step: &'static str, error: &(dyn Error + 'static)) -> TaskScanUnavailable {
    let mut btf_errors = error_chain(error).filter_map(|error| error.downcast_ref::<BtfError>());
    let is_too_old = btf_errors.any(|error| matches!(error, BtfError::UnknownBtfTypeName { .. }));
    let lockdown = fs::read_to_string("/sys/kernel/security/lockdown");
    if lockdown.is_ok_and(|state| state.contains("[confidentiality]")) {
        TaskScanUnavailable::LockedDown
    } else if is_too_old {
        TaskScanUnavailable::KernelTooOld(version::kernel_release())
    } else if has_errno(error, libc::EPERM) {
        TaskScanUnavailable::NotPermitted(step_error(step, error))
    } else {
        refusal_error(step, error)
    }
}

/// Returns [`TaskScanUnavailable::Refused`]: the kernel refused a step of loading the BPF programs. `step` is the
/// name of the step, and `error` is its error.
pub(super) fn refusal_error(step: &'static str, error: &(dyn Error + 'static)) -> TaskScanUnavailable {
    TaskScanUnavailable::Refused(step_error(step, error))
}

/// Returns [`TaskScanError::Kernel`]: a step of running a loaded BPF program failed. `step` is the name of the step,
/// and `error` is its error.
pub(super) fn scan_error(step: &'static str, error: &(dyn Error + 'static)) -> TaskScanError {
    TaskScanError::Kernel(step_error(step, error))
}

fn step_error(step: &'static str, error: &(dyn Error + 'static)) -> BpfStepError {
    BpfStepError { step, cause: error_chain_text(error) }
}

/// Iterates over `error`, its cause, the cause of that cause, and so on.
fn error_chain<'a>(error: &'a (dyn Error + 'static)) -> impl Iterator<Item = &'a (dyn Error + 'static)> {
    let mut next = Some(error);
    std::iter::from_fn(move || {
        let error = next?;
        next = error.source();
        Some(error)
    })
}

/// Returns the messages of `error` and of its causes as one line of text. A text of more than 72 words is shortened:
/// only the first 12 and the last 60 words are kept. An error of the kernel's BPF verifier contains a long log, and
/// the cause is at the end of the log.
pub(super) fn error_chain_text(error: &(dyn Error + 'static)) -> String {
    let mut text = String::new();
    for error in error_chain(error) {
        let part = error.to_string();
        if !text.contains(&part) {
            text.push_str(if text.is_empty() { "" } else { ": " });
            text.push_str(&part);
        }
    }
    let words: Vec<&str> = text.split_whitespace().collect();
    let (begin, end) = (words.len().min(FIRST_WORDS), words.len().saturating_sub(LAST_WORDS));
    if begin < end { [&words[..begin], &["…"], &words[end..]].concat().join(" ") } else { words.join(" ") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_verifier_log_is_cut_in_the_middle() {
        let words = |count: usize| (0..count).map(|n| n.to_string()).collect::<Vec<_>>().join("\n ");
        let shown = error_chain_text(&io::Error::other(words(1000)));
        assert!(
            shown.starts_with("0 1 2 3 ") && shown.contains(" 11 … 940 ") && shown.ends_with(" 998 999"),
            "{shown}"
        );
        assert_eq!(error_chain_text(&io::Error::other(words(30))), words(30).replace('\n', ""));
    }

    #[test]
    fn an_interrupted_load_is_attempted_at_most_five_times() {
        let attempts = |interruptions: usize, errno: i32| {
            let mut attempts = 0;
            let loaded = load_program(|| {
                attempts += 1;
                if attempts > interruptions {
                    return Ok(());
                }
                Err(io::Error::from_raw_os_error(errno))
            });
            (attempts, loaded.is_ok())
        };
        assert_eq!([0, 1, 4].map(|count| attempts(count, libc::EAGAIN)), [(1, true), (2, true), (5, true)]);
        assert_eq!(attempts(usize::MAX, libc::EAGAIN), (LOAD_ATTEMPTS, false));
        assert_eq!(attempts(usize::MAX, libc::EPERM), (1, false));
    }

    #[test]
    fn missing_capabilities_are_found_in_the_status() {
        let may = |bits: u64| may_load(&format!("Name:\tpjwd\nCapPrm:\t0\nCapEff:\t{bits:016x}\n"));
        assert_eq!([0, 1 << 39, 1 << 38].map(may), [false; 3]);
        assert_eq!([1 << 21, 3 << 38, u64::MAX].map(may), [true; 3]);
        assert!(may_load("Name:\tpjwd\n"), "without this line, loading is tried");
    }

    #[test]
    fn missing_capabilities_differ_from_other_errors() {
        let eperm = io::Error::from_raw_os_error(libc::EPERM);
        assert!(matches!(unavailable_reason("loading", &eperm), TaskScanUnavailable::NotPermitted { .. }));
        let einval = io::Error::from_raw_os_error(libc::EINVAL);
        assert!(matches!(unavailable_reason("loading", &einval), TaskScanUnavailable::Refused { .. }));
        let unknown = BtfError::UnknownBtfTypeName { type_name: String::from("bpf_iter_task") };
        assert!(matches!(
            unavailable_reason("verifying", &unknown),
            TaskScanUnavailable::KernelTooOld { .. }
        ));
    }
}
