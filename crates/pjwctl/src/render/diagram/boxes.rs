//! The boxes of the drawing: one for each part of the machine, with its texts and the boxes inside.

use pjw_core::cpuset::{CpuSet, Pu};
use pjw_ipc::wire::{Device, Domain, Status, Topology};

use super::super::core_map::{Holder, PuHolders, job_symbol};
use super::super::text::{escape_control_characters, shorten_cpu_list};
use super::super::topology::{device_class_and_names, domain_name, memory_size_text};
use super::svg::{FillStyle, Svg, truncate_text};

/// What a box of the drawing stands for: the whole machine, or a part of the machine such as a cache or a core.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum BoxKind {
    /// The whole machine. It has no border.
    Machine,
    /// A package.
    Package,
    /// A die.
    Die,
    /// A NUMA node with its PUs.
    Node,
    /// A NUMA node that is memory without CPUs.
    Memory,
    /// A cache.
    Cache,
    /// A core.
    Core,
    /// A PU.
    Pu,
    /// A PU that the daemon's own cpuset excludes.
    Forbidden,
    /// A device.
    Device,
    /// PUs that are offline.
    Offline,
}

/// The font size of a box of the drawing, the height of its header, and the distances inside the box. All values are in
/// pixels.
#[derive(Debug, Clone, Copy)]
pub(super) struct Metrics {
    /// The height of the header.
    pub(super) header: u32,
    /// The font size of the header.
    pub(super) text: u32,
    /// The distance between the border and the contents.
    pub(super) padding: u32,
    /// The distance between the boxes inside.
    pub(super) gap: u32,
}

/// A group of boxes inside a larger box of the drawing. The boxes of a group are placed together, in a grid or in rows.
#[derive(Debug, Default)]
pub(super) struct BoxGroup {
    pub(super) boxes: Vec<DiagramBox>,
    /// The boxes are placed one after the other instead of in a grid.
    pub(super) flows: bool,
    /// Each box is as wide as the group.
    pub(super) stretch: bool,
    /// The number of columns, if the shape of the grid is given.
    pub(super) columns: Option<usize>,
}

/// A box of the drawing, which stands for a part of the machine. Contains the texts, the size and the position of the
/// box, and the boxes inside.
#[derive(Debug)]
pub(super) struct DiagramBox {
    kind: BoxKind,
    fill_style: FillStyle,
    pub(super) label: String,
    pub(super) note: String,
    hint: String,
    pub(super) groups: Vec<BoxGroup>,
    /// The position inside the outer box.
    pub(super) x: u32,
    pub(super) y: u32,
    pub(super) width: u32,
    pub(super) height: u32,
}

/// The state of the construction of the boxes.
struct Builder<'a> {
    topology: &'a Topology,
    holders_and_status: Option<(&'a PuHolders, &'a Status)>,
    forbidden: CpuSet,
    /// The width of a PU's box, enough for the largest PU number.
    cell: u32,
}

impl DiagramBox {
    /// Makes the box of the whole machine, which contains the boxes of all its parts. If `holders_and_status` is
    /// `Some`, the boxes show which jobs hold the PUs (logical CPUs). Sizes and positions are not computed yet.
    pub(super) fn machine(topology: &Topology, holders_and_status: Option<(&PuHolders, &Status)>) -> Self {
        let largest = topology.cpus.parse::<CpuSet>().unwrap_or_default().last().unwrap_or(Pu(0));
        let digits = u32::try_from(largest.to_string().len()).unwrap_or(5);
        let forbidden = topology.disallowed.parse().unwrap_or_default();
        let builder = Builder { topology, holders_and_status, forbidden, cell: 8 + 6 * digits.max(2) };
        let mut devices: Vec<&Device> = topology.devices.iter().collect();
        let mut machine = DiagramBox::new(BoxKind::Machine, String::new(), "the machine".to_owned());
        builder.add_parts(&mut machine, &topology.tree, &[], &mut devices);
        machine.groups.extend(flow_group(devices.into_iter().map(device_box)));
        if !topology.offline.is_empty() {
            let offline = format!("offline or hidden: CPUs {}", shorten_cpu_list(&topology.offline, 40));
            let hint = format!("offline or hidden: CPUs {}", escape_control_characters(&topology.offline));
            machine.groups.push(BoxGroup {
                boxes: vec![DiagramBox::new(BoxKind::Offline, offline, hint)],
                flows: true,
                stretch: true,
                columns: None,
            });
        }
        machine
    }

