//! The lower limit of the cost of a scan: the system calls that a regular cycle makes, without parsing, state and
//! decisions. The difference to the cost of a cycle is the work of pjwd itself.
//!
//! The calls are those of `pjw_linux::node`. For each process: `stat` of its first thread, its `cgroup`, its mask,
//! and its list of threads twice (a list is complete if two in a row are equal). For each thread: `schedstat`, the
//! mask, and `stat` if the thread ran since the last scan. A file is read until its end.

use std::collections::BTreeMap;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;

use pjw_core::ids::Tid;
use pjw_linux::sys::affinity;
use rustix::fs::{Mode, OFlags, RawDir, openat};
use rustix::io::{Errno, read};

/// Scans processes by the same system calls as pjwd, but without parsing and decisions. Benches compare the cost of a
/// scan by pjwd with the cost of these system calls.
#[derive(Debug)]
pub struct SyscallScan {
    proc: OwnedFd,
    schedstats: BTreeMap<u32, Vec<u8>>,
    buffer: Vec<u8>,
}

impl SyscallScan {
    /// Makes a scan, and opens `/proc` for it.
    ///
    /// # Errors
    /// If `/proc` can't be opened.
    pub fn new() -> Result<Self, Errno> {
        let proc = rustix::fs::open("/proc", OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
        Ok(Self { proc, schedstats: BTreeMap::new(), buffer: Vec::with_capacity(8192) })
    }

    /// Scans all threads of the processes `pids` and returns the number of threads.
    ///
    /// # Errors
    /// If a process or thread has ended.
    pub fn scan(&mut self, pids: &[u32]) -> Result<usize, Errno> {
        let mut threads = 0;
        for pid in pids {
            self.read_file(&format!("{pid}/task/{pid}/stat"))?;
            self.read_file(&format!("{pid}/cgroup"))?;
            let _ = affinity::get_mask(Tid(*pid));
            let tids = self.list_threads(*pid)?;
            self.list_threads(*pid)?;
            for tid in &tids {
                self.read_file(&format!("{pid}/task/{tid}/schedstat"))?;
                if self.schedstats.get(tid) != Some(&self.buffer) {
                    self.schedstats.insert(*tid, self.buffer.clone());
                    self.read_file(&format!("{pid}/task/{tid}/stat"))?;
                }
                let _ = affinity::get_mask(Tid(*tid));
            }
            threads += tids.len();
        }
        Ok(threads)
    }

    /// Reads the file at `path`, relative to `/proc`, into `buffer`.
    fn read_file(&mut self, path: &str) -> Result<(), Errno> {
        let file = openat(&self.proc, path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
        self.buffer.clear();
        loop {
            self.buffer.reserve(4096);
            if read(&file, rustix::buffer::spare_capacity(&mut self.buffer))? == 0 {
                return Ok(());
            }
        }
    }

    /// Returns the thread ids of the process `pid`.
    fn list_threads(&self, pid: u32) -> Result<Vec<u32>, Errno> {
        let path = format!("{pid}/task");
        let dir = openat(&self.proc, path, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
        let mut entries_buffer = [MaybeUninit::uninit(); 32 * 1024];
        let mut entries = RawDir::new(dir, &mut entries_buffer);
        let mut tids = Vec::new();
        while let Some(entry) = entries.next() {
            tids.extend(entry?.file_name().to_str().ok().and_then(|name| name.parse::<u32>().ok()));
        }
        Ok(tids)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::process::{Command, Stdio};
    use std::thread;
    use std::time::{Duration, Instant};

    use super::*;

    /// The name of the thread that the process of the test starts last.
    const LAST_THREAD: &str = "last-thread";

    #[test]
    #[ignore = "another test starts it as a process of its own"]
    fn a_process_of_several_threads() {
        thread::Builder::new()
            .name(LAST_THREAD.to_owned())
            .spawn(|| {
                loop {
                    thread::park();
                }
            })
            .unwrap();
        let _ = std::io::stdin().lines().count();
    }

    /// A scan of this process would fail if a thread of another test ended meanwhile.
    #[test]
    fn every_thread_is_scanned() {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--ignored", "--exact", "peers::syscalls::tests::a_process_of_several_threads"])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let names = || -> Vec<String> {
            let threads = fs::read_dir(format!("/proc/{}/task", child.id())).unwrap().flatten();
            threads.filter_map(|thread| fs::read_to_string(thread.path().join("comm")).ok()).collect()
        };
        let deadline = Instant::now() + Duration::from_secs(60);
        while !names().contains(&format!("{LAST_THREAD}\n")) {
            assert!(Instant::now() < deadline, "{:?}", names());
            thread::sleep(Duration::from_millis(2));
        }
        let (scanned, count) = (SyscallScan::new().unwrap().scan(&[child.id()]), names().len());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(count >= 2);
        assert_eq!(scanned, Ok(count));
    }
}
