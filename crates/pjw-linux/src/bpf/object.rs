//! The object that both programs are in: whether this machine is one for it, loading it, and what its errors mean.

use std::error::Error;
use std::{fs, io};

use aya::maps::Map;
use aya::{Btf, BtfError, Ebpf, EbpfLoader};
use nix::sys::resource::{RLIM_INFINITY, Resource, setrlimit};

use super::record::MASK_BYTES;
use super::{PassError, ScanUnavailable};
use crate::online;

/// Made of `tasks.bpf.c` by `make bpf`; a test tells if one of the two is not the other's.
const OBJECT: &[u8] = aya::include_bytes_aligned!("tasks.bpf.o");
/// `PROC_PID_INIT_INO` of the kernel's `include/linux/proc_ns.h`.
const FIRST_PID_NAMESPACE: &str = "pid:[4026531836]";
/// Numbers of `include/uapi/linux/capability.h`.
const CAP_SYS_ADMIN: u32 = 21;
const CAP_PERFMON: u32 = 38;
const CAP_BPF: u32 = 39;
/// Words of an error that are told, if it is longer.
const SAID_AT_FIRST: usize = 12;
const SAID_AT_LAST: usize = 60;

/// A machine that the object's programs are for.
#[derive(Debug)]
pub(super) struct Ground {
    /// The kernel's description of its types: megabytes.
    pub(super) btf: Btf,
    /// How long a mask is in a record.
    pub(super) mask_bytes: usize,
}

impl Ground {
    pub(super) fn find() -> Result<Self, ScanUnavailable> {
        if cfg!(target_endian = "big") {
            return Err(ScanUnavailable::BigEndian);
        }
        let namespace =
            fs::read_link("/proc/self/ns/pid").map_err(|error| refused("/proc/self/ns/pid", &error))?;
        if namespace.as_os_str() != FIRST_PID_NAMESPACE {
            return Err(ScanUnavailable::PidNamespace);
        }
        // What follows takes a plain user's daemon a fifth of a second, in vain.
        if fs::read_to_string("/proc/self/status").is_ok_and(|status| !may_load(&status)) {
            let why = String::from("this program lacks CAP_BPF or CAP_PERFMON");
            return Err(ScanUnavailable::NotPermitted { step: "capabilities", why });
        }
        let possible = online::possible().map_err(|error| refused("the possible PUs", &error))?;
        let mask_bytes = possible.div_ceil(64) as usize * 8;
        if mask_bytes > MASK_BYTES {
            return Err(ScanUnavailable::TooManyPus { possible });
        }
        let btf = Btf::from_sys_fs().map_err(|error| ScanUnavailable::NoBtf { why: chain(&error) })?;
        Ok(Self { btf, mask_bytes })
    }

    /// Loads the object with room for so many watched processes, and has the kernel verify a program of it.
    pub(super) fn load(
        &self,
        watched: u32,
        verify: impl Fn(&mut Ebpf, &Btf) -> Result<(), ScanUnavailable>,
    ) -> Result<Ebpf, ScanUnavailable> {
        let load = || {
            let mut object = EbpfLoader::new()
                .btf(Some(&self.btf))
                .map_max_entries("WATCHED_TGIDS", watched)
                .load(OBJECT)
                .map_err(|error| unavailable("loading", &error))?;
            verify(&mut object, &self.btf)?;
            Ok(object)
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
}

/// Whether the status of a process tells of the capabilities that it takes, or may: capabilities(7), proc_pid_status(5).
fn may_load(status: &str) -> bool {
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let Some(effective) = effective.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok()) else {
        return true;
    };
    let has = |capability: u32| effective >> capability & 1 == 1;
    has(CAP_SYS_ADMIN) || (has(CAP_BPF) && has(CAP_PERFMON))
}

pub(super) fn take_map(program: &mut Ebpf, name: &'static str) -> Result<Map, ScanUnavailable> {
    program
        .take_map(name)
        .ok_or(ScanUnavailable::Refused { step: name, why: String::from("the object lacks it") })
}

/// What an error of loading means.
pub(super) fn unavailable(step: &'static str, error: &(dyn Error + 'static)) -> ScanUnavailable {
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

pub(super) fn refused(step: &'static str, error: &(dyn Error + 'static)) -> ScanUnavailable {
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
    fn whoever_lacks_the_capabilities_need_not_try() {
        let may = |bits: u64| may_load(&format!("Name:\tpjwd\nCapPrm:\t0\nCapEff:\t{bits:016x}\n"));
        assert_eq!([0, 1 << 39, 1 << 38].map(may), [false; 3]);
        assert_eq!([1 << 21, 3 << 38, u64::MAX].map(may), [true; 3]);
        assert!(may_load("Name:\tpjwd\n"), "a kernel that doesn't say is asked");
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
}
