//! The topology of a machine, from hwloc: the live machine, an XML file, or a synthetic description.
//!
//! Types of hwloc are private to this module. The result is a [`Topology`] of pjw-core. Offline PUs are not
//! part of it. PUs outside this process's own cpuset are part of it; otherwise a daemon started in a cpuset
//! would see a smaller machine. hwloc is C code that trusts its input, so user input is validated first.
//! docs/adr/0001-hwloc-binding.md explains the choice of the binding.

mod convert;
mod devices;
mod document;
mod limits;
mod nesting;
mod plain;
mod synthetic;

use std::error::Error;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use hwlocality::Topology as Hwloc;
use hwlocality::topology::builder::{BuildFlags, TopologyBuilder, TypeFilter};
use pjw_core::topology::{Topology, TopologyError};

pub use document::TopologyXmlError;
pub use limits::MAX_PUS;
pub use synthetic::SyntheticTopologyError;

/// Maximum size of a file, in bytes. 8,192 PUs take about 100 MB.
const MAX_BYTES: u64 = 256 << 20;
/// Components of hwloc that start GPU runtimes to read device names. The daemon does not load them.
const SKIPPED_COMPONENTS: [&str; 6] = ["cuda", "nvml", "rsmi", "levelzero", "opencl", "gl"];

