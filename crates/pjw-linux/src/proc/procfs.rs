//! Reader of `/proc`, proc(5).
//!
//! Each scan reads these files for many threads. So the reader keeps the directory open, reuses its buffers,
//! and parses by hand. A process name may contain spaces, parentheses and newlines; so `stat` is parsed from
//! its last `)`.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{Arguments, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use nix::errno::Errno;
use pjw_core::ids::{Comm, Pid, StartTime, Tid};
use pjw_core::{cpuset::Pu, process_cgroups::ProcessCgroups};
use rustix::fs::{Mode, OFlags, RawDir, openat};

use crate::sys::errno::from_rustix;

/// `PF_KTHREAD` of the kernel's `include/linux/sched.h`.
const KERNEL_THREAD: u64 = 0x0020_0000;
/// `PF_EXITING` of the kernel's `include/linux/sched.h`.
const EXITING: u64 = 0x0000_0004;
/// The largest part of a file that is read, in bytes. Variables of a batch system are near the front of the
/// environment.
const MAX_FILE_BYTES: usize = 1 << 20;
/// The maximum length of the value of an environment variable, in bytes. A longer value is cut. No job id or count is
/// longer.
const MAX_VALUE_BYTES: usize = 4096;

/// An open `/proc` directory, through which the files of processes and threads are read. All calls use the same
/// read buffer, so that reading the state of a thread allocates no memory.
#[derive(Debug)]
pub struct ProcDir {
    root: OwnedFd,
    /// The path of the file that was opened last, relative to `root`.
    path: String,
    /// The content of the file that was read last.
    buffer: Vec<u8>,
    /// Working memory for directory entries.
    entries: Vec<u8>,
}

/// The values of a process from `/proc/PID/stat`, or of a thread from `/proc/PID/task/TID/stat`. Contains only
/// the values that pjw uses. proc_pid_stat(5) describes these files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stat {
    /// The name (comm) of the process or thread, at most 15 bytes.
    pub comm: Comm,
    /// The state of the process or thread: R (running), S (sleeping), D (uninterruptible sleep), Z (zombie) and so on.
    pub state: char,
    /// The process id of the parent. 0 if there is none, as for process 1.
    pub parent: Pid,
    /// The process group id. 0 if there is none, as for kernel threads.
    pub process_group: Pid,
    /// The session id. 0 if there is none, as for kernel threads.
    pub session: Pid,
    /// Whether this is a kernel thread (`PF_KTHREAD`).
    pub is_kernel_thread: bool,
    /// The CPU time in user and kernel mode since the start, in clock ticks of 10 ms. For a process, the sum
    /// over all its threads, including ended threads.
    pub run_ticks: u64,
    /// The time at which the process or thread started, in clock ticks of 10 ms since boot.
    pub start: StartTime,
    /// The start address of the stack. Because of address space randomisation, an execve(2) nearly always
    /// changes the address. Otherwise the address normally stays the same. pjw compares addresses to detect
    /// that a process executed another program. 0 or 1 if this user may not read the address.
    pub stack_start: u64,
    /// The PU on which the thread last ran. In `/proc/PID/stat`, the PU of the first thread of the process.
    pub last_cpu: Pu,
}

impl Stat {
    /// Returns the start address of the stack (`startstack` in proc_pid_stat(5)). The kernel stores this address once
    /// for each address space, so it is the same for all processes that share an address space. `None` if the address
    /// in the file is 0 or 1: the process has no memory, or this user has no permission to read the address.
    #[must_use]
    pub fn readable_stack_start(&self) -> Option<u64> {
        (self.stack_start > 1).then_some(self.stack_start)
    }
}

/// The run time and the wait time of a thread since its start, in ns, from `/proc/PID/task/TID/schedstat`. The run time
/// is the time for which the thread has run on a PU (logical CPU). The wait time is the time for which the thread was
/// runnable and waited for a PU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SchedStat {
    /// The time for which the thread has run on a PU since its start, in ns.
    pub run_ns: u64,
    /// The time for which the thread has waited on a run queue since its start, in ns.
    pub wait_ns: u64,
}

/// The real user id and the supplementary group ids of a process, from `/proc/PID/status`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Status {
    /// The real user id of the process.
    pub uid: u32,
    /// The supplementary group ids of the process.
    pub groups: Vec<u32>,
}

