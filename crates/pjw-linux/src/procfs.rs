//! /proc, as proc(5) describes it: who is there, what they did.
//!
//! Files are read into a buffer that the caller keeps, below a directory that is held open, and parsed by hand:
//! this is what every cycle does for every thread. A name may hold spaces, parentheses and newlines, so
//! `stat` is parsed from its last `)`.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{Arguments, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use nix::errno::Errno;
use pjw_core::cpuset::Pu;
use pjw_core::process::{Comm, Pid, StartTime, Tid};
use rustix::fs::{Mode, OFlags, RawDir, openat};

/// `PF_KTHREAD` of the kernel's `include/linux/sched.h`.
const KERNEL_THREAD: u64 = 0x0020_0000;
/// Environments larger than this are read so far; a batch system's variables are near the front.
const LARGEST_ENVIRON: usize = 1 << 20;
/// Variables longer than this are cut: no job id or count is.
const LONGEST_VALUE: usize = 4096;

/// A directory of /proc, held open, and the buffers that everything is named and read in: to read of a thread takes no
/// memory.
#[derive(Debug)]
pub struct Proc {
    root: OwnedFd,
    path: String,
    buffer: Vec<u8>,
    entries: Vec<u8>,
}

/// What `/proc/PID/stat` or `/proc/PID/task/TID/stat` says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stat {
    /// The name.
    pub comm: Comm,
    /// The kernel's letter for the state.
    pub state: char,
    /// The parent's number.
    pub parent: Pid,
    /// The process group.
    pub group: Pid,
    /// The session.
    pub session: Pid,
    /// Whether it is a kernel thread.
    pub kernel: bool,
    /// User and system time, in clock ticks.
    pub run_ticks: u64,
    /// When it started.
    pub start: StartTime,
    /// Where its stack starts: another address after nearly every exec (address space randomisation), 0 or 1 if
    /// the process may not be looked into.
    pub stack: u64,
    /// The PU it last ran on.
    pub last_cpu: Pu,
}

/// What `schedstat` says: ns run, ns waited on a run queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SchedStat {
    /// Time on a PU, in ns.
    pub run_ns: u64,
    /// Time on a run queue, in ns.
    pub wait_ns: u64,
}

/// The lines of `/proc/PID/status` that are not in `stat`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Status {
    /// The real user id.
    pub uid: u32,
    /// The supplementary groups.
    pub groups: Vec<u32>,
}