/// The source from which the topology of a machine is read: this machine itself, an XML file or a synthetic
/// description.
#[derive(Debug, Clone, Copy)]
pub enum TopologySource<'a> {
    /// The machine on which this process runs.
    Live,
    /// The path of an XML file that `lstopo FILE.xml` wrote.
    Xml(&'a Path),
    /// A synthetic description of a machine in hwloc's format, such as `pack:2 l3:2 core:4 pu:2`.
    Synthetic(&'a str),
}

/// Why the topology of a machine can't be loaded.
#[derive(Debug, thiserror::Error)]
pub enum TopologyLoadError {
    /// hwloc can't read the topology of the live machine. The text is the error of hwloc.
    #[error("hwloc can't read this machine's topology: {0}; lstopo (package hwloc) shows what it sees")]
    Live(String),
    /// The topology file can't be read or is invalid.
    #[error("can't read the topology in {path}: {why}; write one with: lstopo FILE.xml", path = path.display())]
    Xml {
        /// The path of the file.
        path: PathBuf,
        /// The reason.
        why: TopologyFileError,
    },
    /// The synthetic description is invalid, or describes a machine with too many PUs.
    #[error("{text:?} is not a synthetic topology: {why}; write it as in \"pack:2 l3:2 core:4 pu:2\"")]
    Synthetic {
        /// The description, cut to 80 characters.
        text: String,
        /// The reason.
        why: SyntheticTopologyError,
    },
    /// hwloc read the source, but pjw can't use the resulting topology, for example because it has no core.
    #[error("hwloc's topology of {what} is not usable: {why}; lstopo (package hwloc) shows what it sees")]
    Unusable {
        /// The source of the topology, as text: `this machine`, the path of the file, or the synthetic
        /// description.
        what: String,
        /// The reason.
        why: TopologyError,
    },
}

/// Why a topology file (the XML that `lstopo` writes) can't be used.
#[derive(Debug, thiserror::Error)]
pub enum TopologyFileError {
    /// The file can't be read.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The file is empty.
    #[error("it is empty")]
    Empty,
    /// The file is larger than 256 MiB.
    #[error("it is larger than {} MiB", MAX_BYTES >> 20)]
    TooLarge,
    /// The file is not valid UTF-8. The field is the offset of the first invalid byte.
    #[error("it is not UTF-8 text: byte {0} is invalid")]
    NotUtf8(usize),
    /// The content of the file is not a valid topology. The error names the line.
    #[error(transparent)]
    InvalidDocument(#[from] TopologyXmlError),
    /// The content of the file passed the checks of pjw, but hwloc rejects it.
    #[error("it is not an hwloc 2 XML file, or it is damaged: hwloc rejects its content")]
    RejectedByHwloc,
}

/// Reads the topology of a machine from `source`: its packages, NUMA nodes, caches, cores and PUs (logical
/// CPUs).
///
/// # Errors
/// If the source can't be read or is invalid. Also if pjw can't use the topology, for example because it has no
/// core.
pub fn load_topology(source: TopologySource<'_>) -> Result<Topology, TopologyLoadError> {
    let (hwloc, what) = match source {
        TopologySource::Live => {
            let live = live().map_err(|error| TopologyLoadError::Live(error.to_string()))?;
            (live, "this machine".to_owned())
        }
        TopologySource::Xml(path) => {
            let fault = |why| TopologyLoadError::Xml { path: path.to_owned(), why };
            (from_file(path).map_err(fault)?, path.display().to_string())
        }
        TopologySource::Synthetic(text) => {
            let shown: String = text.chars().take(80).collect();
            let fault = |why| TopologyLoadError::Synthetic { text: shown.clone(), why };
            synthetic::check_description(text).map_err(fault)?;
            let made = from_synthetic(text).map_err(|_| fault(why_rejected(text)))?;
            (made, format!("{shown:?}"))
        }
    };
    plain::convert_topology(&hwloc).map_err(|why| TopologyLoadError::Unusable { what, why })
}

/// Returns why hwloc rejects `text`, a synthetic description that [`synthetic::check_description`] accepts.
fn why_rejected(text: &str) -> SyntheticTopologyError {
    match from_synthetic(&format!("{text} pu:1")) {
        Ok(_) => SyntheticTopologyError::NoPuLevel,
        Err(_) => SyntheticTopologyError::RejectedByHwloc,
    }
}

fn from_file(path: &Path) -> Result<Hwloc, TopologyFileError> {
    let text = read_text(path)?;
    document::check_topology_xml(&text)?;
    from_xml(&text).map_err(|_| TopologyFileError::RejectedByHwloc)
}

/// Reads the text of the topology file at `path`.
///
/// # Errors
/// If the file can't be read, is empty, is larger than 256 MiB, or is not UTF-8.
fn read_text(path: &Path) -> Result<String, TopologyFileError> {
    let mut bytes = Vec::new();
    File::open(path)?.take(MAX_BYTES + 1).read_to_end(&mut bytes)?;
    if bytes.is_empty() {
        return Err(TopologyFileError::Empty);
    }
    if bytes.len() as u64 > MAX_BYTES {
        return Err(TopologyFileError::TooLarge);
    }
    String::from_utf8(bytes).map_err(|error| TopologyFileError::NotUtf8(error.utf8_error().valid_up_to()))
}

fn live() -> Result<Hwloc, Box<dyn Error>> {
    Ok(without_gpu_runtimes(builder()?).build()?)
}

fn from_xml(text: &str) -> Result<Hwloc, Box<dyn Error>> {
    Ok(builder()?.from_xml(text)?.build()?)
}

fn from_synthetic(text: &str) -> Result<Hwloc, Box<dyn Error>> {
    Ok(builder()?.from_synthetic(text)?.build()?)
}

fn builder() -> Result<TopologyBuilder, Box<dyn Error>> {
    let all_pus = TopologyBuilder::new().with_flags(BuildFlags::INCLUDE_DISALLOWED)?;
    Ok(all_pus.with_io_type_filter(TypeFilter::KeepImportant)?)
}

/// Excludes the components that start GPU runtimes. If that fails, uses the default components.
fn without_gpu_runtimes(mut builder: TopologyBuilder) -> TopologyBuilder {
    for part in SKIPPED_COMPONENTS {
        match builder.without_component(part) {
            Ok(without) => builder = without,
            Err(_) => return self::builder().unwrap_or_default(),
        }
    }
    builder
}

#[cfg(test)]
mod tests;
