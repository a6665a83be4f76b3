//! What this process itself costs: CPU time by getrusage(2), memory by `/proc/self/statm` (proc_pid_statm(5)).

use std::time::Duration;

use nix::sys::resource::{UsageWho, getrusage};
use nix::unistd::{SysconfVar, sysconf};

/// What this process has used so far, and holds now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct OwnCost {
    /// CPU time of all its threads, those that ended too, in user and kernel mode.
    pub cpu: Duration,
    /// Resident memory in bytes.
    pub resident_bytes: u64,
}

/// Reads it; what the kernel does not tell is 0.
#[must_use]
pub fn own_cost() -> OwnCost {
    let part = |seconds: i64, micros: i64| {
        let micros = u64::try_from(micros).unwrap_or(0);
        Duration::from_secs(u64::try_from(seconds).unwrap_or(0)) + Duration::from_micros(micros)
    };
    let cpu = getrusage(UsageWho::RUSAGE_SELF).map_or(Duration::ZERO, |usage| {
        let (user, system) = (usage.user_time(), usage.system_time());
        part(user.tv_sec(), user.tv_usec()) + part(system.tv_sec(), system.tv_usec())
    });
    let page = sysconf(SysconfVar::PAGE_SIZE).ok().flatten().and_then(|size| u64::try_from(size).ok());
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    OwnCost { cpu, resident_bytes: resident_pages(&statm).unwrap_or(0) * page.unwrap_or(4096) }
}

/// What is larger than this is given back to the kernel at once.
#[cfg(target_env = "gnu")]
const LARGE: libc::c_int = 128 * 1024;

/// Has the allocator (glibc's) give large pieces back at once, for good. By itself it learns from the largest piece that was
/// ever freed to keep all that are smaller, which after one unusual moment is everything. To be called before other threads
/// are started.
pub fn keep_no_memory() {
    #[cfg(target_env = "gnu")]
    // SAFETY: mallopt(3) takes two numbers, and no other thread is in the allocator yet.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, LARGE);
        libc::mallopt(libc::M_TRIM_THRESHOLD, 2 * LARGE);
        // One arena: only the loop allocates much.
        libc::mallopt(libc::M_ARENA_MAX, 1);
    }
}

/// Gives memory that was needed for a while back to the kernel, where the allocator would keep it (glibc's).
pub fn give_memory_back() {
    #[cfg(target_env = "gnu")]
    // SAFETY: malloc_trim(3) may be called at any time, by any thread; what is in use stays where it is.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// The second field: resident pages.
fn resident_pages(statm: &str) -> Option<u64> {
    statm.split_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_resident_pages_are_the_second_field() {
        assert_eq!(resident_pages("2541 702 581 20 0 412 0\n"), Some(702));
        for odd in ["", "2541", "2541 x", "2541 -1"] {
            assert_eq!(resident_pages(odd), None, "{odd:?}");
        }
    }

    #[test]
    fn whoever_computes_is_charged_for_it() {
        let before = own_cost();
        assert!(before.resident_bytes > 0);
        let mut sum = 0_u64;
        while own_cost().cpu < before.cpu + Duration::from_millis(20) {
            sum = std::hint::black_box(sum.wrapping_add(1));
        }
        assert!(own_cost().cpu > before.cpu);
    }
}
