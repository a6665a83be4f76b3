//! The core map: a cell for each core, a letter for each job.
//!
//! One line for each NUMA node (or package where there are no NUMA nodes), with `│` between its L3s. A long line is
//! continued below. `#` is housekeeping, `.` free, `x` offline, `~` lent, `!` held by several jobs. A core counts as
//! held if one of its PUs is held. If the map needs more lines than a screen has, lists of CPUs are printed instead.

use std::collections::BTreeMap;

use anstyle::Style;
use pjw_core::cpuset::{CpuSet, Pu};
use pjw_ipc::wire::{Core, Job, Pool};

use super::{Terminal, style, text};

/// The maximum number of lines of the map.
const MAX_LINES: usize = 24;
/// The number of cells in a block. A space stands between two blocks of the same L3.
const BLOCK_CELLS: usize = 8;
/// The letters, in the order of the jobs.
const LETTERS: &[u8; 62] = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789";

/// Returns the letter or digit that stands for a job in the output of pjwctl. For example, `pjwctl status` shows it in
/// the table of jobs and in the core map (a text with one character for each core). `position` is the position of the
/// job in the list of jobs, from 0. For all positions from 62 on, returns `*`.
#[must_use]
pub fn job_symbol(position: usize) -> char {
    LETTERS.get(position).map_or('*', |&letter| char::from(letter))
}

/// The holder of a core or of a PU (logical CPU): a job, several jobs, or the system. `Lent` means that one job owns
/// the core or the PU and another job borrows it. If there is no holder, the core or the PU is `Free` (a job can get
/// it) or `Offline` (switched off, so that no job can get it). The core map of `pjwctl status` (a text with one
/// character for each core) shows these values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Holder {
    /// One job holds the core or the PU. The number is the index of the job in the list of jobs, counted from 0.
    Job(usize),
    /// Several jobs hold the core or the PU.
    SeveralJobs,
    /// A job holds the core or the PU but leaves it idle, and another job borrows it at present.
    Lent,
    /// The PU is reserved for the system, and no job owns it.
    Housekeeping,
    /// The PU is free.
    Free,
    /// The PU is offline.
    Offline,
}

impl Holder {
    /// Returns the character, and the style of the character, for a core with this holder. The core map in the text of
    /// `pjwctl status` shows one such character for each core.
    #[must_use]
    pub fn symbol(self) -> (char, Style) {
        match self {
            Holder::Job(n) => (job_symbol(n), style::job_style(n)),
            Holder::SeveralJobs => ('!', style::FAILURE),
            Holder::Lent => ('~', Style::new()),
            Holder::Housekeeping => ('#', style::SECONDARY),
            Holder::Free => ('.', Style::new()),
            Holder::Offline => ('x', style::SECONDARY),
        }
    }

    /// Returns the name of this holder of a core for texts: the id of a job, `several jobs`, `housekeeping` (reserved
    /// for the system), `free`, `lent` (one job holds the core, and another job borrows it) or `offline`. `jobs` must
    /// be the list of jobs from which the [`PuHolders`] were computed.
    #[must_use]
    pub fn name(self, jobs: &[Job]) -> String {
        match self {
            Holder::Job(n) => {
                jobs.get(n).map(|job| text::escape_control_characters(&job.id)).unwrap_or_default()
            }
            Holder::SeveralJobs => "several jobs".to_owned(),
            Holder::Lent => "lent".to_owned(),
            Holder::Housekeeping => "housekeeping".to_owned(),
            Holder::Free => "free".to_owned(),
            Holder::Offline => "offline".to_owned(),
        }
    }
}

/// The holder of each PU (logical CPU) of the machine: a job, several jobs, the system, or nothing.
#[derive(Debug)]
pub struct PuHolders {
    by_pu: BTreeMap<Pu, Holder>,
    /// The owner and the borrower of each lent PU, as indexes in the list of jobs.
    lent: BTreeMap<Pu, (usize, usize)>,
}