impl ProcDir {
    /// Opens `/proc`, or another directory with the same structure. `root` is the path of the directory.
    ///
    /// # Errors
    /// If the directory can't be opened.
    pub fn open(root: &Path) -> Result<Self, Errno> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = rustix::fs::open(root, flags, Mode::empty()).map_err(from_rustix)?;
        let (buffer, entries) = (Vec::with_capacity(8192), Vec::with_capacity(32 * 1024));
        Ok(Self { root, path: String::with_capacity(64), buffer, entries })
    }

    /// Returns the ids of all processes in this `/proc` directory, in the order in which the kernel lists them.
    ///
    /// # Errors
    /// If the directory can't be read.
    pub fn pids(&mut self) -> Result<Vec<Pid>, Errno> {
        let dir = self.open_at(format_args!("."), OFlags::DIRECTORY)?;
        let numbers = numbers_in(dir, &mut self.entries)?;
        Ok(numbers.into_iter().map(Pid).collect())
    }

    /// Returns the ids of all threads of the process `pid`, including its first thread, in the order in which the
    /// kernel lists them.
    ///
    /// # Errors
    /// `ENOENT` or `ESRCH` if the process has ended. Otherwise the error of reading the directory `/proc/PID/task`.
    pub fn tids(&mut self, pid: Pid) -> Result<Vec<Tid>, Errno> {
        let dir = self.open_at(format_args!("{pid}/task"), OFlags::DIRECTORY)?;
        let numbers = numbers_in(dir, &mut self.entries)?;
        Ok(numbers.into_iter().map(Tid).collect())
    }

    /// Reads `/proc/PID/stat` of the process `pid`. For this file, the kernel sums the CPU times of all threads of the
    /// process, which takes time for each thread. [`ProcDir::thread_stat`] is faster if only the first thread is
    /// needed.
    ///
    /// # Errors
    /// `ENOENT` or `ESRCH` if the process has ended. `EIO` if the text is malformed.
    pub fn stat(&mut self, pid: Pid) -> Result<Stat, Errno> {
        self.read_single_open_file(format_args!("{pid}/stat"))?;
        parse_stat(&self.buffer).ok_or(Errno::EIO)
    }

    /// Reads `/proc/PID/task/TID/stat` of the thread `tid` of the process `pid`.
    ///
    /// # Errors
    /// `ENOENT` or `ESRCH` if the thread has ended. `EIO` if the text is malformed.
    pub fn thread_stat(&mut self, pid: Pid, tid: Tid) -> Result<Stat, Errno> {
        self.read_single_open_file(format_args!("{pid}/task/{tid}/stat"))?;
        parse_stat(&self.buffer).ok_or(Errno::EIO)
    }

    /// Reads two values from `/proc/PID/task/TID/stat`. The first is the start time of the thread `tid` of the
    /// process `pid` (`starttime`), in clock ticks since boot. The second is the CPU time of the ended children
    /// of the whole process (`cutime` plus `cstime`), in clock ticks. A child counts as soon as the process has
    /// waited for it (wait4(2)). Also works for a zombie.
    ///
    /// # Errors
    /// `ENOENT` or `ESRCH` if the thread does not exist. `EIO` if the text is malformed.
    pub fn start_time_and_children_cpu_ticks(
        &mut self,
        pid: Pid,
        tid: Tid,
    ) -> Result<(StartTime, u64), Errno> {
        self.read_single_open_file(format_args!("{pid}/task/{tid}/stat"))?;
        parse_children_ticks(&self.buffer).ok_or(Errno::EIO)
    }

    /// Returns whether the thread `tid` of the process `pid` is exiting (`PF_EXITING`). Such a thread runs in the
    /// kernel, and executes no more instructions of its program. The kernel has released the memory of the thread, or
    /// soon does so.
    ///
    /// # Errors
    /// `ENOENT` or `ESRCH` if the thread has ended. `EIO` if the text is malformed.
    pub(crate) fn is_exiting(&mut self, pid: Pid, tid: Tid) -> Result<bool, Errno> {
        self.read_single_open_file(format_args!("{pid}/task/{tid}/stat"))?;
        Ok(parse_flags(&self.buffer).ok_or(Errno::EIO)? & EXITING != 0)
    }

    /// Reads the run time and the wait time of the thread `tid` of the process `pid` since its start, in ns, from
    /// `/proc/PID/task/TID/schedstat`. The run time is the time for which the thread has run on a PU (logical CPU). The
    /// wait time is the time for which the thread was runnable and waited for a PU.
    ///
    /// # Errors
    /// `ENOENT` or `ESRCH` if the thread has ended, or if the kernel has no file `schedstat` (`CONFIG_SCHED_INFO`).
    /// `EIO` if the text is malformed.
    pub fn schedstat(&mut self, pid: Pid, tid: Tid) -> Result<SchedStat, Errno> {
        self.read_single_open_file(format_args!("{pid}/task/{tid}/schedstat"))?;
        parse_schedstat(&self.buffer).ok_or(Errno::EIO)
    }

    /// Reads the real user id and the supplementary group ids of the process `pid` from `/proc/PID/status`.
    ///
    /// # Errors
    /// `ENOENT` or `ESRCH` if the process has ended. `EIO` if the text is malformed.
    pub fn status(&mut self, pid: Pid) -> Result<Status, Errno> {
        self.read_single_open_file(format_args!("{pid}/status"))?;
        parse_status(&self.buffer).ok_or(Errno::EIO)
    }

    /// Reads the cgroups of the process `pid` from `/proc/PID/cgroup`. Each path is relative to the root of its
    /// hierarchy.
    ///
    /// # Errors
    /// `ENOENT` or `ESRCH` if the process has ended.
    pub fn cgroups(&mut self, pid: Pid) -> Result<ProcessCgroups, Errno> {
        self.read_single_open_file(format_args!("{pid}/cgroup"))?;
        Ok(parse_cgroups(&self.buffer))
    }

    /// Returns the path of the cgroup of process `pid` in the hierarchy with the cpuset controller. `None` if the
    /// process has ended.
    pub(crate) fn cpuset_path(&mut self, pid: Pid) -> Option<String> {
        self.cgroups(pid).ok()?.cpuset_path().map(str::to_owned)
    }

    /// Reads from `/proc/PID/environ` the environment variables of the process `pid` whose names are in
    /// `wanted_names`. Returns the values by name. Variables that the process does not have are left out. A
    /// value is cut to 4096 bytes. Only about the first MiB of the environment is read.
    ///
    /// # Errors
    /// `ENOENT` or `ESRCH` if the process has ended. `EACCES` if this user may not read the environment.
    pub fn environ(
        &mut self,
        pid: Pid,
        wanted_names: &BTreeSet<&'static str>,
    ) -> Result<BTreeMap<String, String>, Errno> {
        self.read(format_args!("{pid}/environ"))?;
        Ok(parse_environ(&self.buffer, wanted_names))
    }

    /// Reads the command line of the process `pid` from `/proc/PID/cmdline`. Returns the first 256 bytes, with
    /// spaces between the arguments, and without spaces at the end. Each invalid UTF-8 sequence is replaced by
    /// U+FFFD. Returns an empty text if the process has no command line, such as a kernel thread or a zombie.
    ///
    /// # Errors
    /// `ENOENT` or `ESRCH` if the process has ended.
    pub fn command_line(&mut self, pid: Pid) -> Result<String, Errno> {
        self.read(format_args!("{pid}/cmdline"))?;
        let shown = &self.buffer[..self.buffer.len().min(256)];
        let words = String::from_utf8_lossy(shown).replace('\0', " ");
        Ok(words.trim_end().to_owned())
    }

    /// Opens the file at `path` in this `/proc` directory for reading. `also` has additional flags of openat(2).
    pub(super) fn open_at(&mut self, path: Arguments<'_>, also: OFlags) -> Result<OwnedFd, Errno> {
        self.path.clear();
        // Writing into a string can't fail.
        let _ = self.path.write_fmt(path);
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | also;
        openat(&self.root, self.path.as_str(), flags, Mode::empty()).map_err(from_rustix)
    }

    /// Returns the content of the file that this value has read last.
    pub(super) fn text(&self) -> &[u8] {
        &self.buffer
    }

    /// Reads the file at `path` in this `/proc` directory into the buffer, up to its end or to [`MAX_FILE_BYTES`].
    /// [`ProcDir::text`] returns the text.
    pub(super) fn read(&mut self, path: Arguments<'_>) -> Result<(), Errno> {
        self.read_until(path, |_| false)
    }

    /// Reads the file at `path` in this `/proc` directory into the buffer. [`ProcDir::text`] returns the text. Use only
    /// for files whose whole text the kernel generates at the first read (`single_open`, seq_file(9)). The function
    /// takes a newline as the end of the file if a read ends with it and does not fill the buffer. This saves the last
    /// read(2), which would return 0. A file that does not end with a newline is read correctly too, but with this last
    /// read(2).
    pub(super) fn read_single_open_file(&mut self, path: Arguments<'_>) -> Result<(), Errno> {
        self.read_until(path, |text| text.len() < text.capacity() && text.ends_with(b"\n"))
    }

    /// Reads the file at `path` in this `/proc` directory into the buffer. The read ends at the first of these:
    ///
    /// - The end of the file.
    /// - `is_whole` returns true for the text that was read until then.
    /// - The text is longer than [`MAX_FILE_BYTES`].
    fn read_until(&mut self, path: Arguments<'_>, is_whole: impl Fn(&Vec<u8>) -> bool) -> Result<(), Errno> {
        let file = self.open_at(path, OFlags::empty())?;
        self.buffer.clear();
        loop {
            self.buffer.reserve(4096);
            let room = rustix::buffer::spare_capacity(&mut self.buffer);
            let ended = rustix::io::read(&file, room).map_err(from_rustix)? == 0;
            if ended || is_whole(&self.buffer) || self.buffer.len() > MAX_FILE_BYTES {
                return Ok(());
            }
        }
    }
}