    /// Makes a box without inner boxes, size and position. `label` is the text in the box, and `hint` the text that a
    /// viewer shows when the pointer is over the box.
    fn new(kind: BoxKind, label: String, hint: String) -> Self {
        let fill = match kind {
            BoxKind::Machine | BoxKind::Core | BoxKind::Pu | BoxKind::Forbidden => "#ffffff",
            BoxKind::Package => "#eceff1",
            BoxKind::Die => "#f4f6f7",
            BoxKind::Node => "#f7f3ea",
            BoxKind::Memory => "#efe3c4",
            BoxKind::Cache => "#fbfbfb",
            BoxKind::Device => "#e6efe0",
            BoxKind::Offline => "#c9c9c9",
        };
        let (fill_style, note, groups) = (FillStyle::plain(fill), String::new(), Vec::new());
        Self { kind, fill_style, label, note, hint, groups, x: 0, y: 0, width: 0, height: 0 }
    }

    /// Returns the font size, the height of the header and the distances of this box. They depend only on the kind of
    /// the box.
    pub(super) fn metrics(&self) -> Metrics {
        let (header, text, padding, gap) = match self.kind {
            BoxKind::Machine => (0, 11, 0, 10),
            BoxKind::Package | BoxKind::Die | BoxKind::Node => (20, 11, 7, 7),
            BoxKind::Cache => (17, 10, 5, 4),
            BoxKind::Core => (13, 8, 3, 2),
            BoxKind::Pu | BoxKind::Forbidden => (15, 9, 0, 0),
            BoxKind::Memory | BoxKind::Device | BoxKind::Offline => (17, 10, 6, 0),
        };
        Metrics { header, text, padding, gap }
    }

    /// Draws this box and all boxes inside it into `svg`. `x` and `y` are the position of the upper left corner of the
    /// outer box, in pixels.
    pub(super) fn draw(&self, svg: &mut Svg, x: u32, y: u32) {
        let (at, size) = ((x + self.x, y + self.y), (self.width, self.height));
        svg.begin_group(&self.hint);
        let metrics = self.metrics();
        match self.kind {
            BoxKind::Machine => {}
            BoxKind::Pu => svg.rect_with_text(at, size, &self.fill_style, &self.label),
            BoxKind::Forbidden => {
                svg.rect_with_text(at, size, &self.fill_style, &self.label);
                svg.rect(
                    at,
                    size,
                    &FillStyle::plain("none"),
                    r##"stroke="#b00020" stroke-dasharray="3 2""##,
                    0,
                );
            }
            _ => {
                let (line, corner_radius) = self.border();
                svg.rect(at, size, &self.fill_style, line, corner_radius);
                let right = at.0 + size.0 - metrics.padding - 1;
                let base = at.1 + metrics.header - (metrics.header - metrics.text).div_ceil(2) - 1;
                let label = (self.label.as_str(), self.note.as_str());
                svg.box_header(
                    (at.0 + metrics.padding + 1, base),
                    right,
                    metrics.text,
                    label,
                    &self.fill_style,
                );
            }
        }
        for child in self.groups.iter().flat_map(|group| &group.boxes) {
            child.draw(svg, at.0, at.1);
        }
        svg.end_group();
    }

    /// The number of boxes inside.
    fn box_count(&self) -> usize {
        self.groups.iter().map(|group| group.boxes.len()).sum()
    }

