//! The boxes: one for each part of the machine, with the words on it and the boxes in it.

use pjw_core::cpuset::{CpuSet, Pu};
use pjw_ipc::wire::{Device, Domain, Status, Topology};

use super::super::core_map::{Holder, Holders, letter};
use super::super::text::{printable, short_list};
use super::super::topology::{classed, memory, name};
use super::ink::{Ink, Paint};
use super::layout::shortened;

/// What a box is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sort {
    /// All of it; it has no border.
    Machine,
    /// A package.
    Package,
    /// A piece of silicon.
    Die,
    /// A NUMA node with its PUs.
    Node,
    /// A NUMA node that is memory alone.
    Memory,
    /// A cache.
    Cache,
    /// A core.
    Core,
    /// A PU.
    Pu,
    /// A PU that the process's own cpuset forbids.
    Forbidden,
    /// A device.
    Device,
    /// PUs that don't run.
    Offline,
}

/// Lengths in a box, in pixels.
#[derive(Debug, Clone, Copy)]
pub(super) struct Metrics {
    /// The height of the line at the top.
    pub(super) header: u32,
    /// The size of its letters.
    pub(super) text: u32,
    /// Between the border and what is inside.
    pub(super) padding: u32,
    /// Between the boxes inside.
    pub(super) gap: u32,
}

/// Boxes that belong together.
#[derive(Debug, Default)]
pub(super) struct Section {
    pub(super) frames: Vec<Frame>,
    /// One after the other instead of in a grid.
    pub(super) flows: bool,
    /// Each as wide as the section.
    pub(super) stretch: bool,
    /// So many columns, if it doesn't matter what shape that gives.
    pub(super) columns: Option<usize>,
}

/// A box.
#[derive(Debug)]
pub(super) struct Frame {
    sort: Sort,
    paint: Paint,
    pub(super) label: String,
    pub(super) note: String,
    hint: String,
    pub(super) sections: Vec<Section>,
    /// Its place in the box around it.
    pub(super) x: u32,
    pub(super) y: u32,
    pub(super) width: u32,
    pub(super) height: u32,
}

/// What is known while boxes are made.
struct Maker<'a> {
    topology: &'a Topology,
    ledger: Option<(&'a Holders, &'a Status)>,
    forbidden: CpuSet,
    /// As wide as the largest number of a PU needs it.
    cell: u32,
}

impl Frame {
    /// The machine as boxes.
    pub(super) fn machine(topology: &Topology, ledger: Option<(&Holders, &Status)>) -> Self {
        let largest = topology.cpus.parse::<CpuSet>().unwrap_or_default().last().unwrap_or(Pu(0));
        let digits = u32::try_from(largest.to_string().len()).unwrap_or(5);
        let forbidden = topology.disallowed.parse().unwrap_or_default();
        let maker = Maker { topology, ledger, forbidden, cell: 8 + 6 * digits.max(2) };
        let mut devices: Vec<&Device> = topology.devices.iter().collect();
        let mut machine = Frame::new(Sort::Machine, String::new(), "the machine".to_owned());
        maker.fill(&mut machine, &topology.tree, &[], &mut devices);
        machine.sections.extend(strip(devices.into_iter().map(device)));
        if !topology.offline.is_empty() {
            let offline = format!("offline or hidden: CPUs {}", short_list(&topology.offline, 40));
            let hint = format!("offline or hidden: CPUs {}", printable(&topology.offline));
            machine.sections.push(Section {
                frames: vec![Frame::new(Sort::Offline, offline, hint)],
                flows: true,
                stretch: true,
                columns: None,
            });
        }
        machine
    }

    fn new(sort: Sort, label: String, hint: String) -> Self {
        let fill = match sort {
            Sort::Machine | Sort::Core | Sort::Pu | Sort::Forbidden => "#ffffff",
            Sort::Package => "#eceff1",
            Sort::Die => "#f4f6f7",
            Sort::Node => "#f7f3ea",
            Sort::Memory => "#efe3c4",
            Sort::Cache => "#fbfbfb",
            Sort::Device => "#e6efe0",
            Sort::Offline => "#c9c9c9",
        };
        let (paint, note, sections) = (Paint::plain(fill), String::new(), Vec::new());
        Self { sort, paint, label, note, hint, sections, x: 0, y: 0, width: 0, height: 0 }
    }