/// Returns the names in the directory `dir` that are numbers, such as the pids in `/proc`. `buffer` is only used as
/// working memory.
fn numbers_in(dir: impl AsFd, buffer: &mut Vec<u8>) -> Result<Vec<u32>, Errno> {
    let mut numbers = Vec::new();
    let mut entries = RawDir::new(dir, buffer.spare_capacity_mut());
    while let Some(entry) = entries.next() {
        let entry = entry.map_err(from_rustix)?;
        if let Some(number) =
            std::str::from_utf8(entry.file_name().to_bytes()).ok().and_then(|name| name.parse().ok())
        {
            numbers.push(number);
        }
    }
    Ok(numbers)
}

/// Parses `stat_text`, the content of `/proc/PID/stat` or `/proc/PID/task/TID/stat` (proc_pid_stat(5)). Returns
/// `None` if the text is malformed.
#[must_use]
pub fn parse_stat(stat_text: &[u8]) -> Option<Stat> {
    let open = stat_text.iter().position(|&byte| byte == b'(')?;
    let close = stat_text.iter().rposition(|&byte| byte == b')').filter(|&close| close > open)?;
    let comm = Comm::new(&stat_text[open + 1..close]);
    let rest = std::str::from_utf8(stat_text.get(close + 1..)?).ok()?;
    // Field numbers as in proc_pid_stat(5). The first element is field 3, the state.
    let mut fields = [""; 37];
    let mut words = rest.split_ascii_whitespace();
    for field in &mut fields {
        *field = words.next()?;
    }
    let number = |field: usize| fields[field - 3].parse::<u64>().ok();
    let pid =
        |field: usize| fields[field - 3].parse::<i64>().ok().map(|n| Pid(u32::try_from(n).unwrap_or(0)));
    Some(Stat {
        comm,
        state: fields[0].chars().next()?,
        parent: pid(4)?,
        process_group: pid(5)?,
        session: pid(6)?,
        is_kernel_thread: number(9)? & KERNEL_THREAD != 0,
        run_ticks: number(14)?.saturating_add(number(15)?),
        start: StartTime(number(22)?),
        stack_start: number(28)?,
        last_cpu: Pu(u32::try_from(number(39)?).ok()?),
    })
}

