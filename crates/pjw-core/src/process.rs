//! Who is who: processes and threads by identity, never by number alone.
//!
//! The kernel reuses pids. A process is therefore known by its pid *and* its start time (field 22 of
//! `/proc/PID/stat`, in clock ticks since boot, proc(5)), a thread likewise, a cgroup by its path *and* inode.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::snapshot::Nanos;

macro_rules! number {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

number! {
    /// A process number (the kernel's tgid).
    Pid(u32)
}
number! {
    /// A thread number. The first thread of a process has its process's number.
    Tid(u32)
}
number! {
    /// A numeric user id.
    Uid(u32)
}
number! {
    /// When a process or thread started: clock ticks since boot (field 22 of `stat`, proc(5)).
    StartTime(u64)
}

impl StartTime {
    /// The kernel tells start times in units of `USER_HZ`, which is 100 a second on every architecture that Linux
    /// still has, whatever its own clock does (time(7)).
    pub const TICK: Nanos = Nanos(10_000_000);

    /// The beginning of the tick in which it happened: it was no earlier than that.
    #[must_use]
    pub fn at_the_earliest(self) -> Nanos {
        Nanos(self.0.saturating_mul(Self::TICK.0))
    }

    /// The end of the tick in which it happened: it was no later than that.
    #[must_use]
    pub fn at_the_latest(self) -> Nanos {
        Nanos(self.0.saturating_add(1).saturating_mul(Self::TICK.0))
    }
}

impl Uid {
    /// The superuser.
    pub const ROOT: Uid = Uid(0);
}

/// A process that can't be mistaken for a later one of the same number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ProcessId {
    /// Its number.
    pub pid: Pid,
    /// When it started.
    pub start: StartTime,
}

impl ProcessId {
    /// So long after a birth nobody else has been given its number: that would take hundreds of thousands of births a
    /// second.
    pub const NUMBER_RESTS: Nanos = Nanos(100_000_000);

    /// Whether this is the other, the start of one being that of its event: dated a little later, by another clock.
    #[must_use]
    pub fn is_born_with(self, other: Self) -> bool {
        let apart = self.start.0.abs_diff(other.start.0);
        self.pid == other.pid && apart <= Self::NUMBER_RESTS.0 / StartTime::TICK.0
    }
}

impl fmt::Display for ProcessId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.pid, self.start)
    }
}

/// A thread that can't be mistaken for a later one of the same number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ThreadId {
    /// The process it runs in.
    pub process: ProcessId,
    /// Its own number.
    pub tid: Tid,
    /// When it started.
    pub start: StartTime,
}

/// A cgroup that can't be mistaken for a later one of the same path: paths are reused, inodes of live
/// directories are not.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct CgroupId {
    /// The inode of its directory.
    pub inode: u64,
    /// Its path below the mount point, as in `/proc/PID/cgroup`.
    pub path: String,
}

/// A command name as the kernel keeps it: at most 15 bytes, any bytes (`TASK_COMM_LEN`, proc(5)).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Comm([u8; 15]);

impl Comm {
    /// Keeps the first 15 bytes, as the kernel would.
    #[must_use]
    pub fn new(name: &[u8]) -> Self {
        let mut bytes = [0; 15];
        for (slot, byte) in bytes.iter_mut().zip(name) {
            *slot = *byte;
        }
        Self(bytes)
    }

    /// The name's bytes.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        let end = self.0.iter().position(|&byte| byte == 0).unwrap_or(self.0.len());
        &self.0[..end]
    }
}

impl fmt::Display for Comm {
    /// Control characters and broken UTF-8 are escaped: a hostile name must not draw on a terminal.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hostile_comm_prints_harmlessly() {
        assert_eq!(Comm::new(b"a) \n\x1b[2J").to_string(), "a) \\n\\u{1b}[2J");
        assert_eq!(Comm::new(b"\xff\xfe").to_string(), "\\xff\\xfe");
        assert_eq!(Comm::new(b"a-name-longer-than-fifteen").to_string(), "a-name-longer-t");
    }
}
