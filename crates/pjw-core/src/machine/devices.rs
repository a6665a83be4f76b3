//! The parts of a machine besides cores and domains: dies, kinds of core, PCI devices, and PUs that can't be
//! used.

use serde::{Deserialize, Serialize};

use crate::basics::{CpuSet, prelude::*};

/// The parts of a machine besides its cores and domains: dies, kinds of core, and PCI devices such as GPUs and
/// network cards. Empty if the machine has none of these, or if they were not read.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Devices {
    /// The dies, on machines whose packages consist of several. Empty on other machines.
    pub dies: Vec<Die>,
    /// The kinds of core, the most energy-efficient first. [`Core::kind`](super::topology::Core::kind) is an
    /// index into this list. Empty if all cores are of the same kind or the kinds are unknown.
    pub kinds: Vec<CoreKind>,
    /// GPUs, network cards, disks and other devices, in hwloc's order.
    pub devices: Vec<Device>,
    /// PUs of the machine that are offline, or hidden from the process that saved the topology.
    pub offline: CpuSet,
    /// PUs of the machine that the cpuset of the reading process does not allow.
    pub disallowed: CpuSet,
}

/// A die: one piece of silicon in a package, with its number and its PUs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Die {
    /// The number of the die in its package. Dies of different packages may have the same number.
    pub number: u32,
    /// The PUs (logical CPUs) on the die.
    pub cpus: CpuSet,
}

/// A kind of core, such as performance or efficiency cores, with the PUs of all cores of this kind.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CoreKind {
    /// The name: `performance`, `efficiency`, or the vendor's name.
    pub name: String,
    /// The PUs of this kind. If siblings of a core are of different kinds, the core has the kind of its first
    /// PU.
    pub cpus: CpuSet,
}

/// The class of a device: GPU, coprocessor, network card or storage.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, strum::IntoStaticStr,
)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "kebab-case")]
pub enum DeviceClass {
    /// A graphics card, also if it is used to compute.
    Gpu,
    /// A processor card that computes and has no graphics output.
    Coprocessor,
    /// A network card: Ethernet, InfiniBand and similar.
    Network,
    /// A disk or a disk controller.
    Storage,
}

/// A PCI device, such as a GPU or a network card, and the PUs that are near it. Jobs can request cores near a device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    /// The class of the device, such as GPU or network card.
    pub class: DeviceClass,
    /// The names that the system uses for the device; one card may be `card0` and `cuda0`. Empty if no driver
    /// has named the device.
    pub names: Vec<String>,
    /// The PCI address, such as `0000:03:00.0`. Empty if the device is not on a PCI bus.
    pub address: String,
    /// The vendor and the model of the device, as text. Empty if unknown.
    pub model: String,
    /// The PUs near the device. All PUs of the machine if none are nearer than others.
    pub cpus: CpuSet,
    /// The numbers of the NUMA nodes near the device, by the kernel's numbering.
    pub numa_nodes: Vec<u32>,
}

impl DeviceClass {
    /// Returns the name of the class in the JSON output and the protocol, such as `gpu`.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.into()
    }
}

impl Device {
    /// Whether `name` is one of the names of the device, or its PCI address.
    #[must_use]
    pub fn has_name(&self, name: &str) -> bool {
        !name.is_empty() && (self.address == name || self.names.iter().any(|own| own == name))
    }
}