impl PuHolders {
    /// Computes the holder of each PU (logical CPU) from two parts of the status of the daemon. `pool` contains the
    /// free PUs and the PUs that are reserved for the system. `jobs` contains the PUs of each job. The holder of a PU
    /// in neither of them is [`Holder::Offline`]. A job of the class besteffort can share a PU that is reserved for the
    /// system without borrowing it. The holder of such a PU is still [`Holder::Housekeeping`].
    #[must_use]
    pub fn new(pool: &Pool, jobs: &[Job]) -> Self {
        let mut by_pu = BTreeMap::new();
        let (free, housekeeping) = (parse_cpu_list(&pool.free), parse_cpu_list(&pool.housekeeping));
        for (cpus, holder) in [(&free, Holder::Free), (&housekeeping, Holder::Housekeeping)] {
            by_pu.extend(cpus.iter().map(|pu| (pu, holder)));
        }
        for (n, job) in jobs.iter().enumerate() {
            let mut held = parse_cpu_list(&job.cpus).difference(&parse_cpu_list(&job.borrowed));
            if job.class == "besteffort" {
                // A borrower without a core shares the housekeeping PUs, which stay those of the system.
                held = held.difference(&housekeeping);
            }
            for pu in held.iter() {
                let holder = by_pu.entry(pu).or_insert(Holder::Free);
                *holder = if matches!(holder, Holder::Job(_) | Holder::SeveralJobs) {
                    Holder::SeveralJobs
                } else {
                    Holder::Job(n)
                };
            }
        }
        let mut lent = BTreeMap::new();
        for (n, job) in jobs.iter().enumerate() {
            for pu in parse_cpu_list(&job.borrowed).iter() {
                let holder = by_pu.entry(pu).or_insert(Holder::Free);
                *holder = match *holder {
                    Holder::Job(owner) => {
                        lent.insert(pu, (owner, n));
                        Holder::Lent
                    }
                    Holder::SeveralJobs => Holder::SeveralJobs,
                    _ => Holder::Job(n),
                };
            }
        }
        Self { by_pu, lent }
    }

    /// Groups the lent PUs (logical CPUs) in `pus`. A lent PU has an owner (the job that holds it and leaves it idle)
    /// and a borrower (the job that uses it at present). The key of the returned map is the pair of owner and borrower,
    /// as indexes in the list of jobs. The value is the set of PUs that the owner lends to the borrower.
    #[must_use]
    pub fn lent_pus_by_jobs(&self, pus: &CpuSet) -> BTreeMap<(usize, usize), CpuSet> {
        let mut groups: BTreeMap<(usize, usize), CpuSet> = BTreeMap::new();
        for (pu, jobs) in pus.iter().filter_map(|pu| Some((pu, *self.lent.get(&pu)?))) {
            groups.entry(jobs).or_default().insert(pu);
        }
        groups
    }

    /// Returns the holder of one core, for the core map of `pjwctl status`. `pus` are the PUs (logical CPUs) of the
    /// core. If jobs hold at least one PU of the core, only the PUs that jobs hold count. The result is then:
    ///
    /// - [`Holder::Job`], if one job holds all these PUs and lends none of them.
    /// - [`Holder::Lent`], if all these PUs are lent.
    /// - [`Holder::SeveralJobs`] in all other cases.
    ///
    /// If no job holds a PU of the core, the result is the first of these that applies:
    ///
    /// 1. [`Holder::Housekeeping`] if a PU of the core is reserved for the system.
    /// 2. [`Holder::Free`] if a PU of the core is free.
    /// 3. [`Holder::Offline`] otherwise.
    #[must_use]
    pub fn holder_of_core(&self, pus: &CpuSet) -> Holder {
        let holders = || pus.iter().filter_map(|pu| self.by_pu.get(&pu).copied());
        let is_of_job =
            |holder: &Holder| matches!(holder, Holder::Job(_) | Holder::SeveralJobs | Holder::Lent);
        let mut jobs = holders().filter(is_of_job);
        match jobs.next() {
            Some(first) if jobs.all(|other| other == first) => first,
            Some(_) => Holder::SeveralJobs,
            None => holders().min().unwrap_or(Holder::Offline),
        }
    }

    /// Groups the PUs (logical CPUs) in `pus` by their holder. Returns a map from each holder, such as a job or
    /// [`Holder::Free`], to its PUs.
    #[must_use]
    pub fn pus_by_holder(&self, pus: &CpuSet) -> BTreeMap<Holder, CpuSet> {
        let mut groups: BTreeMap<Holder, CpuSet> = BTreeMap::new();
        for pu in pus.iter() {
            groups.entry(self.by_pu.get(&pu).copied().unwrap_or(Holder::Offline)).or_default().insert(pu);
        }
        groups
    }
}

/// One line of the map: a NUMA node or a package.
struct Row {
    label: String,
    pus: CpuSet,
    /// The cores, one list for each L3.
    caches: Vec<Vec<CpuSet>>,
}

