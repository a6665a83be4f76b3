//! The parts of a machine besides cores and domains: dies, kinds of core, PCI devices, and PUs that can't be
//! used.

use serde::{Deserialize, Serialize};
use strum::IntoStaticStr;

use crate::basics::{CpuSet, prelude::*};

/// Details of a machine in addition to its cores, caches, NUMA nodes and packages. These are its dies, the kinds of its
/// cores, its PCI devices, and the PUs (logical CPUs) that pjw can't use. A PU can't be used if it is offline, or if it
/// is outside the cpuset of the process that read the topology. A list in this type is empty if the machine has no such
/// parts, or if they could not be read.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct MachineDetails {
    /// The dies of the machine. Empty if each package consists of one die.
    pub dies: Vec<Die>,
    /// The kinds of core, the most energy-efficient kind first. [`Core::kind_index`](super::topology::Core::kind_index)
    /// is an index into this list. Empty if the kinds are unknown. If all cores are of the same kind, the list is empty
    /// or has this one kind.
    #[serde(rename = "kinds")]
    pub core_kinds: Vec<CoreKind>,
    /// The PCI devices (GPUs, network cards, disks and others), in the order in which hwloc lists them.
    pub devices: Vec<Device>,
    /// The PUs of the machine that are offline, or that hwloc could not see for another reason.
    #[serde(rename = "offline")]
    pub unavailable_pus: CpuSet,
    /// The online PUs on which the process that read the topology may not run, because of its cpuset.
    #[serde(rename = "disallowed")]
    pub disallowed_pus: CpuSet,
}

/// A die: one piece of silicon in a package, with its number and its PUs (logical CPUs).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Die {
    /// The number of the die in its package. Dies of different packages may have the same number.
    pub number: u32,
    /// The PUs (logical CPUs) on the die.
    pub cpus: CpuSet,
}

/// A kind of core, such as performance cores or efficiency cores, with the PUs (logical CPUs) of this kind.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CoreKind {
    /// The name of the kind: `performance`, `efficiency`, or a name that the vendor chose.
    pub name: String,
    /// The PUs of this kind, as hwloc reports them. The PUs of one core may be of different kinds. Each PU is
    /// then in the set of its own kind, and the core has the first of these kinds in
    /// [`MachineDetails::core_kinds`].
    pub cpus: CpuSet,
}

/// The class of a device: GPU, coprocessor, network card or storage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, IntoStaticStr)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "kebab-case")]
pub enum DeviceClass {
    /// A graphics processor, including one that is used only for computation.
    Gpu,
    /// A processor card that computes and has no graphics output.
    Coprocessor,
    /// A network card: Ethernet, InfiniBand and similar.
    Network,
    /// A disk or a disk controller.
    Storage,
}

/// A device, such as a GPU or a network card, and the PUs (logical CPUs) that are nearest to the device. A user can
/// request cores near a device for a job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    /// The class of the device, such as GPU or network card.
    pub class: DeviceClass,
    /// The names of the device in the operating system. A GPU may have two, `card0` and `cuda0`. Empty if no
    /// driver has named the device.
    pub names: Vec<String>,
    /// The PCI address of the device, such as `0000:03:00.0`. Empty if the device is not on a PCI bus.
    #[serde(rename = "address")]
    pub pci_address: String,
    /// The vendor and the model of the device, as text. Empty if unknown.
    pub model: String,
    /// The PUs that are nearest to the device. Every PU of the machine if all are equally near.
    #[serde(rename = "cpus")]
    pub local_cpus: CpuSet,
    /// The numbers of the NUMA nodes that are nearest to the device, as the kernel numbers them.
    pub numa_nodes: Vec<u32>,
}

impl DeviceClass {
    /// Returns the name of the class in JSON output and in messages between pjwd and its clients, such as
    /// `gpu`.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.into()
    }
}

impl Device {
    /// Whether `name_or_address` is one of the names of the device, or its PCI address. False if
    /// `name_or_address` is empty.
    #[must_use]
    pub fn has_name(&self, name_or_address: &str) -> bool {
        !name_or_address.is_empty()
            && (self.pci_address == name_or_address || self.names.iter().any(|name| name == name_or_address))
    }
}
