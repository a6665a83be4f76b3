//! How much memory a process uses: `/proc/PID/smaps_rollup`, `statm`, `status` and `numa_maps`, proc(5).
//!
//! `smaps_rollup` walks the page tables of the process, at 20 to 35 us per MiB, and holds `mmap_lock` for reading
//! meanwhile (fs/proc/task_mmu.c, Linux 6.18). `statm` and `status` are counters, which the kernel keeps anyway.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;

use nix::errno::Errno;
use pjw_core::ids::Pid;
use rustix::fs::OFlags;

use super::procfs::ProcDir;
use crate::sys::errno::from_io;

/// The largest file that is read, in bytes. A process may have as many mappings as `vm.max_map_count`, 65,530
/// by default.
const MAX_NUMA_MAPS_BYTES: u64 = 32 << 20;

/// The memory use of a process, as the file `/proc/PID/smaps_rollup` shows it: how much memory is resident, how
/// much of the resident memory no other process shares, and how much memory is swapped out. All sizes are in
/// bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ProcessMemoryUse {
    /// The resident set size: all pages in memory that the process maps.
    pub rss: u64,
    /// The proportional set size: each page divided by the number of address spaces that map it.
    pub pss: u64,
    /// The unique set size: the pages that no other address space maps.
    pub uss: u64,
    /// The memory that is swapped out.
    pub swap: u64,
}

/// The memory use of a process, as the file `/proc/PID/status` shows it: the resident memory, the anonymous
/// part of the resident memory, the huge pages of hugetlbfs, the page tables, and the swapped-out memory. The kernel
/// maintains these values as counters, so that reading them is fast. All sizes are in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ProcessMemoryCounters {
    /// The resident set size: all pages in memory that the process maps, except the huge pages of hugetlbfs.
    pub rss: u64,
    /// The part of `rss` that is anonymous memory: heap, stack, and changed pages of private mappings.
    pub anonymous: u64,
    /// The huge pages of hugetlbfs that the process uses: by `MAP_HUGETLB` of mmap(2), or by files of a hugetlbfs.
    /// They are in neither `rss` nor `anonymous`.
    pub huge_pages: u64,
    /// The size of the page tables.
    pub page_tables: u64,
    /// The anonymous memory that is swapped out.
    pub swap: u64,
}

impl ProcDir {
    /// Reads from `/proc/PID/smaps_rollup` how much memory the process `pid` uses, and how much of this memory
    /// no other process shares. The kernel takes 20 to 35 us per MiB of resident memory. All sizes are 0 for a
    /// process without memory of its own, such as a zombie.
    ///
    /// # Errors
    /// `ENOENT` or `ESRCH` if the process has ended. `EACCES` if this user has no permission to read the file.
    /// `EIO` if the text is malformed.
    pub fn read_memory_use(&mut self, pid: Pid) -> Result<ProcessMemoryUse, Errno> {
        match self.read_single_open_file(format_args!("{pid}/smaps_rollup")) {
            Ok(()) => parse_smaps_rollup(self.text()).ok_or(Errno::EIO),
            Err(Errno::ESRCH) if self.stat(pid).is_ok() => Ok(ProcessMemoryUse::default()),
            Err(errno) => Err(errno),
        }
    }

    /// Reads from `/proc/PID/status` how much memory the process `pid` uses. Much faster than
    /// [`ProcDir::read_memory_use`], but does not read how much of the memory is shared with other processes.
    /// All sizes are 0 for a process without memory of its own, such as a zombie or a kernel thread.
    ///
    /// # Errors
    /// `ENOENT` or `ESRCH` if the process has ended.
    pub fn read_memory_counters(&mut self, pid: Pid) -> Result<ProcessMemoryCounters, Errno> {
        self.read_single_open_file(format_args!("{pid}/status"))?;
        Ok(parse_memory_counters(self.text()))
    }

    /// Reads from `/proc/PID/numa_maps` how much memory the process `pid` uses on each NUMA node. Returns the size in
    /// bytes by the number of the node. The time of this call grows with the size of the process, because the kernel
    /// walks the page tables of the process. Reads at most the first 32 MiB of the file. The memory of later mappings
    /// is left out.
    ///
    /// # Errors
    /// `ENOENT` or `ESRCH` if the process has ended, or if the kernel has no file `numa_maps` (`CONFIG_NUMA`). `EACCES`
    /// if this user has no permission to read the file.
    pub fn read_memory_by_numa_node(&mut self, pid: Pid) -> Result<BTreeMap<u32, u64>, Errno> {
        let file = File::from(self.open_at(format_args!("{pid}/numa_maps"), OFlags::empty())?);
        let mut text = Vec::new();
        file.take(MAX_NUMA_MAPS_BYTES).read_to_end(&mut text).map_err(from_io)?;
        Ok(parse_numa_maps(&text))
    }