/// Returns the core map of `pjwctl status`: a text with one character for each core, which shows the job that holds
/// the core. [`Holder::symbol`] returns these characters. Each NUMA node begins on a new line. If the map would have
/// more than 24 lines, the text instead lists for each NUMA node the PUs (logical CPUs) of each holder.
#[must_use]
pub fn core_map_text(cores: &[Core], holders: &PuHolders, term: Terminal) -> String {
    let rows = rows_of_cores(cores);
    let label_width = rows.iter().map(|row| text::char_count(&row.label)).max().unwrap_or(0);
    let lists: Vec<String> =
        rows.iter().map(|row| text::shorten_cpu_list(&row.pus.to_string(), 16)).collect();
    let list_width = lists.iter().map(|list| text::char_count(list)).max().unwrap_or(0);
    let head_width = label_width + 2 + list_width + 2;
    let width_left = term.width.saturating_sub(head_width).max(BLOCK_CELLS);
    let drawn: Vec<Vec<String>> = rows.iter().map(|row| row_lines(row, holders, width_left, term)).collect();
    if drawn.iter().map(Vec::len).sum::<usize>() > MAX_LINES {
        return rows.iter().map(|row| row_as_lists(row, holders, term)).collect();
    }
    let mut map = String::new();
    for ((row, list), lines) in rows.iter().zip(&lists).zip(drawn) {
        let mut head = format!("{:label_width$}  {list:list_width$}  ", row.label);
        for line in lines {
            map += &format!("{head}{line}\n");
            head = " ".repeat(head_width);
        }
    }
    map
}

/// Groups the cores into the rows of the map. A new row begins where the package or the NUMA node of a core differs
/// from that of the core before.
fn rows_of_cores(cores: &[Core]) -> Vec<Row> {
    let mut rows: Vec<Row> = Vec::new();
    let mut before: Option<&Core> = None;
    for core in cores {
        let pus = parse_cpu_list(&core.cpus);
        let is_as_before =
            |field: fn(&Core) -> Option<u32>| before.is_some_and(|before| field(before) == field(core));
        let is_in_last_row = is_as_before(|core| core.package) && is_as_before(|core| core.numa_node);
        match rows.last_mut().filter(|_| is_in_last_row) {
            Some(row) => {
                row.pus.extend(pus.iter());
                match row.caches.last_mut().filter(|_| is_as_before(|core| core.l3)) {
                    Some(cache) => cache.push(pus),
                    None => row.caches.push(vec![pus]),
                }
            }
            None => rows.push(Row { label: row_label(core), pus: pus.clone(), caches: vec![vec![pus]] }),
        }
        before = Some(core);
    }
    rows
}

fn row_label(core: &Core) -> String {
    match (core.package, core.numa_node) {
        (Some(package), Some(node)) => format!("package {package} node {node}"),
        (Some(package), None) => format!("package {package}"),
        (None, Some(node)) => format!("node {node}"),
        (None, None) => "machine".to_owned(),
    }
}

/// Draws a row of the map as lines of at most `width_left` columns, with one character for each core. If the row is
/// too long for one line, the line breaks are between two L3 caches if possible, else between two blocks of
/// [`BLOCK_CELLS`] cores.
fn row_lines(row: &Row, holders: &PuHolders, width_left: usize, term: Terminal) -> Vec<String> {
    let mut lines = Vec::new();
    let mut line = String::new();
    let mut used = 0;
    for (n, cache) in row.caches.iter().enumerate() {
        let between = if n == 0 { "" } else { "│" };
        let blocks: Vec<&[CpuSet]> = cache.chunks(BLOCK_CELLS).collect();
        let cache_width = cache.len() + blocks.len() - 1;
        for (m, block) in blocks.iter().enumerate() {
            let gap = if m == 0 { between } else { " " };
            let needed_width = if m == 0 && cache_width <= width_left { cache_width } else { block.len() };
            if used > 0 && used + text::char_count(gap) + needed_width > width_left {
                lines.push(std::mem::take(&mut line));
                used = 0;
            } else {
                line.push_str(gap);
                used += text::char_count(gap);
            }
            for pus in *block {
                let (cell, style) = holders.holder_of_core(pus).symbol();
                line.push_str(&style::apply_style(cell.encode_utf8(&mut [0; 4]), style, term));
            }
            used += block.len();
        }
    }
    lines.push(line);
    lines
}

/// A row as lists: `package 0 node 0: a 0-31, # 32`.
fn row_as_lists(row: &Row, holders: &PuHolders, term: Terminal) -> String {
    let groups = holders.pus_by_holder(&row.pus);
    let parts: Vec<String> =
        groups.iter().map(|(holder, pus)| format!("{} {pus}", holder.symbol().0)).collect();
    text::wrap_text(&format!("{}: {}", row.label, parts.join(", ")), term.width, "", "  ")
}

/// The set of a list from the daemon. A text that is not a list gives the empty set.
fn parse_cpu_list(list: &str) -> CpuSet {
    list.parse().unwrap_or_default()
}

#[cfg(test)]
mod tests;
