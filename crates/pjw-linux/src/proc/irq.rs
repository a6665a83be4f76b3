//! Device interrupts: counts per CPU, and target CPUs.
//!
//! `/proc/interrupts` has one line per interrupt with one count per online CPU (proc_interrupts(5)). A line
//! whose first word is no number is an interrupt of the kernel itself (timer, inter-processor) and can't be
//! redirected. `/proc/irq/N/effective_affinity_list` names the target CPUs of a device interrupt; older
//! kernels have only `smp_affinity_list` (Documentation/core-api/irq/irq-affinity.rst). Names come from
//! drivers and firmware and may contain any bytes.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Read;
use std::path::Path;

use pjw_core::cpuset::{CpuSet, Pu};
use pjw_core::diagnosis::Interrupt;

/// The largest part of `/proc/interrupts` that is read, in bytes. 8,192 CPUs with 4,096 interrupts exceed any real
/// machine.
const MAX_BYTES: u64 = 64 << 20;
/// The maximum length of the name of an interrupt. A longer name is cut.
const MAX_NAME_CHARACTERS: usize = 48;

/// The count of an interrupt on each CPU.
type Columns = BTreeMap<Pu, u64>;

/// The counts of all numbered interrupts, as `/proc/interrupts` showed them when this value was read. The map
/// has one entry for each interrupt, with the interrupt number as the key. The entry contains the name of the
/// interrupt, and how often it has occurred on each online CPU since boot.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct InterruptCounts(BTreeMap<u32, (String, Columns)>);

impl InterruptCounts {
    /// Reads the interrupt counts of this machine from `/proc/interrupts`. The result has no interrupts if this
    /// file can't be read.
    #[must_use]
    pub fn read() -> Self {
        let mut text = Vec::new();
        let read =
            File::open("/proc/interrupts").and_then(|file| file.take(MAX_BYTES).read_to_end(&mut text));
        read.map(|_| Self::parse(&text)).unwrap_or_default()
    }

    /// Parses `interrupts_text`, the content of `/proc/interrupts`. Skips malformed lines. Also skips
    /// interrupts that have a name instead of a number, such as timer interrupts.
    #[must_use]
    pub fn parse(interrupts_text: &[u8]) -> Self {
        let text = String::from_utf8_lossy(interrupts_text);
        let mut lines = text.lines();
        let cpus: Vec<Pu> = lines.next().map(parse_heading).unwrap_or_default();
        Self(lines.filter_map(|line| parse_interrupt(line, &cpus)).collect())
    }

    /// Compares two readings: returns for each interrupt in `self` how often it has occurred on each CPU since
    /// the reading `earlier`. CPUs with the count 0 are left out. If an interrupt is missing in `earlier`, its
    /// counts are unknown, and all CPUs are left out.
    ///
    /// `target_cpus_of` is called with each interrupt number, and must return the CPUs to which the kernel sends
    /// this interrupt ([`Interrupt::target_cpus`]). Callers pass [`target_cpus`].
    #[must_use]
    pub fn interrupts_since(&self, earlier: &Self, target_cpus_of: impl Fn(u32) -> CpuSet) -> Vec<Interrupt> {
        let counts_since = |number: &u32, counts: &Columns| {
            let before = earlier.0.get(number).map(|(_, counts)| counts);
            let difference = |(&pu, &now): (&Pu, &u64)| {
                // For an interrupt that is new since the earlier reading, the difference is unknown and
                // counts as 0.
                let earlier_count = before.map_or(now, |before| before.get(&pu).copied().unwrap_or(0));
                (pu, now.saturating_sub(earlier_count))
            };
            counts.iter().map(difference).filter(|(_, count)| *count > 0).collect()
        };
        self.0
            .iter()
            .map(|(number, (name, counts))| Interrupt {
                number: *number,
                name: name.clone(),
                target_cpus: target_cpus_of(*number),
                counts: counts_since(number, counts),
            })
            .collect()
    }
}

/// Returns the CPUs to which the kernel sends the interrupt with the number `irq_number`. Reads the file
/// `effective_affinity_list` in `/proc/irq/NUMBER`. If this file is missing or empty, reads `smp_affinity_list`.
/// Returns the empty set if neither file can be read.
#[must_use]
pub fn target_cpus(irq_number: u32) -> CpuSet {
    let directory = Path::new("/proc/irq").join(irq_number.to_string());
    let list = |name| fs::read_to_string(directory.join(name)).ok()?.parse::<CpuSet>().ok();
    let effective = list("effective_affinity_list").filter(|cpus| !cpus.is_empty());
    effective.or_else(|| list("smp_affinity_list")).unwrap_or_default()
}

