//! What a machine has beside its cores and the domains they are in: dies, kinds of core, devices, and the PUs
//! that nobody can use.

use serde::{Deserialize, Serialize};

use crate::cpuset::CpuSet;

/// All of it. Empty where nobody looked, or nothing is there.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Fittings {
    /// Pieces of silicon that packages are made of, where a package has several.
    pub dies: Vec<Die>,
    /// The kinds of core, the most efficient first; a core's `kind` is a place in this list. Empty where all
    /// cores are alike as far as anybody knows.
    pub kinds: Vec<CoreKind>,
    /// Graphics and network cards, disks and the like, in the machine's order.
    pub devices: Vec<Device>,
    /// PUs that the machine has and that don't run: switched off, or hidden from whoever saved the topology.
    pub offline: CpuSet,
    /// PUs of the machine that this process's own cpuset forbids.
    pub disallowed: CpuSet,
}

/// A piece of silicon in a package.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Die {
    /// Its number, which may be that of a die of another package too.
    pub number: u32,
    /// Its PUs.
    pub cpus: CpuSet,
}

/// A kind of core.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CoreKind {
    /// What it is called: `performance`, `efficiency`, or what the vendor says.
    pub name: String,
    /// Its PUs. On odd machines siblings are of different kinds; the core counts as of the first.
    pub cpus: CpuSet,
}

/// What a device is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DeviceClass {
    /// It draws, or computes in parallel.
    Gpu,
    /// It computes, and draws nothing.
    Coprocessor,
    /// It speaks to other machines: Ethernet, InfiniBand and their like.
    Network,
    /// It keeps data.
    Storage,
}

/// A device and where it hangs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    /// What it is for.
    pub class: DeviceClass,
    /// What the system calls it: one card may be `card0` and `cuda0`. Empty where no driver has named it.
    pub names: Vec<String>,
    /// Its PCI address, as in `0000:03:00.0`; empty where it hangs on no PCI bus.
    pub address: String,
    /// Who made it and what it is, where that is known.
    pub model: String,
    /// The PUs near it; all of the machine's where no place is nearer than another.
    pub cpus: CpuSet,
    /// The NUMA nodes near it.
    pub numa_nodes: Vec<u32>,
}

impl DeviceClass {
    /// Its name on the wire.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            DeviceClass::Gpu => "gpu",
            DeviceClass::Coprocessor => "coprocessor",
            DeviceClass::Network => "network",
            DeviceClass::Storage => "storage",
        }
    }
}

impl Device {
    /// Whether that is one of its names, or its PCI address.
    #[must_use]
    pub fn is_called(&self, name: &str) -> bool {
        !name.is_empty() && (self.address == name || self.names.iter().any(|own| own == name))
    }
}
