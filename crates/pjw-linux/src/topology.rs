//! The machine, as hwloc sees it: the live one, an XML file, or a synthetic string.
//!
//! hwloc stays behind this file; what leaves is the plain [`Topology`] of pjw-core. PUs that are offline are not
//! in it; PUs that this process's own cpuset forbids are, or a daemon started inside a cpuset would see a small
//! machine. See docs/adr/0001-hwloc-binding.md for the choice of the binding.

use std::path::{Path, PathBuf};

use hwlocality::Topology as Hwloc;
use hwlocality::object::TopologyObject;
use hwlocality::object::attributes::ObjectAttributes;
use hwlocality::object::types::ObjectType;
use hwlocality::topology::builder::{BuildFlags, TopologyBuilder};
use pjw_core::cpuset::{CpuSet, Pu};
use pjw_core::topology::{Core, Domain, Level, Topology, TopologyError};
use thiserror::Error;

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
        /// hwloc's words, or the system's.
        why: String,
    },
    /// A synthetic string that makes no sense.
    #[error("{text:?} is not a synthetic topology: write it as in \"pack:2 l3:2 core:4 pu:2\"")]
    Synthetic {
        /// The string, cut to a readable length.
        text: String,
    },
    /// hwloc's picture makes no machine.
    #[error("hwloc's topology makes no machine")]
    NoMachine(#[source] TopologyError),
}

/// Loads a topology.
///
/// # Errors
/// If the source can't be read, or holds no core.
pub fn load(source: TopologySource<'_>) -> Result<Topology, TopologyFault> {
    let hwloc = match source {
        TopologySource::Live => builder().and_then(build).map_err(TopologyFault::Live),
        TopologySource::Xml(path) => {
            let fault = |why: String| TopologyFault::Xml { path: path.to_owned(), why };
            std::fs::File::open(path).map_err(|error| fault(error.to_string()))?;
            let with_file =
                builder().and_then(|builder| builder.from_xml_file(path).map_err(|e| e.to_string()));
            with_file
                .and_then(build)
                .map_err(|_| fault("it is not an hwloc 2 XML file, or it is damaged".to_owned()))
        }
        TopologySource::Synthetic(text) => {
            let with_text =
                builder().and_then(|builder| builder.from_synthetic(text).map_err(|e| e.to_string()));
            let shown = text.chars().take(80).collect();
            with_text.and_then(build).map_err(|_| TopologyFault::Synthetic { text: shown })
        }
    }?;
    plain(&hwloc).map_err(TopologyFault::NoMachine)
}

fn builder() -> Result<TopologyBuilder, String> {
    TopologyBuilder::new().with_flags(BuildFlags::INCLUDE_DISALLOWED).map_err(|error| error.to_string())
}

fn build(builder: TopologyBuilder) -> Result<Hwloc, String> {
    builder.build().map_err(|error| error.to_string())
}

/// hwloc's picture as plain data.
fn plain(hwloc: &Hwloc) -> Result<Topology, TopologyError> {
    let kinds = kinds(hwloc);
    let kind_of = |pus: &CpuSet| {
        let rank = kinds.iter().position(|kind| pus.intersects(kind)).unwrap_or(0);
        u32::try_from(rank).unwrap_or(0)
    };
    let mut cores: Vec<Core> = Vec::new();
    let mut placed = CpuSet::new();
    for object in hwloc.objects_with_type(ObjectType::Core) {
        let pus = pus_of(object);
        if !pus.is_empty() {
            placed = placed.union(&pus);
            cores.push(Core { kind: kind_of(&pus), pus });
        }
    }
    // Some virtual machines tell of PUs and not of cores: each is one.
    for object in hwloc.objects_with_type(ObjectType::PU) {
        let pus = pus_of(object).difference(&placed);
        if !pus.is_empty() {
            cores.push(Core { kind: kind_of(&pus), pus });
        }
    }
    let mut domains = Vec::new();
    for (kind, level) in [
        (ObjectType::L3Cache, Level::L3),
        (ObjectType::NUMANode, Level::NumaNode),
        (ObjectType::Package, Level::Package),
    ] {
        for object in hwloc.objects_with_type(kind) {
            let own =
                object.os_index().filter(|_| level != Level::L3).unwrap_or_else(|| object.logical_index());
            let number = u32::try_from(own).unwrap_or(u32::MAX);
            let cpus = pus_of(object);
            // Memory may have no PUs; a cache or package whose PUs are all offline is not there.
            if level == Level::NumaNode || !cpus.is_empty() {
                domains.push(Domain { level, number, cpus, memory_bytes: memory_of(object) });
            }
        }
    }
    Topology::new(cores, domains)
}

