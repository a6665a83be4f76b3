//! Devices: their names, and the PUs near them.
//!
//! A PCI card has one name for each driver or runtime that uses it (`card0`, `cuda0`). All names on one PCI
//! address are one device. A card without a driver is named by its address.

use hwlocality::Topology as Hwloc;
use hwlocality::object::TopologyObject;
use hwlocality::object::attributes::{ObjectAttributes, PCIDeviceAttributes};
use hwlocality::object::types::{OSDeviceType, ObjectType};
use pjw_core::devices::{Device, DeviceClass};

use super::convert::{pus_of, trimmed_text};

/// Returns the devices in hwloc's topology, such as GPUs and network cards. First the PCI cards, then the other
/// devices, each in the order of hwloc.
pub(super) fn devices(hwloc: &Hwloc) -> Vec<Device> {
    let identity = TopologyObject::global_persistent_index;
    let on_bus = hwloc.objects_with_type(ObjectType::PCIDevice);
    let mut devices: Vec<_> =
        on_bus.filter_map(|object| Some((Some(identity(object)), card(object)?))).collect();
    for object in hwloc.objects_with_type(ObjectType::OSDevice) {
        let Some(class) = class_of_os_device(object) else { continue };
        let name = object.name().map(trimmed_text).filter(|name| !name.is_empty());
        let card = card_of(object);
        let listed = card.and_then(|card| devices.iter_mut().find(|(id, _)| *id == Some(identity(card))));
        if let Some((_, device)) = listed {
            // The class by the driver takes precedence over the PCI class.
            device.class = if device.names.is_empty() { class } else { device.class.min(class) };
            device.names.extend(name);
            continue;
        }
        let address = card.and_then(pci_attributes).map(pci_address).unwrap_or_default();
        let device =
            new_device(object, class, name.into_iter().collect(), address, model(card.unwrap_or(object)));
        devices.push((card.map(identity), device));
    }
    let devices = devices.into_iter().map(|(_, device)| device);
    devices.filter(|device| !(device.names.is_empty() && device.pci_address.is_empty())).collect()
}

/// Returns the device for `object`, if this is a PCI card of a supported class.
fn card(object: &TopologyObject) -> Option<Device> {
    let attributes = pci_attributes(object)?;
    let class = class_on_bus(attributes.class_id())?;
    Some(new_device(object, class, Vec::new(), pci_address(attributes), model(object)))
}

/// Makes a device with the given values. The local PUs and NUMA nodes of the device are those of the nearest object
/// above `object` in hwloc's topology that is no I/O object.
fn new_device(
    object: &TopologyObject,
    class: DeviceClass,
    names: Vec<String>,
    address: String,
    model: String,
) -> Device {
    let near = object.first_non_io_ancestor();
    let cpus = near.map(pus_of).unwrap_or_default();
    let nodes = near.and_then(TopologyObject::nodeset);
    let nodes = nodes.iter().flat_map(|nodes| nodes.iter_set().map(usize::from).take(1024));
    let numa_nodes = nodes.filter_map(|node| u32::try_from(node).ok()).collect();
    Device { class, names, pci_address: address, model, local_cpus: cpus, numa_nodes }
}

/// Returns the PCI card to which the named device `object` belongs.
fn card_of(object: &TopologyObject) -> Option<&TopologyObject> {
    object.first_ancestor_with_type(ObjectType::PCIDevice)
}

fn pci_attributes(object: &TopologyObject) -> Option<PCIDeviceAttributes> {
    match object.attributes() {
        Some(ObjectAttributes::PCIDevice(attributes)) => Some(*attributes),
        _ => None,
    }
}

/// Returns the address of a PCI card, such as `0000:3b:00.0`.
fn pci_address(card: PCIDeviceAttributes) -> String {
    let (domain, bus, device) = (card.domain(), card.bus_id(), card.bus_device());
    format!("{domain:04x}:{bus:02x}:{device:02x}.{:x}", card.function())
}

/// The device class of a PCI class code: 01 storage, 02 network, 03 display, 0b40 and 12 computation, 0c04
/// and 0c06 fabrics.
fn class_on_bus(class: u16) -> Option<DeviceClass> {
    match (class >> 8, class & 0xff) {
        (0x01, _) => Some(DeviceClass::Storage),
        (0x02, _) | (0x0c, 0x04 | 0x06) => Some(DeviceClass::Network),
        (0x03, _) => Some(DeviceClass::Gpu),
        (0x0b, 0x40) | (0x12, _) => Some(DeviceClass::Coprocessor),
        _ => None,
    }
}

/// Returns the class of `object`, if it is a device of the operating system, such as a network interface. `None` if
/// it is not, or if pjw does not use devices of its type.
fn class_of_os_device(object: &TopologyObject) -> Option<DeviceClass> {
    let Some(ObjectAttributes::OSDevice(attributes)) = object.attributes() else { return None };
    match attributes.device_type() {
        OSDeviceType::Storage => Some(DeviceClass::Storage),
        OSDeviceType::GPU => Some(DeviceClass::Gpu),
        OSDeviceType::Network | OSDeviceType::OpenFabrics => Some(DeviceClass::Network),
        OSDeviceType::CoProcessor => Some(DeviceClass::Coprocessor),
        _ => None,
    }
}

/// Vendor and model, such as `NVIDIA Corporation GK210GL [Tesla K80]`. Empty if unknown.
fn model(object: &TopologyObject) -> String {
    let info = |key: &str| object.info(key).map(trimmed_text).filter(|text| !text.is_empty());
    let parts = [info("PCIVendor").or_else(|| info("Vendor")), info("PCIDevice").or_else(|| info("Model"))];
    let parts: Vec<String> = parts.into_iter().flatten().collect();
    parts.join(" ")
}
