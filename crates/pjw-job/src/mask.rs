//! The cores of a program without a core map: those of the affinity mask of the calling thread.

use pjw_core::cpuset::{CpuSet, Pu};

/// The largest mask that is tried, in bytes. The kernel refuses a buffer that is smaller than its own masks.
const MAX_MASK_BYTES: usize = 8192;

/// Returns the affinity mask of the calling thread. Returns an empty set if sched_getaffinity(2) fails.
pub(crate) fn own_mask() -> CpuSet {
    let mut words = vec![0_u64; 128 / 8];
    loop {
        let bytes = words.len() * 8;
        // SAFETY: the buffer has room for `bytes` bytes. The kernel writes at most as many.
        let written = unsafe { libc::syscall(libc::SYS_sched_getaffinity, 0, bytes, words.as_mut_ptr()) };
        if let Ok(written) = usize::try_from(written) {
            return CpuSet::from_words(&words[..written.div_ceil(8).min(words.len())]);
        }
        if bytes >= MAX_MASK_BYTES {
            return CpuSet::new();
        }
        words.resize(words.len() * 2, 0);
    }
}

/// Returns the number of physical cores that have at least one CPU in `cpus`. /sys says which CPUs belong to the same
/// core. A CPU that /sys does not describe counts as a core of its own.
pub(crate) fn core_count(cpus: &CpuSet) -> u32 {
    let mut uncounted = cpus.clone();
    let mut cores = 0;
    while let Some(cpu) = uncounted.first() {
        cores += 1;
        uncounted.remove(cpu);
        uncounted = uncounted.difference(&siblings(cpu));
    }
    cores
}

/// Returns the CPUs of the core to which `cpu` belongs. Only `cpu` if /sys does not describe the core.
fn siblings(cpu: Pu) -> CpuSet {
    let path = format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
    let list = std::fs::read_to_string(path).ok().and_then(|list| list.trim().parse().ok());
    list.unwrap_or_else(|| CpuSet::from_iter([cpu]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mask_of_the_caller_is_that_of_the_status_file() {
        let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
        let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap();
        let mask = own_mask();
        assert_eq!(mask, list.trim().parse().unwrap());
        assert!(core_count(&mask) >= 1 && core_count(&mask) as usize <= mask.len());
    }
}
