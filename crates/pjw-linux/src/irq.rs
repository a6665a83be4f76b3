//! Interrupts of devices: how often they came on which CPU, and where they are sent.
//!
//! `/proc/interrupts` has a line for each, with a count for each CPU that is on (proc_interrupts(5)); lines whose first
//! word is no number are the kernel's own (timers, calls between CPUs) and can't be sent elsewhere. Where a device's are
//! sent stands in `/proc/irq/N/effective_affinity_list`, or on older kernels only in `smp_affinity_list`
//! (Documentation/core-api/irq/irq-affinity.rst). Names come from drivers and firmware: they may hold anything.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Read;
use std::path::Path;

use pjw_core::cpuset::{CpuSet, Pu};
use pjw_core::diagnosis::Interrupt;

/// 8,192 CPUs and 4,096 interrupts take more than any node has; what is beyond is not read.
const MOST_BYTES: u64 = 64 << 20;
/// A driver's name for an interrupt is cut here.
const LONGEST_NAME: usize = 48;

/// How often an interrupt came on each CPU.
type Columns = BTreeMap<Pu, u64>;

/// One reading: for each interrupt its name and its counts.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Counts(BTreeMap<u32, (String, Columns)>);

impl Counts {
    /// Reads the machine's; empty where they can't be read.
    #[must_use]
    pub fn read() -> Self {
        let mut text = Vec::new();
        let read =
            File::open("/proc/interrupts").and_then(|file| file.take(MOST_BYTES).read_to_end(&mut text));
        read.map(|_| Self::parse(&text)).unwrap_or_default()
    }

    /// Reads the text of `/proc/interrupts`. Lines that make no sense are left out.
    #[must_use]
    pub fn parse(text: &[u8]) -> Self {
        let text = String::from_utf8_lossy(text);
        let mut lines = text.lines();
        let cpus: Vec<Pu> = lines.next().map(heading).unwrap_or_default();
        Self(lines.filter_map(|line| interrupt(line, &cpus)).collect())
    }

    /// How often each interrupt came since an earlier reading, and where it is sent, which `sent_to` tells.
    #[must_use]
    pub fn since(&self, earlier: &Self, sent_to: impl Fn(u32) -> CpuSet) -> Vec<Interrupt> {
        let came = |number: &u32, counts: &Columns| {
            let before = earlier.0.get(number).map(|(_, counts)| counts);
            let difference = |(&pu, &now): (&Pu, &u64)| {
                // An interrupt that was not there before has had no time to come.
                let was = before.map_or(now, |before| before.get(&pu).copied().unwrap_or(0));
                (pu, now.saturating_sub(was))
            };
            counts.iter().map(difference).filter(|(_, came)| *came > 0).collect()
        };
        self.0
            .iter()
            .map(|(number, (name, counts))| Interrupt {
                number: *number,
                name: name.clone(),
                sent_to: sent_to(*number),
                came: came(number, counts),
            })
            .collect()
    }
}

/// Where the kernel sends an interrupt; empty where nobody can tell.
#[must_use]
pub fn sent_to(number: u32) -> CpuSet {
    let directory = Path::new("/proc/irq").join(number.to_string());
    let list = |name| fs::read_to_string(directory.join(name)).ok()?.parse::<CpuSet>().ok();
    let effective = list("effective_affinity_list").filter(|cpus| !cpus.is_empty());
    effective.or_else(|| list("smp_affinity_list")).unwrap_or_default()
}

/// The CPUs of the columns: `CPU0 CPU2 …`.
fn heading(line: &str) -> Vec<Pu> {
    let number = |word: &str| word.strip_prefix("CPU")?.parse().ok().map(Pu).filter(|pu| *pu <= Pu::MAX);
    line.split_ascii_whitespace().map_while(number).collect()
}

