//! The PUs that are online, masks are cut to them.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use pjw_core::cpuset::CpuSet;

const ONLINE: &str = "/sys/devices/system/cpu/online";
#[cfg(feature = "bpf")]
const POSSIBLE: &str = "/sys/devices/system/cpu/possible";
/// A list of 8,192 PUs of which every other is online has some 20,000 bytes; sysfs ends at a page.
const LONGEST: usize = 65_536;

/// The PUs that are online, read again for each look and parsed only if they changed.
#[derive(Debug)]
pub(crate) struct Online {
    file: File,
    text: Vec<u8>,
    read: Vec<u8>,
    set: CpuSet,
}

impl Online {
    pub(crate) fn open() -> io::Result<Self> {
        let file = File::open(ONLINE)?;
        let mut online = Self { file, text: Vec::new(), read: vec![0; LONGEST], set: CpuSet::new() };
        online.read()?;
        Ok(online)
    }

    /// Looks again.
    pub(crate) fn read(&mut self) -> io::Result<&CpuSet> {
        let length = self.file.read_at(&mut self.read, 0)?;
        let text = &self.read[..length];
        if self.text != text {
            self.set = parse(text)?;
            self.text.clear();
            self.text.extend_from_slice(text);
        }
        Ok(&self.set)
    }

    /// As last read.
    #[cfg(feature = "bpf")]
    pub(crate) fn set(&self) -> &CpuSet {
        &self.set
    }
}

/// The PUs that are online now, for whoever asks once.
pub(crate) fn now() -> io::Result<CpuSet> {
    parse(&std::fs::read(ONLINE)?)
}

/// How many PUs there may ever be: one more than the highest number.
#[cfg(feature = "bpf")]
pub(crate) fn possible() -> io::Result<u32> {
    let set = parse(&std::fs::read(POSSIBLE)?)?;
    set.last().map(|pu| pu.0 + 1).ok_or_else(|| io::Error::other(format!("{POSSIBLE} names no PU")))
}

fn parse(text: &[u8]) -> io::Result<CpuSet> {
    let text = std::str::from_utf8(text).map_err(io::Error::other)?;
    text.parse().map_err(io::Error::other)
}
