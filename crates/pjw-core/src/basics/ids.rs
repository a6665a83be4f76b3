//! Identities of processes, threads, users and cgroups.
//!
//! The kernel reuses pids. A process is therefore identified by its pid and its start time (field 22 of
//! `/proc/PID/stat`, in clock ticks since boot, proc(5)). A thread is identified in the same way. A cgroup is
//! identified by its path and its inode.

use core::ffi::CStr;
use core::fmt;

use serde::{Deserialize, Serialize};

use crate::basics::{prelude::*, time::Nanos};

/// A process id (pid; the kernel's tgid).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Pid(pub u32);

/// A thread id (tid). The tid of the first thread of a process equals the pid of the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Tid(pub u32);

/// A numeric user id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Uid(pub u32);

/// The start time of a process or thread, in clock ticks since boot (field 22 of `/proc/PID/stat`, proc(5)).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct StartTime(pub u64);

macro_rules! display_as_number {
    ($($name:ident),*) => {$(
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    )*};
}

display_as_number!(Pid, Tid, Uid, StartTime);

impl StartTime {
    /// The length of one clock tick, 10 ms. The kernel reports start times in clock ticks (`USER_HZ`, see
    /// time(7)). On every supported architecture there are 100 ticks per second.
    pub const TICK: Nanos = Nanos(10_000_000);

    /// Returns the earliest possible time of the start, in ns since boot (`CLOCK_BOOTTIME`): the beginning
    /// of the 10 ms clock tick in which the process or thread started.
    #[must_use]
    pub fn earliest_time(self) -> Nanos {
        Nanos(self.0.saturating_mul(Self::TICK.0))
    }

    /// Returns the latest possible time of the start, in ns since boot (`CLOCK_BOOTTIME`): the end of the
    /// 10 ms clock tick in which the process or thread started.
    #[must_use]
    pub fn latest_time(self) -> Nanos {
        Nanos(self.0.saturating_add(1).saturating_mul(Self::TICK.0))
    }
}

/// The time at which a process or thread was created by fork(2) or clone(2). The time may be known only
/// roughly, so it is an interval from the earliest to the latest possible time.
///
/// - If a fork event of the kernel reported the time, it is exact: `earliest` and `latest` are equal.
/// - If only the start time in `/proc/PID/stat` is known, the interval is the clock tick (10 ms) of this
///   start time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BirthTime {
    /// The earliest possible time of the fork, in ns since boot (`CLOCK_BOOTTIME`).
    pub earliest: Nanos,
    /// The latest possible time of the fork, in ns since boot (`CLOCK_BOOTTIME`).
    pub latest: Nanos,
}

impl BirthTime {
    /// The longest time that pjw assumes for one fork: 100 ms. At the beginning of a fork, the kernel copies
    /// the affinity mask of the parent. At the end, the kernel sets the start time of the child and sends the
    /// fork event (kernel/fork.c, `copy_process`). In between, the mask of the parent may change. So a child
    /// that starts up to 100 ms after such a change may still have the old mask.
    pub const MAX_FORK_TIME: Nanos = Nanos(100_000_000);

    /// Returns the interval in which a thread was created, from its start time in `/proc/PID/stat`. The
    /// kernel rounds the start time down to a clock tick, so the interval is one tick (10 ms).
    ///
    /// `first_seen` is the time of the first scan that found the thread, in ns since boot. `None` if this
    /// time is unknown. If `first_seen` lies within the tick, the interval ends at `first_seen`.
    #[must_use]
    pub fn from_start_time(start: StartTime, first_seen: Option<Nanos>) -> Self {
        let earliest = start.earliest_time();
        let bound = first_seen.filter(|first_seen| earliest <= *first_seen);
        let latest = bound.map_or(start.latest_time(), |bound| bound.min(start.latest_time()));
        Self { earliest, latest }
    }

    /// Whether the thread was certainly created before the time `moment`, in ns since boot.
    ///
    /// - If the time of creation is exact: true if this time is less than `moment`.
    /// - If the time of creation is an interval: true if `latest` is less than or equal to `moment`. The
    ///   thread was created before `latest`, because the interval does not include its end.
    #[must_use]
    pub fn is_before(self, moment: Nanos) -> bool {
        self.latest < moment || (self.latest == moment && self.earliest < moment)
    }
}

impl Uid {
    /// The user id of the superuser, 0.
    pub const ROOT: Uid = Uid(0);
}

/// The identity of a process: its pid and its start time. The kernel reuses pids; a later process with the
/// same pid has another start time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ProcessId {
    /// The process id (pid), as seen in the pid namespace in which pjw runs.
    pub pid: Pid,
    /// The time at which the process started, in clock ticks of 10 ms since boot. A later process with the
    /// same pid has another start time.
    pub start: StartTime,
}

impl ProcessId {
    /// The shortest time that pjw assumes between two forks that get the same pid: 100 ms. So, for 100 ms after
    /// a fork event, the pid in the event belongs to the forked process, or to no process if that process has
    /// ended. To reuse a pid earlier, the machine would have to fork hundreds of thousands of processes per
    /// second.
    pub const MIN_PID_REUSE_TIME: Nanos = Nanos(100_000_000);