/// Returns the fields of `stat_text`, the content of a file `stat`, from field 3 on (the numbers are those of
/// proc_pid_stat(5)). The name before them is in parentheses and can contain any byte.
pub(super) fn fields_from_state(stat_text: &[u8]) -> Option<impl Iterator<Item = &str>> {
    let close = stat_text.iter().rposition(|&byte| byte == b')')?;
    Some(std::str::from_utf8(stat_text.get(close + 1..)?).ok()?.split_ascii_whitespace())
}

/// Returns the start time, and the sum of the fields `cutime` and `cstime`, which are signed.
fn parse_children_ticks(text: &[u8]) -> Option<(StartTime, u64)> {
    let mut fields = fields_from_state(text)?;
    let user: i64 = fields.nth(16 - 3)?.parse().ok()?;
    let system: i64 = fields.next()?.parse().ok()?;
    // The next field is field 18.
    let start = fields.nth(22 - 18)?.parse().ok()?;
    Some((StartTime(start), u64::try_from(user.saturating_add(system)).unwrap_or(0)))
}

/// Returns the field `flags`.
fn parse_flags(text: &[u8]) -> Option<u64> {
    fields_from_state(text)?.nth(9 - 3)?.parse().ok()
}

/// Parses `schedstat_text`, the content of `/proc/PID/task/TID/schedstat`. Returns the run time and the wait time of
/// the thread since its start, in ns. These are the first two numbers of the text. Returns `None` if the text is
/// malformed.
#[must_use]
pub fn parse_schedstat(schedstat_text: &[u8]) -> Option<SchedStat> {
    let mut numbers = std::str::from_utf8(schedstat_text)
        .ok()?
        .split_ascii_whitespace()
        .map(|word| word.parse::<u64>().ok());
    Some(SchedStat { run_ns: numbers.next()??, wait_ns: numbers.next()?? })
}