impl Proc {
    /// Opens /proc, or a directory that looks like it.
    ///
    /// # Errors
    /// If it can't be opened.
    pub fn open(root: &Path) -> Result<Self, Errno> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = rustix::fs::open(root, flags, Mode::empty()).map_err(errno)?;
        let (buffer, entries) = (Vec::with_capacity(8192), Vec::with_capacity(32 * 1024));
        Ok(Self { root, path: String::with_capacity(64), buffer, entries })
    }

    /// The processes there are.
    ///
    /// # Errors
    /// If the directory can't be read.
    pub fn pids(&mut self) -> Result<Vec<Pid>, Errno> {
        let dir = self.open_at(format_args!("."), OFlags::DIRECTORY)?;
        let numbers = numbers_in(dir, &mut self.entries)?;
        Ok(numbers.into_iter().map(Pid).collect())
    }

    /// The threads of a process.
    ///
    /// # Errors
    /// If the process is gone.
    pub fn tids(&mut self, pid: Pid) -> Result<Vec<Tid>, Errno> {
        let dir = self.open_at(format_args!("{pid}/task"), OFlags::DIRECTORY)?;
        let numbers = numbers_in(dir, &mut self.entries)?;
        Ok(numbers.into_iter().map(Tid).collect())
    }

    /// A process's `stat`. Costs time for every thread it has; for the first thread's own use
    /// [`Proc::thread_stat`].
    ///
    /// # Errors
    /// If the process is gone; `EIO` if the text makes no sense.
    pub fn stat(&mut self, pid: Pid) -> Result<Stat, Errno> {
        self.read_at_once(format_args!("{pid}/stat"))?;
        parse_stat(&self.buffer).ok_or(Errno::EIO)
    }

    /// A thread's `stat`.
    ///
    /// # Errors
    /// As [`Proc::stat`].
    pub fn thread_stat(&mut self, pid: Pid, tid: Tid) -> Result<Stat, Errno> {
        self.read_at_once(format_args!("{pid}/task/{tid}/stat"))?;
        parse_stat(&self.buffer).ok_or(Errno::EIO)
    }

    /// A thread's `schedstat`; `None` on a kernel without it (`CONFIG_SCHED_INFO`).
    ///
    /// # Errors
    /// If the thread is gone.
    pub fn schedstat(&mut self, pid: Pid, tid: Tid) -> Result<SchedStat, Errno> {
        self.read_at_once(format_args!("{pid}/task/{tid}/schedstat"))?;
        parse_schedstat(&self.buffer).ok_or(Errno::EIO)
    }

    /// A process's user and groups.
    ///
    /// # Errors
    /// As [`Proc::stat`].
    pub fn status(&mut self, pid: Pid) -> Result<Status, Errno> {
        self.read_at_once(format_args!("{pid}/status"))?;
        parse_status(&self.buffer).ok_or(Errno::EIO)
    }

    /// A process's cgroups, as (controllers, path).
    ///
    /// # Errors
    /// If the process is gone.
    pub fn cgroups(&mut self, pid: Pid) -> Result<Vec<(String, String)>, Errno> {
        self.read_at_once(format_args!("{pid}/cgroup"))?;
        Ok(parse_cgroups(&self.buffer))
    }

    /// Those variables of a process's environment that are wanted.
    ///
    /// # Errors
    /// If the process is gone, or belongs to someone whose environment we may not read.
    pub fn environ(
        &mut self,
        pid: Pid,
        wanted: &BTreeSet<&'static str>,
    ) -> Result<BTreeMap<String, String>, Errno> {
        self.read(format_args!("{pid}/environ"))?;
        Ok(parse_environ(&self.buffer, wanted))
    }

    /// The first bytes of a process's command line, blanks between the words.
    ///
    /// # Errors
    /// If the process is gone.
    pub fn command_line(&mut self, pid: Pid) -> Result<String, Errno> {
        self.read(format_args!("{pid}/cmdline"))?;
        let shown = &self.buffer[..self.buffer.len().min(256)];
        let words = String::from_utf8_lossy(shown).replace('\0', " ");
        Ok(words.trim_end().to_owned())
    }

    fn open_at(&mut self, path: Arguments<'_>, also: OFlags) -> Result<OwnedFd, Errno> {
        self.path.clear();
        // A string refuses nothing.
        let _ = self.path.write_fmt(path);
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | also;
        openat(&self.root, self.path.as_str(), flags, Mode::empty()).map_err(errno)
    }

    fn read(&mut self, path: Arguments<'_>) -> Result<(), Errno> {
        self.read_until(path, |_| false)
    }

    /// Reads a text that the kernel makes as a whole when it is first asked for it (seq_file(9), `single_open`), and whose
    /// last line is ended: a read that leaves room got all of it.
    fn read_at_once(&mut self, path: Arguments<'_>) -> Result<(), Errno> {
        self.read_until(path, |text| text.len() < text.capacity() && text.ends_with(b"\n"))
    }

    fn read_until(&mut self, path: Arguments<'_>, is_whole: impl Fn(&Vec<u8>) -> bool) -> Result<(), Errno> {
        let file = self.open_at(path, OFlags::empty())?;
        self.buffer.clear();
        loop {
            self.buffer.reserve(4096);
            let room = rustix::buffer::spare_capacity(&mut self.buffer);
            let ended = rustix::io::read(&file, room).map_err(errno)? == 0;
            if ended || is_whole(&self.buffer) || self.buffer.len() > LARGEST_ENVIRON {
                return Ok(());
            }
        }
    }
}

fn errno(error: rustix::io::Errno) -> Errno {
    Errno::from_raw(error.raw_os_error())
}