    /// Reads how much memory programs can still allocate on this machine without swapping, in bytes. This is
    /// the value `MemAvailable` in `/proc/meminfo`.
    ///
    /// # Errors
    /// The error of reading `/proc/meminfo`. `EIO` if the value `MemAvailable` is missing.
    pub fn available_memory(&mut self) -> Result<u64, Errno> {
        self.read_single_open_file(format_args!("meminfo"))?;
        kilobytes(self.text(), "MemAvailable:").ok_or(Errno::EIO)
    }
}

/// Parses `smaps_rollup_text`, the content of `/proc/PID/smaps_rollup`, and returns the memory use of the
/// process. Returns `None` if the text is malformed.
#[must_use]
pub fn parse_smaps_rollup(smaps_rollup_text: &[u8]) -> Option<ProcessMemoryUse> {
    let field = |name| kilobytes(smaps_rollup_text, name);
    Some(ProcessMemoryUse {
        rss: field("Rss:")?,
        pss: field("Pss:")?,
        uss: field("Private_Clean:")?.saturating_add(field("Private_Dirty:")?),
        swap: field("Swap:").unwrap_or(0),
    })
}

/// Parses `status_text`, the content of `/proc/PID/status`, and returns its values about memory. A value that
/// is missing or malformed is 0. All values are missing for a process without memory, such as a kernel thread
/// or a zombie.
#[must_use]
pub fn parse_memory_counters(status_text: &[u8]) -> ProcessMemoryCounters {
    let field = |name| kilobytes(status_text, name).unwrap_or(0);
    ProcessMemoryCounters {
        rss: field("VmRSS:"),
        anonymous: field("RssAnon:"),
        huge_pages: field("HugetlbPages:"),
        page_tables: field("VmPTE:"),
        swap: field("VmSwap:"),
    }
}

/// Parses `numa_maps_text`, the content of `/proc/PID/numa_maps` (numa(7)). Returns for each NUMA node how much
/// memory the process has on the node, in bytes. Malformed words are skipped.
#[must_use]
pub fn parse_numa_maps(numa_maps_text: &[u8]) -> BTreeMap<u32, u64> {
    let mut bytes_by_node = BTreeMap::new();
    for line in numa_maps_text.split(|&byte| byte == b'\n') {
        // The name of a file can contain anything except spaces and newlines, which the kernel escapes.
        let words = || line.split(|&byte| byte == b' ').filter_map(|word| std::str::from_utf8(word).ok());
        let page_size = words().filter_map(|word| word.strip_prefix("kernelpagesize_kB=")).next_back();
        let page_size = page_size.and_then(|size| size.parse::<u64>().ok()).unwrap_or(4);
        for word in words().skip(2) {
            let Some((node, pages)) = word.strip_prefix('N').and_then(|word| word.split_once('=')) else {
                continue;
            };
            let (Ok(node), Ok(pages)) = (node.parse::<u32>(), pages.parse::<u64>()) else { continue };
            let bytes: &mut u64 = bytes_by_node.entry(node).or_default();
            *bytes = bytes.saturating_add(pages.saturating_mul(page_size).saturating_mul(1024));
        }
    }
    bytes_by_node
}