    /// Whether both ids name the same process. True if the pids are equal and the start times differ by at
    /// most 100 ms. Start times from `/proc/PID/stat` and from fork events may differ slightly, because the
    /// kernel reads them from different clocks.
    #[must_use]
    pub fn is_same_process(self, other: Self) -> bool {
        let apart = self.start.0.abs_diff(other.start.0);
        self.pid == other.pid && apart <= Self::MIN_PID_REUSE_TIME.0 / StartTime::TICK.0
    }
}

impl fmt::Display for ProcessId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.pid, self.start)
    }
}

/// The identity of a thread: its process, its thread id and its start time. The kernel reuses thread ids; a
/// later thread with the same id has another start time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ThreadId {
    /// The process to which the thread belongs.
    pub process: ProcessId,
    /// The thread id (tid), as seen in the pid namespace in which pjw runs. For the first thread of a
    /// process, it equals the pid.
    pub tid: Tid,
    /// The time at which the thread started, in clock ticks of 10 ms since boot. A later thread with the same
    /// tid has another start time.
    pub start: StartTime,
}

impl ThreadId {
    /// Returns whether this is the first thread of its process. The first thread has the pid of the process as its tid,
    /// as long as the process lives.
    #[must_use]
    pub fn is_first_thread(self) -> bool {
        self.tid.0 == self.process.pid.0
    }
}

/// The identity of a cgroup: its path and the inode number of its directory. A later cgroup with the same
/// path has another inode number.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct CgroupId {
    /// The inode number of the cgroup's directory.
    pub inode: u64,
    /// The path of the cgroup below the mount point of its hierarchy, as in `/proc/PID/cgroup`.
    pub path: String,
}

/// A command name (comm) of a process or thread, as the kernel stores it: at most 15 bytes of any value
/// (`TASK_COMM_LEN`, proc(5)).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Comm([u8; 15]);

impl Comm {
    /// Makes a command name from the first 15 bytes of `name`. The kernel cuts longer names in the same way.
    #[must_use]
    pub fn new(name: &[u8]) -> Self {
        let mut bytes = [0; 15];
        for (slot, byte) in bytes.iter_mut().zip(name) {
            *slot = *byte;
        }
        Self(bytes)
    }

    /// Returns the bytes of the name, up to the first zero byte.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        let end = self.0.iter().position(|&byte| byte == 0).unwrap_or(self.0.len());
        &self.0[..end]
    }
}

/// The name (comm) of the host process of `pjwctl spawn --share memory`. This command starts processes that share one
/// address space, called tasks. The host process owns the address space, starts the tasks in it, and frees the memory
/// of tasks that have ended. The host process runs no program of the user.
pub const TASK_HOST_NAME: &CStr = c"pjw-tasks";

impl fmt::Display for Comm {
    /// Prints the name with control characters and invalid UTF-8 escaped, so that a name can't send control
    /// codes to a terminal.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for chunk in self.as_bytes().utf8_chunks() {
            for character in chunk.valid().chars() {
                if character.is_control() {
                    write!(f, "{}", character.escape_default())?;
                } else {
                    write!(f, "{character}")?;
                }
            }
            for byte in chunk.invalid() {
                write!(f, "\\x{byte:02x}")?;
            }
        }
        Ok(())
    }
}

impl fmt::Debug for Comm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{self}\"")
    }
}

impl From<&str> for Comm {
    fn from(name: &str) -> Self {
        Self::new(name.as_bytes())
    }
}

/// Whether the cgroup at the path `cgroup` is the cgroup at the path `ancestor`, or lies below this cgroup.
/// Both paths are written as in `/proc/PID/cgroup`, with one exception: if `ancestor` is the root cgroup, it
/// must be the empty text and not `/`.
#[must_use]
pub fn is_cgroup_within(cgroup: &str, ancestor: &str) -> bool {
    cgroup.strip_prefix(ancestor).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// Iterates over the cgroup path `cgroup` and the paths of all cgroups above, the nearest first, without the root
/// cgroup. For example, the result for `/a/b` is `/a/b` and `/a`.
pub(crate) fn cgroup_and_ancestor_paths(cgroup: &str) -> impl Iterator<Item = &str> {
    let ends = cgroup.match_indices('/').map(|(at, _)| at).chain([cgroup.len()]).rev();
    ends.filter_map(|end| cgroup.get(..end)).filter(|path| !path.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::string::ToString;

    #[test]
    fn control_characters_in_a_command_name_are_escaped() {
        assert_eq!(Comm::new(b"a) \n\x1b[2J").to_string(), "a) \\n\\u{1b}[2J");
        assert_eq!(Comm::new(b"\xff\xfe").to_string(), "\\xff\\xfe");
        assert_eq!(Comm::new(b"a-name-longer-than-fifteen").to_string(), "a-name-longer-t");
    }
}