fn pus_of(object: &TopologyObject) -> CpuSet {
    object.cpuset().map(|cpus| numbers(cpus.iter_set().map(usize::from))).unwrap_or_default()
}

fn numbers(pus: impl Iterator<Item = usize>) -> CpuSet {
    // An infinite set, which hwloc has for "all", must not be walked to its end.
    pus.map_while(|pu| u32::try_from(pu).ok().map(Pu).filter(|&pu| pu <= Pu::MAX)).collect()
}

fn memory_of(object: &TopologyObject) -> u64 {
    match object.attributes() {
        Some(ObjectAttributes::NUMANode(node)) => node.local_memory().map_or(0, u64::from),
        _ => 0,
    }
}

/// The kinds of core, the most efficient first; none where hwloc knows of no difference.
fn kinds(hwloc: &Hwloc) -> Vec<CpuSet> {
    let kinds = hwloc.cpu_kinds().into_iter().flatten();
    kinds.map(|kind| numbers(kind.cpuset.iter_set().map(usize::from))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn synthetic(text: &str) -> Topology {
        load(TopologySource::Synthetic(text)).unwrap()
    }

    fn counts(topology: &Topology) -> [usize; 5] {
        let count = |level| topology.domains(level).count();
        let (packages, nodes, l3) = (count(Level::Package), count(Level::NumaNode), count(Level::L3));
        [packages, nodes, l3, topology.cores().len(), topology.cpus().len()]
    }

    #[test]
    fn this_machine_loads_and_has_the_pus_that_are_online() {
        let topology = load(TopologySource::Live).unwrap();
        let online = std::fs::read_to_string("/sys/devices/system/cpu/online").unwrap();
        assert_eq!(topology.cpus(), &online.parse().unwrap());
    }

    #[test]
    fn more_than_1024_pus_are_no_difficulty() {
        let topology = synthetic("pack:4 numa:2 l3:8 core:16 pu:2");
        assert_eq!(counts(&topology), [4, 8, 64, 1024, 2048]);
        assert_eq!(topology.cpus().to_string(), "0-2047");
    }

    #[test]
    fn nonsense_is_refused_with_an_example() {
        for text in ["", "pack:two", "core:0", "\0"] {
            let error = load(TopologySource::Synthetic(text)).unwrap_err().to_string();
            assert!(error.contains("write it as in"), "{error}");
        }
    }

    #[test]
    fn missing_and_broken_files_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("machine.xml");
        let error = load(TopologySource::Xml(&path)).unwrap_err().to_string();
        assert!(error.contains("No such file"), "{error}");
        for text in
            ["", "not xml", "<?xml version=\"1.0\"?>\n<topology version=\"2.0\">\n <object type=\"Machine\""]
        {
            std::fs::write(&path, text).unwrap();
            let error = load(TopologySource::Xml(&path)).unwrap_err().to_string();
            assert!(error.contains("not an hwloc 2 XML file"), "{error}");
        }
    }

    #[test]
    fn real_machines_load_and_count_right() {
        let files = [
            ("AMD-19h-Zen4-2xEpyc-9654.xml", [2, 1, 24, 192, 384]),
            ("20em64t-hybrid-1p6c2t+2ca4co1t.xml", [1, 1, 1, 14, 20]),
            ("16em64t-4s2c2t-offlines.xml", [4, 1, 4, 6, 7]),
            ("28intel64-2p2g7c-CoDgroups.xml", [2, 4, 0, 28, 28]),
            ("32amd64-4s2n4c-cgroup2.xml", [1, 2, 2, 6, 6]),
        ];
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/topologies");
        for (file, expected) in files {
            let topology = load(TopologySource::Xml(&dir.join(file))).unwrap();
            let mut found = counts(&topology);
            // Nodes without PUs of their own are memory, not places.
            found[1] = topology.domains(Level::NumaNode).filter(|node| !node.cpus.is_empty()).count();
            assert_eq!(found, expected, "{file}");
        }
    }

    #[test]
    fn performance_cores_rank_above_efficient_ones() {
        let file = "tests/topologies/20em64t-hybrid-1p6c2t+2ca4co1t.xml";
        let topology = load(TopologySource::Xml(&Path::new(env!("CARGO_MANIFEST_DIR")).join(file))).unwrap();
        let fast = topology.cores().iter().filter(|core| core.kind == 1);
        assert!(fast.clone().all(|core| core.pus.len() == 2) && fast.count() == 6);
    }
}