/// `  24:  1  0  IO-APIC  5-edge  eth0`: the count of each CPU, the chip, its line, the actions.
fn interrupt(line: &str, cpus: &[Pu]) -> Option<(u32, (String, Columns))> {
    let (number, rest) = line.split_once(':')?;
    let number = number.trim().parse().ok()?;
    let mut words = rest.split_ascii_whitespace();
    let mut counts = BTreeMap::new();
    for &cpu in cpus {
        counts.insert(cpu, words.next()?.parse().ok()?);
    }
    let described: Vec<&str> = words.collect();
    // The chip and its line stand before the name; where there is no name they are all there is.
    let name = match &described[..] {
        [_, _, name @ ..] if !name.is_empty() => name.join(" "),
        other => other.join(" "),
    };
    let shown: String = name.chars().filter(|c| !c.is_control()).take(LONGEST_NAME).collect();
    Some((number, (if shown.is_empty() { format!("IRQ {number}") } else { shown }, counts)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
           CPU0       CPU2
 24:          1          0  IO-APIC   5-edge      ACPI:Ged
 36:          0    1010006 PCI-MSIX-0000:00:02.0   1-edge      virtio1-req.0
 40:          5          5 PCI-MSIX-0000:00:02.0   2-edge      eth0 rx, eth0 tx
NMI:          0          0   Non-maskable interrupts
LOC:    2408800    2565062   Local timer interrupts
ERR:          0
";

    type Told = (u32, String, Vec<(u32, u64)>);

    fn came(now: &str, before: &str) -> Vec<Told> {
        let (now, before) = (Counts::parse(now.as_bytes()), Counts::parse(before.as_bytes()));
        let told = now.since(&before, |_| CpuSet::new());
        let pairs = |came: Columns| came.into_iter().map(|(pu, n)| (pu.0, n)).collect();
        told.into_iter().map(|irq| (irq.number, irq.name, pairs(irq.came))).collect()
    }

    #[test]
    fn devices_are_told_from_the_kernels_own_and_columns_are_named_by_their_cpu() {
        let later = TEXT.replace("1010006", "1010010").replace("          5 PCI", "          9 PCI");
        let expected = vec![
            (24, "ACPI:Ged".to_owned(), vec![]),
            (36, "virtio1-req.0".to_owned(), vec![(2, 4)]),
            (40, "eth0 rx, eth0 tx".to_owned(), vec![(2, 4)]),
        ];
        assert_eq!(came(&later, TEXT), expected);
    }

    #[test]
    fn a_count_that_runs_back_or_an_interrupt_that_is_new_came_not_at_all() {
        let fewer = TEXT.replace("1010006", "3");
        assert!(came(&fewer, TEXT).iter().all(|(_, _, came)| came.is_empty()));
        assert!(came(TEXT, "").iter().all(|(_, _, came)| came.is_empty()));
    }

    #[test]
    fn nonsense_makes_no_interrupt() {
        for text in
            ["", "\n", "CPU0\n 1: x y\n", "CPU0 CPU1\n 1: 5\n", "CPU0\n99999999999: 1 a b c\n", "CPU0\n: 1\n"]
        {
            assert_eq!(Counts::parse(text.as_bytes()), Counts::default(), "{text:?}");
        }
        let hostile = Counts::parse(b"CPU0\n 7: 1 chip 1-edge \x1b[2J\xff\n");
        let told = hostile.since(&hostile, |_| CpuSet::new());
        assert_eq!(told[0].name, "[2J\u{fffd}");
        // A heading that names CPUs without end has no column for most of them, and so no line is believed.
        assert_eq!(Counts::parse(b"CPU0 CPU99999999 CPU1\n 7: 1 a b c\n").0[&7].1.len(), 1);
    }

    #[test]
    fn this_machines_interrupts_are_read() {
        let now = Counts::read();
        for irq in now.since(&now, sent_to) {
            assert!(irq.came.is_empty() && !irq.name.is_empty());
        }
    }
}