fn numbers_in(dir: impl AsFd, buffer: &mut Vec<u8>) -> Result<Vec<u32>, Errno> {
    let mut numbers = Vec::new();
    let mut entries = RawDir::new(dir, buffer.spare_capacity_mut());
    while let Some(entry) = entries.next() {
        let entry = entry.map_err(errno)?;
        if let Some(number) =
            std::str::from_utf8(entry.file_name().to_bytes()).ok().and_then(|name| name.parse().ok())
        {
            numbers.push(number);
        }
    }
    Ok(numbers)
}

/// Reads a `stat` line; `None` if it makes no sense.
#[must_use]
pub fn parse_stat(text: &[u8]) -> Option<Stat> {
    let open = text.iter().position(|&byte| byte == b'(')?;
    let close = text.iter().rposition(|&byte| byte == b')').filter(|&close| close > open)?;
    let comm = Comm::new(&text[open + 1..close]);
    let rest = std::str::from_utf8(text.get(close + 1..)?).ok()?;
    // Counted from field 3, the state.
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
        group: pid(5)?,
        session: pid(6)?,
        kernel: number(9)? & KERNEL_THREAD != 0,
        run_ticks: number(14)?.saturating_add(number(15)?),
        start: StartTime(number(22)?),
        stack: number(28)?,
        last_cpu: Pu(u32::try_from(number(39)?).ok()?),
    })
}

/// Reads a `schedstat` line: run time, wait time, time slices.
#[must_use]
pub fn parse_schedstat(text: &[u8]) -> Option<SchedStat> {
    let mut numbers =
        std::str::from_utf8(text).ok()?.split_ascii_whitespace().map(|word| word.parse::<u64>().ok());
    Some(SchedStat { run_ns: numbers.next()??, wait_ns: numbers.next()?? })
}

/// Reads the `Uid:` and `Groups:` lines of `status`.
#[must_use]
pub fn parse_status(text: &[u8]) -> Option<Status> {
    // Only the name line can hold bytes that are no text, and newlines in it are escaped by the kernel.
    let text = String::from_utf8_lossy(text);
    let line = |key: &str| text.lines().find_map(|line| line.strip_prefix(key));
    let uid = line("Uid:")?.split_ascii_whitespace().next()?.parse().ok()?;
    let groups = line("Groups:").unwrap_or("").split_ascii_whitespace().filter_map(|word| word.parse().ok());
    Some(Status { uid, groups: groups.collect() })
}

/// Reads the lines of `/proc/PID/cgroup`, cgroups(7): `number:controllers:path`.
#[must_use]
pub fn parse_cgroups(text: &[u8]) -> Vec<(String, String)> {
    let text = String::from_utf8_lossy(text);
    let line = |line: &str| {
        let mut parts = line.splitn(3, ':').skip(1);
        Some((parts.next()?.to_owned(), parts.next()?.to_owned()))
    };
    text.lines().filter_map(line).collect()
}

