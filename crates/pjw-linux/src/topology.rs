//! The machine, as hwloc sees it: the live one, an XML file, or a synthetic string.
//!
//! hwloc stays behind this file and the ones below it; what leaves is the plain [`Topology`] of pjw-core. PUs
//! that are offline are not in its tree; PUs that this process's own cpuset forbids are, or a daemon started
//! inside a cpuset would see a small machine. hwloc is C code that trusts its input: what a user can influence is
//! looked through first. See docs/adr/0001-hwloc-binding.md for the choice of the binding.

mod devices;
mod document;
mod nesting;
mod plain;
mod synthetic;

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use hwlocality::Topology as Hwloc;
use hwlocality::topology::builder::{BuildFlags, TopologyBuilder, TypeFilter};
use pjw_core::topology::{Topology, TopologyError};
use thiserror::Error;

pub use document::Flaw;
pub use synthetic::Nonsense;

/// The most PUs of a machine that is read from a file or made up.
pub const MOST_PUS: u32 = 65_536;
/// The largest file: 8,192 PUs take about 100 MB.
const MOST_BYTES: u64 = 256 << 20;
/// Parts of hwloc that start drivers and runtimes of GPUs to learn their names. A daemon doesn't wake those.
const LEFT_ASLEEP: [&str; 6] = ["cuda", "nvml", "rsmi", "levelzero", "opencl", "gl"];

/// Where a topology comes from.
#[derive(Debug, Clone, Copy)]
pub enum TopologySource<'a> {
    /// This machine.
    Live,
    /// A file that `lstopo FILE.xml` wrote.
    Xml(&'a Path),
    /// hwloc's synthetic form, as in `pack:2 l3:2 core:4 pu:2`.
    Synthetic(&'a str),
}

/// Why there is no topology.
#[derive(Debug, Error)]
pub enum TopologyFault {
    /// The live machine can't be read.
    #[error("hwloc can't read this machine's topology: {0}; lstopo (package hwloc) shows what it sees")]
    Live(String),
    /// A file can't be read.
    #[error("can't read the topology in {path}: {why}; write one with: lstopo FILE.xml", path = path.display())]
    Xml {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: FileFault,
    },
    /// A synthetic string that makes no sense, or too large a machine.
    #[error("{text:?} is not a synthetic topology: {why}; write it as in \"pack:2 l3:2 core:4 pu:2\"")]
    Synthetic {
        /// The string, cut to a readable length.
        text: String,
        /// What is wrong with it.
        why: Nonsense,
    },
    /// hwloc's picture makes no machine.
    #[error("hwloc's topology of {what} makes no machine: {why}; lstopo (package hwloc) shows what it sees")]
    NoMachine {
        /// Where it came from.
        what: String,
        /// What is wrong with it.
        why: TopologyError,
    },
}

/// What is wrong with a file.
#[derive(Debug, Error)]
pub enum FileFault {
    /// The system's words.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// Nothing is in it.
    #[error("it is empty")]
    Empty,
    /// Too much is in it.
    #[error("it is larger than {} MiB, which no machine needs", MOST_BYTES >> 20)]
    Gigantic,
    /// It is no text.
    #[error("it is no text: byte {0} belongs to no character")]
    NotText(usize),
    /// It is no topology.
    #[error(transparent)]
    Document(#[from] Flaw),
    /// It looks like one, and hwloc can't make sense of it.
    #[error("it is not an hwloc 2 XML file, or it is damaged: hwloc refuses what it describes")]
    Refused,
}

/// Loads a topology.
///
/// # Errors
/// If the source can't be read, or holds no core.
pub fn load(source: TopologySource<'_>) -> Result<Topology, TopologyFault> {
    let (hwloc, what) = match source {
        TopologySource::Live => {
            let live = builder().and_then(|builder| build(quietly(builder)));
            (live.map_err(TopologyFault::Live)?, "this machine".to_owned())
        }
        TopologySource::Xml(path) => {
            let fault = |why| TopologyFault::Xml { path: path.to_owned(), why };
            (from_file(path).map_err(fault)?, path.display().to_string())
        }
        TopologySource::Synthetic(text) => {
            let shown: String = text.chars().take(80).collect();
            let fault = |why| TopologyFault::Synthetic { text: shown.clone(), why };
            synthetic::check(text).map_err(fault)?;
            let made = builder().and_then(|builder| builder.from_synthetic(text).map_err(|e| e.to_string()));
            (made.and_then(build).map_err(|_| fault(Nonsense::Refused))?, format!("{shown:?}"))
        }
    };
    plain::machine(&hwloc).map_err(|why| TopologyFault::NoMachine { what, why })
}

fn from_file(path: &Path) -> Result<Hwloc, FileFault> {
    let text = text_of(path)?;
    document::check(&text)?;
    let with_text = builder().and_then(|builder| builder.from_xml(&text).map_err(|error| error.to_string()));
    with_text.and_then(build).map_err(|_| FileFault::Refused)
}

fn text_of(path: &Path) -> Result<String, FileFault> {
    let mut bytes = Vec::new();
    File::open(path)?.take(MOST_BYTES + 1).read_to_end(&mut bytes)?;
    if bytes.is_empty() {
        return Err(FileFault::Empty);
    }
    if bytes.len() as u64 > MOST_BYTES {
        return Err(FileFault::Gigantic);
    }
    String::from_utf8(bytes).map_err(|error| FileFault::NotText(error.utf8_error().valid_up_to()))
}

fn builder() -> Result<TopologyBuilder, String> {
    let all_pus = TopologyBuilder::new().with_flags(BuildFlags::INCLUDE_DISALLOWED);
    let with_devices = all_pus.map_err(|error| error.to_string())?;
    with_devices.with_io_type_filter(TypeFilter::KeepImportant).map_err(|error| error.to_string())
}

/// Without what isn't worth a start of a driver; a part that this hwloc doesn't have is left out anyway.
fn quietly(mut builder: TopologyBuilder) -> TopologyBuilder {
    for part in LEFT_ASLEEP {
        match builder.without_component(part) {
            Ok(without) => builder = without,
            Err(_) => return self::builder().unwrap_or_default(),
        }
    }
    builder
}

fn build(builder: TopologyBuilder) -> Result<Hwloc, String> {
    builder.build().map_err(|error| error.to_string())
}

#[cfg(test)]
#[path = "topology/tests.rs"]
mod tests;