    /// Returns the SVG attributes of the border of this box, and the radius of its corners in pixels.
    fn border(&self) -> (&'static str, u32) {
        match self.kind {
            BoxKind::Package => (r##"stroke="#455a64" stroke-width="2""##, 0),
            BoxKind::Die => (r##"stroke="#78909c" stroke-dasharray="6 3""##, 0),
            BoxKind::Node | BoxKind::Memory => (r##"stroke="#a08a4f""##, 0),
            BoxKind::Cache => (r##"stroke="#8a8a8a""##, 0),
            BoxKind::Device => (r##"stroke="#5d7a4a""##, 7),
            _ => (r##"stroke="#b0b0b0""##, 0),
        }
    }
}

impl Builder<'_> {
    /// Adds boxes for `parts` (parts of the machine, such as packages or cores) to the box `outer`. `path` has the
    /// names of the parts that enclose `parts`. `devices` has the devices that have no box yet: each that belongs to
    /// one of the parts gets a box inside the box of this part, and is removed from `devices`.
    fn add_parts(
        &self,
        outer: &mut DiagramBox,
        parts: &[Domain],
        path: &[String],
        devices: &mut Vec<&Device>,
    ) {
        let is_memory = |part: &&Domain| part.kind == "numa_node" && part.children.is_empty();
        let memory = parts.iter().filter(is_memory).map(memory_node_box);
        let mut main: Vec<BoxGroup> = Vec::new();
        for part in parts.iter().filter(|part| !is_memory(part)) {
            let child = if part.kind == "core" {
                self.core_box(part, path)
            } else {
                self.domain_box(part, path, devices)
            };
            // Cores of one size form one group. A grid of different sizes would have many gaps.
            let matches = |group: &BoxGroup| {
                let last = group.boxes.last();
                part.kind != "core" || last.is_some_and(|last| last.box_count() == child.box_count())
            };
            match main.last_mut().filter(|group| matches(group)) {
                Some(group) => group.boxes.push(child),
                None => main.push(BoxGroup { boxes: vec![child], ..BoxGroup::default() }),
            }
        }
        outer.groups.extend(main);
        outer.groups.extend(flow_group(memory));
    }

    /// Makes the box of a package, die, NUMA node or cache, with the boxes of its inner parts. `path` has the names
    /// of the enclosing parts. `devices` has the devices that have no box yet. A device that belongs to this part,
    /// but to none of its inner parts, gets a box directly in the new box. All devices that got a box are removed
    /// from `devices`. The box of a cache gets no devices of its own.
    fn domain_box(&self, part: &Domain, path: &[String], devices: &mut Vec<&Device>) -> DiagramBox {
        let kind = match part.kind.as_str() {
            "package" => BoxKind::Package,
            "die" => BoxKind::Die,
            "numa_node" => BoxKind::Node,
            _ => BoxKind::Cache,
        };
        let own = domain_name(part);
        let memory = memory_suffix(part);
        let cores = core_count(part);
        let free = part.fits.map_or_else(String::new, |fits| format!("; {fits} of {cores} cores free"));
        let hint = format!("{own}: CPUs {}{memory}{free}", escape_control_characters(&part.cpus));
        let mut new_box = DiagramBox::new(kind, format!("{own}{memory}"), hint);
        new_box.note = part.fits.map_or_else(String::new, |fits| format!("{fits}/{cores} free"));
        let mut path = path.to_vec();
        path.push(own);
        self.add_parts(&mut new_box, &part.children, &path, devices);
        if kind != BoxKind::Cache {
            let cpus = part.cpus.parse::<CpuSet>().unwrap_or_default();
            let is_here = |device: &Device| {
                let near = device.cpus.parse::<CpuSet>().unwrap_or_default();
                !near.is_empty() && near.is_subset(&cpus)
            };
            let here: Vec<&Device> = devices.iter().copied().filter(|device| is_here(device)).collect();
            devices.retain(|device| !is_here(device));
            new_box.groups.extend(flow_group(here.into_iter().map(device_box)));
        }
        new_box
    }

    /// Makes the box of a core, with the boxes of its PUs (logical CPUs). `path` has the names of the enclosing parts.
    fn core_box(&self, part: &Domain, path: &[String]) -> DiagramBox {
        let pus: CpuSet = part.cpus.parse().unwrap_or_default();
        let kind = part.core_kind.and_then(|at| self.topology.core_kinds.get(at as usize));
        let kind = kind.map(|kind| escape_control_characters(&kind.name)).unwrap_or_default();
        let initial = kind.chars().next().map(|c| format!(" {}", c.to_uppercase())).unwrap_or_default();
        let of_kind = if kind.is_empty() { String::new() } else { format!(" ({kind})") };
        let mut path = path.to_vec();
        path.push(format!("core {}{of_kind}", part.number));
        path.reverse();
        let place = path.join(", ");
        let hint = format!("{place}: CPUs {}", escape_control_characters(&part.cpus));
        let mut new_box = DiagramBox::new(BoxKind::Core, format!("C{}{initial}", part.number), hint);
        if let Some((holders, _)) = self.holders_and_status {
            let holder = holders.holder_of_core(&pus);
            new_box.note = match holder {
                Holder::Job(n) => job_symbol(n).to_string(),
                Holder::SeveralJobs | Holder::Lent => holder.symbol().0.to_string(),
                _ => String::new(),
            };
            if holders.pus_by_holder(&pus).len() == 1 {
                new_box.fill_style = FillStyle::for_holder(holder);
            }
        }
        let cells: Vec<DiagramBox> = pus.iter().map(|pu| self.pu_box(pu, &place)).collect();
        let columns = if cells.len() > 3 { cells.len().div_ceil(2) } else { cells.len() };
        new_box.groups.push(BoxGroup { boxes: cells, columns: Some(columns), ..BoxGroup::default() });
        new_box
    }

    /// Makes the box of the PU (logical CPU) `pu`, with its number. `place` is the text that names the core of the PU
    /// and the enclosing parts.
    fn pu_box(&self, pu: Pu, place: &str) -> DiagramBox {
        let is_forbidden = self.forbidden.contains(pu);
        let mut hint = format!("CPU {pu}: {place}");
        if is_forbidden {
            hint.push_str("; forbidden by the cpuset of pjwd");
        }
        let kind = if is_forbidden { BoxKind::Forbidden } else { BoxKind::Pu };
        let mut new_box = DiagramBox::new(kind, pu.to_string(), String::new());
        if let Some((holders, status)) = self.holders_and_status {
            let holder = holders.holder_of_core(&pu.into());
            hint.push_str("; ");
            hint.push_str(&holder.name(&status.jobs));
            new_box.fill_style = FillStyle::for_holder(holder);
        }
        new_box.hint = hint;
        (new_box.width, new_box.height) = (self.cell, 15);
        new_box
    }
}

/// Makes the box of a NUMA node that contains no other parts of the machine, only memory.
fn memory_node_box(part: &Domain) -> DiagramBox {
    let size = memory_suffix(part);
    let near = if part.cpus.is_empty() {
        "no CPUs".to_owned()
    } else {
        format!("CPUs {}", escape_control_characters(&part.cpus))
    };
    let hint = format!("{}{size}: memory alone, near {near}", domain_name(part));
    DiagramBox::new(BoxKind::Memory, format!("{}{size}, memory alone", domain_name(part)), hint)
}

/// Makes the box of a device, such as a GPU.
fn device_box(device: &Device) -> DiagramBox {
    let parts = [
        device_class_and_names(device),
        escape_control_characters(&device.address),
        escape_control_characters(&device.model),
    ];
    let parts: Vec<String> = parts.into_iter().filter(|word| !word.is_empty()).collect();
    let hint = format!("{}; near CPUs {}", parts.join("; "), escape_control_characters(&device.cpus));
    DiagramBox::new(BoxKind::Device, truncate_text(&device_class_and_names(device), 28), hint)
}

/// Returns the memory size of `part` with a comma before it, such as `, 32 GiB`. Empty if the part has no memory.
fn memory_suffix(part: &Domain) -> String {
    if part.memory_bytes == 0 {
        return String::new();
    }
    format!(", {}", memory_size_text(part.memory_bytes))
}

/// Puts `boxes` into a group in which they are placed one after the other. `None` if there are no boxes.
fn flow_group(boxes: impl Iterator<Item = DiagramBox>) -> Option<BoxGroup> {
    let boxes: Vec<DiagramBox> = boxes.collect();
    (!boxes.is_empty()).then(|| BoxGroup { boxes, flows: true, ..BoxGroup::default() })
}

/// Returns the number of cores in `part`.
fn core_count(part: &Domain) -> usize {
    if part.kind == "core" { 1 } else { part.children.iter().map(core_count).sum() }
}
