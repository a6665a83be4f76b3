//! The private memory in the address space of a process: `/proc/PID/maps`, proc(5).

use std::fs::File;
use std::io::Read;
use std::ops::Range;

use nix::errno::Errno;
use pjw_core::ids::Pid;
use rustix::fs::OFlags;

use super::procfs::ProcDir;
use crate::sys::errno::from_io;

impl ProcDir {
    /// Reads from `/proc/PID/maps` the ranges of addresses of the process `pid` with private, writable memory that
    /// belongs to no file: heap, stacks and anonymous mappings. The ranges ascend. Reads at most `max_bytes` of the
    /// file, whose text has some 50 to 100 bytes for each mapping. Later ranges are left out. The kernel takes some
    /// 5 us for 1 KiB of the text. The call blocks while another thread holds the lock of the address space
    /// (`mmap_lock`).
    ///
    /// # Errors
    /// `ENOENT` or `ESRCH` if the process has ended. `EACCES` if this user has no permission to read the file.
    pub fn read_private_ranges(&mut self, pid: Pid, max_bytes: u64) -> Result<Vec<Range<u64>>, Errno> {
        let file = File::from(self.open_at(format_args!("{pid}/maps"), OFlags::empty())?);
        let mut text = Vec::new();
        file.take(max_bytes).read_to_end(&mut text).map_err(from_io)?;
        Ok(parse_private_ranges(&text))
    }
}

/// Parses `maps_text`, the content of `/proc/PID/maps` or the beginning of it. Returns the ranges of addresses with
/// private, writable memory that belongs to no file. Skips malformed lines, and a last line without its end.
fn parse_private_ranges(maps_text: &[u8]) -> Vec<Range<u64>> {
    let lines = maps_text.split_inclusive(|&byte| byte == b'\n');
    lines.filter_map(|line| parse_private_range(line.strip_suffix(b"\n")?)).collect()
}

/// Parses a line such as `7f00a000-7f00b000 rw-p 00000000 00:00 0`. The last number is the inode of the file. Returns
/// `None` if the memory is not private and writable, or belongs to a file.
fn parse_private_range(line: &[u8]) -> Option<Range<u64>> {
    // The name of a file may have any bytes.
    let mut words = line.split(|&byte| byte == b' ').filter_map(|word| std::str::from_utf8(word).ok());
    let (start, end) = words.next()?.split_once('-')?;
    let permissions = words.next()?;
    let inode = words.nth(2)?;
    let is_private = permissions.starts_with("rw") && permissions.ends_with('p') && inode == "0";
    let address = |text| u64::from_str_radix(text, 16).ok();
    let range = address(start)?..address(end)?;
    is_private.then_some(range)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    const MAPS: &str = "\
        55d0c0a0e000-55d0c0a10000 r--p 00000000 fd:00 131 /usr/bin/a b\n\
        55d0c0a10000-55d0c0a11000 rw-p 00002000 fd:00 131 /usr/bin/a b\n\
        55d0c1000000-55d0c1021000 rw-p 00000000 00:00 0    [heap]\n\
        7f0000000000-7f0000400000 rw-p 00000000 00:00 0 \n\
        7f0000400000-7f0004000000 ---p 00000000 00:00 0 \n\
        7f1000000000-7f1000100000 rw-s 00000000 00:01 77 /dev/zero (deleted)\n\
        7f2000000000-7f2000001000 rwxp 00000000 00:00 0 \n\
        7ffd3a5d0000-7ffd3a5f1000 rw-p 00000000 00:00 0    [stack]\n\
        7ffd3a5f6000-7ffd3a5fa000 r--p 00000000 00:00 0    [vvar]\n";

    #[test]
    fn private_writable_memory_without_a_file_is_found() {
        let heap = 0x55d0_c100_0000..0x55d0_c102_1000;
        let anonymous = [0x7f00_0000_0000..0x7f00_0040_0000, 0x7f20_0000_0000..0x7f20_0000_1000];
        let stack = 0x7ffd_3a5d_0000..0x7ffd_3a5f_1000;
        let all = [vec![heap.clone()], anonymous.to_vec(), vec![stack]].concat();
        assert_eq!(parse_private_ranges(MAPS.as_bytes()), all);
        let cut = MAPS.find("7f0000000000").unwrap() + 40;
        assert_eq!(parse_private_ranges(&MAPS.as_bytes()[..cut]), [heap], "the last line is not complete");
    }

    #[test]
    fn malformed_lines_are_skipped() {
        for line in
            ["", "x", "1000-2000", "1000-2000 rw-p 0 00:00", "1000 rw-p 0 00:00 0", "1000-y rw-p 0 00:00 0"]
        {
            assert_eq!(parse_private_ranges(format!("{line}\n").as_bytes()), [], "{line}");
        }
        assert_eq!(parse_private_ranges(b"\xff\n1000-2000 rw-p 0 00:00 0 \xff\n").len(), 1);
    }

    #[test]
    fn the_memory_of_this_process_is_found_and_an_ended_one_is_gone() {
        let mut proc = ProcDir::open(Path::new("/proc")).unwrap();
        let buffer = vec![7_u8; 1 << 20];
        let address = buffer.as_ptr().addr() as u64;
        let ranges = proc.read_private_ranges(Pid(std::process::id()), 1 << 20).unwrap();
        assert!(ranges.iter().any(|range| range.contains(&address)), "{ranges:x?}");
        assert_eq!(proc.read_private_ranges(Pid(std::process::id()), 10), Ok(Vec::new()));
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let ended = Pid(child.id());
        child.wait().unwrap();
        assert!(matches!(proc.read_private_ranges(ended, 4096), Err(Errno::ENOENT | Errno::ESRCH)));
    }
}