    pub(super) fn metrics(&self) -> Metrics {
        let (header, text, padding, gap) = match self.sort {
            Sort::Machine => (0, 11, 0, 10),
            Sort::Package | Sort::Die | Sort::Node => (20, 11, 7, 7),
            Sort::Cache => (17, 10, 5, 4),
            Sort::Core => (13, 8, 3, 2),
            Sort::Pu | Sort::Forbidden => (15, 9, 0, 0),
            Sort::Memory | Sort::Device | Sort::Offline => (17, 10, 6, 0),
        };
        Metrics { header, text, padding, gap }
    }

    /// Draws the box and what is in it.
    pub(super) fn draw(&self, ink: &mut Ink, x: u32, y: u32) {
        let (at, size) = ((x + self.x, y + self.y), (self.width, self.height));
        ink.open(&self.hint);
        let metrics = self.metrics();
        match self.sort {
            Sort::Machine => {}
            Sort::Pu => ink.cell(at, size, &self.paint, &self.label),
            Sort::Forbidden => {
                ink.cell(at, size, &self.paint, &self.label);
                ink.rect(at, size, &Paint::plain("none"), r##"stroke="#b00020" stroke-dasharray="3 2""##, 0);
            }
            _ => {
                let (line, round) = self.line();
                ink.rect(at, size, &self.paint, line, round);
                let right = at.0 + size.0 - metrics.padding - 1;
                let base = at.1 + metrics.header - (metrics.header - metrics.text).div_ceil(2) - 1;
                let label = (self.label.as_str(), self.note.as_str());
                ink.header((at.0 + metrics.padding + 1, base), right, metrics.text, label, &self.paint);
            }
        }
        for child in self.sections.iter().flat_map(|section| &section.frames) {
            child.draw(ink, at.0, at.1);
        }
        ink.close();
    }

    fn line(&self) -> (&'static str, u32) {
        match self.sort {
            Sort::Package => (r##"stroke="#455a64" stroke-width="2""##, 0),
            Sort::Die => (r##"stroke="#78909c" stroke-dasharray="6 3""##, 0),
            Sort::Node => (r##"stroke="#a08a4f""##, 0),
            Sort::Memory => (r##"stroke="#a08a4f""##, 0),
            Sort::Cache => (r##"stroke="#8a8a8a""##, 0),
            Sort::Device => (r##"stroke="#5d7a4a""##, 7),
            _ => (r##"stroke="#b0b0b0""##, 0),
        }
    }
}

impl Maker<'_> {
    /// Puts the parts of a part into its box, and the devices that hang there and nowhere deeper.
    fn fill(&self, frame: &mut Frame, parts: &[Domain], path: &[String], devices: &mut Vec<&Device>) {
        let is_memory = |part: &&Domain| part.kind == "numa_node" && part.children.is_empty();
        let memory = parts.iter().filter(is_memory).map(memory_alone);
        let mut main: Vec<Section> = Vec::new();
        for part in parts.iter().filter(|part| !is_memory(part)) {
            let frame =
                if part.kind == "core" { self.core(part, path) } else { self.domain(part, path, devices) };
            // Cores of one size stand together: a grid of all sorts would be full of holes.
            let matches = |section: &Section| {
                let last = section.frames.last();
                part.kind != "core" || last.is_some_and(|last| last.hosts() == frame.hosts())
            };
            match main.last_mut().filter(|section| matches(section)) {
                Some(section) => section.frames.push(frame),
                None => main.push(Section { frames: vec![frame], ..Section::default() }),
            }
        }
        frame.sections.extend(main);
        frame.sections.extend(strip(memory));
    }

    fn domain(&self, part: &Domain, path: &[String], devices: &mut Vec<&Device>) -> Frame {
        let sort = match part.kind.as_str() {
            "package" => Sort::Package,
            "die" => Sort::Die,
            "numa_node" => Sort::Node,
            _ => Sort::Cache,
        };
        let own = name(part);
        let memory =
            if part.memory_bytes > 0 { format!(", {}", memory(part.memory_bytes)) } else { String::new() };
        let cores = cores_in(part);
        let free = part.fits.map_or_else(String::new, |fits| format!("; {fits} of {cores} cores free"));
        let hint = format!("{own}: CPUs {}{memory}{free}", printable(&part.cpus));
        let mut frame = Frame::new(sort, format!("{own}{memory}"), hint);
        frame.note = part.fits.map_or_else(String::new, |fits| format!("{fits}/{cores} free"));
        let mut path = path.to_vec();
        path.push(own);
        self.fill(&mut frame, &part.children, &path, devices);
        if sort != Sort::Cache {
            let cpus = part.cpus.parse::<CpuSet>().unwrap_or_default();
            let is_here = |device: &Device| {
                let near = device.cpus.parse::<CpuSet>().unwrap_or_default();
                !near.is_empty() && near.is_subset(&cpus)
            };
            let here: Vec<&Device> = devices.iter().copied().filter(|device| is_here(device)).collect();
            devices.retain(|device| !is_here(device));
            frame.sections.extend(strip(here.into_iter().map(device)));
        }
        frame
    }

    fn core(&self, part: &Domain, path: &[String]) -> Frame {
        let pus: CpuSet = part.cpus.parse().unwrap_or_default();
        let kind = part.core_kind.and_then(|at| self.topology.core_kinds.get(at as usize));
        let kind = kind.map(|kind| printable(&kind.name)).unwrap_or_default();
        let initial = kind.chars().next().map(|c| format!(" {}", c.to_uppercase())).unwrap_or_default();
        let of_kind = if kind.is_empty() { String::new() } else { format!(" ({kind})") };
        let mut path = path.to_vec();
        path.push(format!("core {}{of_kind}", part.number));
        path.reverse();
        let place = path.join(", ");
        let hint = format!("{place}: CPUs {}", printable(&part.cpus));
        let mut frame = Frame::new(Sort::Core, format!("C{}{initial}", part.number), hint);
        if let Some((holders, _)) = self.ledger {
            let holder = holders.of_core(&pus);
            frame.note = match holder {
                Holder::Job(n) => letter(n).to_string(),
                Holder::Several => "!".to_owned(),
                _ => String::new(),
            };
            if holders.among(&pus).len() == 1 {
                frame.paint = Paint::of(holder);
            }
        }
        let cells: Vec<Frame> = pus.iter().map(|pu| self.pu(pu, &place)).collect();
        let columns = if cells.len() > 3 { cells.len().div_ceil(2) } else { cells.len() };
        frame.sections.push(Section { frames: cells, columns: Some(columns), ..Section::default() });
        frame
    }

    fn pu(&self, pu: Pu, place: &str) -> Frame {
        let is_forbidden = self.forbidden.contains(pu);
        let mut hint = format!("CPU {pu}: {place}");
        if is_forbidden {
            hint.push_str("; forbidden by the warden's own cpuset");
        }
        let sort = if is_forbidden { Sort::Forbidden } else { Sort::Pu };
        let mut frame = Frame::new(sort, pu.to_string(), String::new());
        if let Some((holders, status)) = self.ledger {
            let holder = holders.of_core(&pu.into());
            let who = match holder {
                Holder::Job(n) => status.jobs.get(n).map(|job| printable(&job.id)).unwrap_or_default(),
                Holder::Several => "several jobs".to_owned(),
                Holder::Housekeeping => "housekeeping".to_owned(),
                Holder::Free => "free".to_owned(),
                Holder::Offline => "offline".to_owned(),
            };
            hint.push_str("; ");
            hint.push_str(&who);
            frame.paint = Paint::of(holder);
        }
        frame.hint = hint;
        (frame.width, frame.height) = (self.cell, 15);
        frame
    }
}

impl Frame {
    /// How many boxes are in it.
    fn hosts(&self) -> usize {
        self.sections.iter().map(|section| section.frames.len()).sum()
    }
}

fn memory_alone(part: &Domain) -> Frame {
    let size = if part.memory_bytes > 0 { format!(", {}", memory(part.memory_bytes)) } else { String::new() };
    let near =
        if part.cpus.is_empty() { "no CPUs".to_owned() } else { format!("CPUs {}", printable(&part.cpus)) };
    let hint = format!("{}{size}: memory alone, near {near}", name(part));
    Frame::new(Sort::Memory, format!("{}{size}, memory alone", name(part)), hint)
}

fn device(device: &Device) -> Frame {
    let words = [classed(device), printable(&device.address), printable(&device.model)];
    let words: Vec<String> = words.into_iter().filter(|word| !word.is_empty()).collect();
    let hint = format!("{}; near CPUs {}", words.join("; "), printable(&device.cpus));
    Frame::new(Sort::Device, shortened(&classed(device), 28), hint)
}

fn strip(frames: impl Iterator<Item = Frame>) -> Option<Section> {
    let frames: Vec<Frame> = frames.collect();
    (!frames.is_empty()).then(|| Section { frames, flows: true, ..Section::default() })
}

fn cores_in(part: &Domain) -> String {
    fn cores(part: &Domain) -> usize {
        if part.kind == "core" { 1 } else { part.children.iter().map(cores).sum() }
    }
    cores(part).to_string()
}