/// Picks the wanted variables out of an environment: `NAME=value`, each ended by a zero byte. Of a name that
/// stands twice the first counts, as for getenv(3).
#[must_use]
pub fn parse_environ(text: &[u8], wanted: &BTreeSet<&'static str>) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    for entry in text.split(|&byte| byte == 0) {
        let Some(equals) = entry.iter().position(|&byte| byte == b'=') else { continue };
        let Ok(name) = std::str::from_utf8(&entry[..equals]) else { continue };
        if wanted.contains(name) {
            let value = &entry[equals + 1..];
            let value = String::from_utf8_lossy(&value[..value.len().min(LONGEST_VALUE)]);
            found.entry(name.to_owned()).or_insert_with(|| value.into_owned());
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    const REST: &str = "S 7 8 9 0 -1 4194560 1 2 3 4 150 50 0 0 20 0 3 0 4711 1000 200 \
                        18446744073709551615 1 1 0 0 0 0 0 0 0 0 0 0 17 5 0 0 0 0 0 0 0 0 0 0 0 0 0\n";

    #[test]
    fn a_stat_line_is_read_from_its_last_parenthesis() {
        for comm in ["sh", "a b", "a) S 1 2", "(((", "x\n) R 0"] {
            let stat = parse_stat(format!("42 ({comm}) {REST}").as_bytes()).unwrap();
            assert_eq!(stat.comm, Comm::from(comm));
            assert_eq!((stat.state, stat.parent, stat.group, stat.session), ('S', Pid(7), Pid(8), Pid(9)));
            assert_eq!((stat.run_ticks, stat.start, stat.last_cpu), (200, StartTime(4711), Pu(5)));
            assert!(!stat.kernel);
        }
    }

    #[test]
    fn a_stat_line_that_is_cut_short_or_nonsense_is_none() {
        let whole = format!("42 (sh) {REST}");
        for end in 0..whole.len() - 30 {
            assert_eq!(parse_stat(&whole.as_bytes()[..end]), None, "{end}");
        }
        for text in ["", ")(", "1 () ", "1 (a) S x x x"] {
            assert_eq!(parse_stat(text.as_bytes()), None, "{text}");
        }
    }

    #[test]
    fn a_session_of_minus_one_or_zero_is_nobodys() {
        let text = format!("2 (kthreadd) {}", REST.replace("7 8 9", "0 -1 0"));
        assert_eq!(parse_stat(text.as_bytes()).unwrap().group, Pid(0));
    }

    #[test]
    fn only_wanted_variables_are_kept_and_the_first_of_a_name_counts() {
        let wanted = BTreeSet::from(["SLURM_JOB_ID", "LSB_MCPU_HOSTS"]);
        let text = b"HOME=/root\0SLURM_JOB_ID=1\0LSB_MCPU_HOSTS=vm 2 \0SLURM_JOB_ID=2\0junk\0\xff\xff=1\0";
        let found = parse_environ(text, &wanted);
        assert_eq!(found["SLURM_JOB_ID"], "1");
        assert_eq!(found["LSB_MCPU_HOSTS"], "vm 2 ");
        assert_eq!(found.len(), 2);
        let long = [b"SLURM_JOB_ID=".as_slice(), &[b'9'; 100_000]].concat();
        assert_eq!(parse_environ(&long, &wanted)["SLURM_JOB_ID"].len(), LONGEST_VALUE);
    }

    #[test]
    fn cgroup_lines_may_hold_colons_in_the_path() {
        let lines = parse_cgroups(b"4:memory:/a:b\n1:name=systemd:/x\n0::/y\nnonsense\n");
        let lines: Vec<_> = lines.iter().map(|(c, p)| (c.as_str(), p.as_str())).collect();
        assert_eq!(lines, [("memory", "/a:b"), ("name=systemd", "/x"), ("", "/y")]);
    }

    #[test]
    fn our_own_process_reads_as_the_procfs_crate_reads_it() {
        let mut proc = Proc::open(Path::new("/proc")).unwrap();
        let me = ::procfs::process::Process::myself().unwrap();
        let pid = Pid(std::process::id());
        let (ours, theirs) = (proc.stat(pid).unwrap(), me.stat().unwrap());
        assert_eq!(ours.start.0, theirs.starttime);
        assert_eq!((ours.parent.0, ours.group.0), (theirs.ppid.cast_unsigned(), theirs.pgrp.cast_unsigned()));
        assert_eq!(ours.session.0, theirs.session.cast_unsigned());
        assert_eq!(ours.comm, Comm::from(theirs.comm.as_str()));
        let status = me.status().unwrap();
        let ours = proc.status(pid).unwrap();
        assert_eq!(ours.uid, status.ruid);
        assert_eq!(ours.groups.len(), status.groups.len());
        let path = me.environ().unwrap().get(std::ffi::OsStr::new("PATH")).cloned().unwrap();
        assert_eq!(proc.environ(pid, &BTreeSet::from(["PATH"])).unwrap()["PATH"], path.to_string_lossy());
        assert!(proc.pids().unwrap().contains(&pid));
        let tids = proc.tids(pid).unwrap();
        assert!(tids.contains(&Tid(pid.0)));
        assert!(proc.thread_stat(pid, Tid(pid.0)).is_ok());
    }

    #[test]
    fn who_is_gone_is_gone() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pid = Pid(child.id());
        child.wait().unwrap();
        let mut proc = Proc::open(Path::new("/proc")).unwrap();
        assert_eq!(proc.stat(pid), Err(Errno::ENOENT));
        assert_eq!(proc.tids(pid), Err(Errno::ENOENT));
    }
}
