//! Resource usage of this process: CPU time by clock_gettime(2), memory by `/proc/self/statm`
//! (proc_pid_statm(5)).

use std::time::Duration;

use nix::time::{ClockId, clock_gettime};
use nix::unistd::{SysconfVar, sysconf};

/// The resource usage of this process: its CPU time and its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ResourceUsage {
    /// The CPU time of this process in user and kernel mode since its start, including the CPU time of ended
    /// threads.
    pub cpu_time: Duration,
    /// The resident set size of this process (its memory in RAM), in bytes.
    pub resident_bytes: u64,
}

/// Returns the CPU time and the resident memory of this process. A value that can't be read is 0.
#[must_use]
pub fn own_resource_usage() -> ResourceUsage {
    let cpu_time = clock_gettime(ClockId::CLOCK_PROCESS_CPUTIME_ID).map_or(Duration::ZERO, Duration::from);
    let page = sysconf(SysconfVar::PAGE_SIZE).ok().flatten().and_then(|size| u64::try_from(size).ok());
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    ResourceUsage { cpu_time, resident_bytes: resident_pages(&statm).unwrap_or(0) * page.unwrap_or(4096) }
}

/// The size of a large block, in bytes. The allocator gives a block of at least this size back to the kernel as soon as
/// the block is freed.
#[cfg(target_env = "gnu")]
const LARGE_BLOCK_BYTES: libc::c_int = 128 * 1024;

/// Makes glibc's memory allocator give more free memory back to the kernel, for as long as this process runs. Must be
/// called while the process has only one thread, because mallopt(3) is not thread-safe. Has no effect with other C
/// libraries. This function changes three settings:
///
/// - `M_MMAP_THRESHOLD`: The allocator gives a block of at least 128 KiB back to the kernel as soon as the block is
///   freed. By default, glibc raises this size whenever a larger block is freed. Smaller blocks then stay in the
///   process.
/// - `M_TRIM_THRESHOLD`: The allocator gives the free memory at the end of the heap back to the kernel when it exceeds
///   256 KiB.
/// - `M_ARENA_MAX`: All threads share one heap.
pub fn limit_allocator_cache() {
    #[cfg(target_env = "gnu")]
    // SAFETY: mallopt(3) takes two numbers, and no other thread is in the allocator yet.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES);
        libc::mallopt(libc::M_TRIM_THRESHOLD, 2 * LARGE_BLOCK_BYTES);
        // One arena: only the main loop allocates much.
        libc::mallopt(libc::M_ARENA_MAX, 1);
    }
}

/// Gives the free memory of glibc's memory allocator back to the kernel (malloc_trim(3)). Has no effect with other C
/// libraries.
pub fn trim_heap() {
    #[cfg(target_env = "gnu")]
    // SAFETY: malloc_trim(3) may be called at any time, by any thread. It does not move memory in use.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// The number of resident pages: the second field.
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
    fn cpu_time_grows_with_work() {
        let before = own_resource_usage();
        assert!(before.resident_bytes > 0);
        let mut sum = 0_u64;
        while own_resource_usage().cpu_time < before.cpu_time + Duration::from_millis(20) {
            sum = std::hint::black_box(sum.wrapping_add(1));
        }
        assert!(own_resource_usage().cpu_time > before.cpu_time);
    }
}