/// The value of a line such as `Rss:   12 kB`, in bytes.
fn kilobytes(text: &[u8], name: &str) -> Option<u64> {
    let line = text.split(|&byte| byte == b'\n').find_map(|line| line.strip_prefix(name.as_bytes()))?;
    let number = std::str::from_utf8(line).ok()?.split_ascii_whitespace().next()?.parse::<u64>().ok()?;
    number.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    const ROLLUP: &str = "55d0c0a0e000-7ffd3a5f0000 ---p 00000000 00:00 0                    [rollup]\n\
        Rss:              317440 kB\nPss:               65536 kB\nPss_Dirty:         64000 kB\nPss_Anon:          63000 kB\n\
        Shared_Clean:       2048 kB\nShared_Dirty:     310272 kB\nPrivate_Clean:        20 kB\nPrivate_Dirty:      5100 kB\n\
        Referenced:       317440 kB\nAnonymous:        315392 kB\nSwap:                 12 kB\nSwapPss:               4 kB\n";

    #[test]
    fn a_rollup_is_read_in_bytes() {
        let rollup = parse_smaps_rollup(ROLLUP.as_bytes()).unwrap();
        assert_eq!(
            rollup,
            ProcessMemoryUse { rss: 317_440 << 10, pss: 65_536 << 10, uss: 5_120 << 10, swap: 12 << 10 }
        );
    }

    #[test]
    fn a_truncated_or_malformed_rollup_is_none() {
        let private = ROLLUP.find("Private_Dirty").unwrap();
        for end in 0..private {
            assert_eq!(parse_smaps_rollup(&ROLLUP.as_bytes()[..end]), None, "{end}");
        }
        for number in ["-1", "x", "", "99999999999999999999", "18446744073709551615"] {
            let text = ROLLUP.replace("317440", number);
            assert_eq!(parse_smaps_rollup(text.as_bytes()), None, "{number}");
        }
        assert_eq!(parse_smaps_rollup(&[0xff, 0, b'\n']), None);
    }

    #[test]
    fn counters_are_read_from_status_and_are_zero_without_memory() {
        let text = "Name:\tVmRSS:\\n\nVmRSS:\t  1000 kB\nRssAnon:\t   600 kB\nVmPTE:\t    44 kB\n\
                    VmSwap:\t       8 kB\nHugetlbPages:\t    2048 kB\n";
        let counters = parse_memory_counters(text.as_bytes());
        assert_eq!(
            counters,
            ProcessMemoryCounters {
                rss: 1000 << 10,
                anonymous: 600 << 10,
                huge_pages: 2048 << 10,
                page_tables: 44 << 10,
                swap: 8 << 10
            }
        );
        assert_eq!(
            parse_memory_counters(b"Name:\tkthreadd\nState:\tS (sleeping)\n"),
            ProcessMemoryCounters::default()
        );
    }

    #[test]
    fn pages_are_counted_on_each_node_in_their_own_size() {
        let text = "5581 default file=/usr/bin/N0=7 mapped=5 active=0 N0=3 N1=2 kernelpagesize_kB=4\n\
                    7f00 bind:1 anon=2 dirty=2 N1=2 kernelpagesize_kB=2048\n\
                    7f01 default\n7f02 default N1=x Nx=1 N2 kernelpagesize_kB=4\n";
        let by_node = parse_numa_maps(&[text.as_bytes(), b"\xff\n"].concat());
        assert_eq!(by_node, BTreeMap::from([(0, 3 * 4096), (1, 2 * 4096 + (4 << 20))]));
        assert!(parse_numa_maps(b"").is_empty());
    }

    #[test]
    fn this_process_has_memory_and_an_ended_one_is_gone() {
        let mut proc = ProcDir::open(Path::new("/proc")).unwrap();
        let pid = Pid(std::process::id());
        let (rollup, counters) =
            (proc.read_memory_use(pid).unwrap(), proc.read_memory_counters(pid).unwrap());
        assert!(rollup.uss > 0 && rollup.uss <= rollup.pss && rollup.pss <= rollup.rss, "{rollup:?}");
        assert!(counters.anonymous > 0 && counters.page_tables > 0, "{counters:?}");
        assert!(proc.available_memory().unwrap() > 0);
        match proc.read_memory_by_numa_node(pid) {
            Ok(by_node) => assert!(by_node.values().sum::<u64>() > 0),
            Err(errno) => assert!(!Path::new("/proc/self/numa_maps").exists(), "{errno}"),
        }
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let ended = Pid(child.id());
        child.wait().unwrap();
        assert!(matches!(proc.read_memory_use(ended), Err(Errno::ENOENT | Errno::ESRCH)));
        assert!(proc.read_memory_counters(ended).is_err());
    }

    #[test]
    fn a_zombie_has_no_memory() {
        let mut proc = ProcDir::open(Path::new("/proc")).unwrap();
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pid = Pid(child.id());
        crate::tests::until_true("it is a zombie", || proc.stat(pid).unwrap().state == 'Z');
        assert_eq!(proc.read_memory_use(pid), Ok(ProcessMemoryUse::default()));
        assert_eq!(proc.read_memory_counters(pid), Ok(ProcessMemoryCounters::default()));
        child.wait().unwrap();
    }
}