/// Parses `status_text`, the content of `/proc/PID/status`. Returns the real user id and the supplementary
/// group ids of the process. Returns `None` if the text has no user id.
#[must_use]
pub fn parse_status(status_text: &[u8]) -> Option<Status> {
    // Only the `Name:` line can contain bytes that are not UTF-8. The kernel escapes newlines in it.
    let text = String::from_utf8_lossy(status_text);
    let line = |key: &str| text.lines().find_map(|line| line.strip_prefix(key));
    let uid = line("Uid:")?.split_ascii_whitespace().next()?.parse().ok()?;
    let groups = line("Groups:").unwrap_or("").split_ascii_whitespace().filter_map(|word| word.parse().ok());
    Some(Status { uid, groups: groups.collect() })
}

/// Parses `cgroup_text`, the content of `/proc/PID/cgroup` (cgroups(7)). Returns the cgroups of the process. Malformed
/// lines are skipped.
#[must_use]
pub fn parse_cgroups(cgroup_text: &[u8]) -> ProcessCgroups {
    let text = String::from_utf8_lossy(cgroup_text);
    let line = |line: &str| {
        let mut parts = line.splitn(3, ':').skip(1);
        Some((parts.next()?.to_owned(), parts.next()?.to_owned()))
    };
    ProcessCgroups { lines: text.lines().filter_map(line).collect() }
}

/// Parses `environ_text`, the content of `/proc/PID/environ`: entries `NAME=value`, each with a zero byte at
/// its end. Returns the values of the environment variables whose names are in `wanted_names`, by name. Of a
/// value, only the first 4096 bytes are returned, and bytes that are not valid UTF-8 are replaced by U+FFFD. If a
/// name occurs twice, the first value counts, as for getenv(3).
#[must_use]
pub fn parse_environ(environ_text: &[u8], wanted_names: &BTreeSet<&'static str>) -> BTreeMap<String, String> {
    let mut values = BTreeMap::new();
    for entry in environ_text.split(|&byte| byte == 0) {
        let Some(equals) = entry.iter().position(|&byte| byte == b'=') else { continue };
        let Ok(name) = std::str::from_utf8(&entry[..equals]) else { continue };
        if wanted_names.contains(name) {
            let value = &entry[equals + 1..];
            let value = String::from_utf8_lossy(&value[..value.len().min(MAX_VALUE_BYTES)]);
            values.entry(name.to_owned()).or_insert_with(|| value.into_owned());
        }
    }
    values
}

#[cfg(test)]
mod tests;