/// Parses the heading, such as `CPU0 CPU2 …`: returns the CPU of each column.
fn parse_heading(line: &str) -> Vec<Pu> {
    let number = |word: &str| word.strip_prefix("CPU")?.parse().ok().map(Pu).filter(|pu| *pu <= Pu::MAX);
    line.split_ascii_whitespace().map_while(number).collect()
}

/// Parses a line of `/proc/interrupts` such as `  24:  1  0  IO-APIC  5-edge  eth0`. `cpus` has the CPUs of the
/// columns. Returns the number of the interrupt, and its name with its count on each CPU. The name is `eth0` here, or
/// that of the chip if the line has none. Returns `None` if the line does not begin with a number, or has too few
/// counts.
fn parse_interrupt(line: &str, cpus: &[Pu]) -> Option<(u32, (String, Columns))> {
    let (number, fields) = line.split_once(':')?;
    let number = number.trim().parse().ok()?;
    let mut words = fields.split_ascii_whitespace();
    let mut counts = BTreeMap::new();
    for &cpu in cpus {
        counts.insert(cpu, words.next()?.parse().ok()?);
    }
    let described: Vec<&str> = words.collect();
    // The name follows the chip and its line. Without a name, these two stand for the name.
    let name = match &described[..] {
        [_, _, name @ ..] if !name.is_empty() => name.join(" "),
        other => other.join(" "),
    };
    let shown: String = name.chars().filter(|c| !c.is_control()).take(MAX_NAME_CHARACTERS).collect();
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

    type Row = (u32, String, Vec<(u32, u64)>);

    fn interrupts_between(now: &str, before: &str) -> Vec<Row> {
        let (now, before) =
            (InterruptCounts::parse(now.as_bytes()), InterruptCounts::parse(before.as_bytes()));
        let interrupts = now.interrupts_since(&before, |_| CpuSet::new());
        let pairs = |counts: Columns| counts.into_iter().map(|(pu, n)| (pu.0, n)).collect();
        interrupts.into_iter().map(|irq| (irq.number, irq.name, pairs(irq.counts))).collect()
    }

    #[test]
    fn only_device_interrupts_are_parsed_and_columns_follow_the_heading() {
        let later = TEXT.replace("1010006", "1010010").replace("          5 PCI", "          9 PCI");
        let expected = vec![
            (24, "ACPI:Ged".to_owned(), vec![]),
            (36, "virtio1-req.0".to_owned(), vec![(2, 4)]),
            (40, "eth0 rx, eth0 tx".to_owned(), vec![(2, 4)]),
        ];
        assert_eq!(interrupts_between(&later, TEXT), expected);
    }

    #[test]
    fn a_decreasing_count_and_a_new_interrupt_count_as_zero() {
        let fewer = TEXT.replace("1010006", "3");
        assert!(interrupts_between(&fewer, TEXT).iter().all(|(_, _, counts)| counts.is_empty()));
        assert!(interrupts_between(TEXT, "").iter().all(|(_, _, counts)| counts.is_empty()));
    }

    #[test]
    fn malformed_text_gives_no_interrupt() {
        for text in
            ["", "\n", "CPU0\n 1: x y\n", "CPU0 CPU1\n 1: 5\n", "CPU0\n99999999999: 1 a b c\n", "CPU0\n: 1\n"]
        {
            assert_eq!(InterruptCounts::parse(text.as_bytes()), InterruptCounts::default(), "{text:?}");
        }
        let hostile = InterruptCounts::parse(b"CPU0\n 7: 1 chip 1-edge \x1b[2J\xff\n");
        let interrupts = hostile.interrupts_since(&hostile, |_| CpuSet::new());
        assert_eq!(interrupts[0].name, "[2J\u{fffd}");
        // A heading with too large CPU numbers names fewer columns than the line has.
        assert_eq!(InterruptCounts::parse(b"CPU0 CPU99999999 CPU1\n 7: 1 a b c\n").0[&7].1.len(), 1);
    }

    #[test]
    fn interrupts_of_this_machine_are_read() {
        let now = InterruptCounts::read();
        for irq in now.interrupts_since(&now, target_cpus) {
            assert!(irq.counts.is_empty() && !irq.name.is_empty());
        }
    }
}
