//! `topology --svg`: the machine as a drawing of nested boxes, similar to hwloc's lstopo, with colours for the
//! holders of the PUs.
//!
//! `boxes` makes boxes of the reply, `layout` computes sizes and positions, `svg` writes SVG. The same reply gives
//! the same bytes. All numbers are whole pixels. The estimated width of a text is larger than in any usual font, so
//! that no viewer cuts a text off.

mod boxes;
mod layout;
mod svg;

use pjw_ipc::wire::{Status, Topology};

use super::core_map::{Holder, PuHolders, job_symbol};
use super::text::{count_with_noun, escape_control_characters, shorten_cpu_list};
use boxes::DiagramBox;
use layout::{column_widths, count_to_u32};
use svg::{FillStyle, Svg, truncate_text};

/// The margin around the drawing, in pixels.
const MARGIN: u32 = 14;
/// The minimum width of the drawing, for the texts above it.
const MIN_WIDTH: u32 = 500;
/// The font size of the title, in pixels.
const TITLE: u32 = 16;
/// The font size of all other texts outside of the boxes, in pixels.
const TEXT: u32 = 11;
/// The distance between two lines of the texts above the machine, and the height of a cell of the legend, in pixels.
const LINE: u32 = 16;

/// Returns an SVG drawing of the machine with the heading `title`: nested boxes for its packages, NUMA nodes, caches
/// and cores. If `status` is `Some`, colours show which job holds each PU (logical CPU), and a legend lists the jobs.
#[must_use]
pub fn svg_drawing(title: &str, topology: &Topology, status: Option<&Status>) -> String {
    let holders = status.map(|status| (PuHolders::new(&status.pool, &status.jobs), status));
    let mut machine =
        DiagramBox::machine(topology, holders.as_ref().map(|(holders, status)| (holders, *status)));
    layout::arrange(&mut machine);
    let width = machine.width.max(MIN_WIDTH);
    let lines_above = lines_above(topology, status, width);
    let entries =
        holders.as_ref().map(|(holders, status)| legend(topology, holders, status)).unwrap_or_default();

    let top = MARGIN + TITLE + 6 + LINE * count_to_u32(lines_above.len()) + 6;
    let columns = column_widths(&entries.iter().map(|entry| entry.width).collect::<Vec<_>>(), width);
    let rows = entries.len().div_ceil(columns.len().max(1));
    let legend_top = top + machine.height + if rows > 0 { 14 } else { 0 };
    let height = legend_top + count_to_u32(rows) * (LINE + 4) + MARGIN;

    let mut svg = Svg::new(width + 2 * MARGIN, height);
    // An estimate: on average, bold letters are at most 0.7 times as wide as the font size.
    let max_letters = (width * 100 / (TITLE * 70)) as usize;
    svg.bold_text(
        MARGIN,
        MARGIN + TITLE - 3,
        TITLE,
        &truncate_text(&escape_control_characters(title), max_letters),
    );
    for (n, line) in (0..).zip(&lines_above) {
        svg.plain_text(MARGIN, MARGIN + TITLE + 6 + LINE * n + 11, TEXT, line);
    }
    machine.draw(&mut svg, MARGIN, top);
    for (n, entry) in entries.iter().enumerate() {
        // The entries run down the columns.
        let left: u32 = columns.iter().take(n / rows).sum();
        entry.draw(&mut svg, MARGIN + left, legend_top + count_to_u32(n % rows) * (LINE + 4));
    }
    svg.finish()
}

/// Returns the lines of text above the drawing: the numbers of parts of the machine, the largest requests that a new
/// job can make now (if known), and an explanation of the numbers in the boxes. `width` is the width of the drawing
/// in pixels.
fn lines_above(topology: &Topology, status: Option<&Status>, width: u32) -> Vec<String> {
    let columns = (width * 100 / (TEXT * 62)) as usize;
    let mut lines = vec![counts(topology)];
    if let Some(fits) = status.map(|status| &status.fits).or(topology.fits.as_ref()) {
        lines.push(super::topology::largest_requests_sentence(topology, fits));
    }
    let note = "cells are CPUs by the kernel's numbers, C0 is core 0";
    lines.push(note.to_owned());
    let wrapped = lines.iter().map(|line| super::text::wrap_text(line, columns, "", "  "));
    wrapped.flat_map(|text| text.lines().map(str::to_owned).collect::<Vec<_>>()).collect()
}

fn counts(topology: &Topology) -> String {
    format!("{}, CPUs {}", super::topology::part_counts_text(topology), shorten_cpu_list(&topology.cpus, 24))
}

/// One entry of the legend.
struct Entry {
    fill_style: FillStyle,
    letter: String,
    text: String,
    hint: String,
    width: u32,
}

impl Entry {
    fn new(fill_style: FillStyle, letter: String, text: String, hint: String) -> Self {
        let width = 30 + svg::text_width(&text, TEXT) + 18;
        Self { fill_style, letter, text, hint, width }
    }

    fn draw(&self, svg: &mut Svg, x: u32, y: u32) {
        svg.begin_group(&self.hint);
        svg.rect_with_text((x, y), (22, LINE), &self.fill_style, &self.letter);
        svg.plain_text(x + 30, y + 12, TEXT, &self.text);
        svg.end_group();
    }
}

/// Returns the entries of the legend: one for each job that holds PUs (logical CPUs), and one for each other kind of
/// holder in `topology`, such as housekeeping or offline.
fn legend(topology: &Topology, holders: &PuHolders, status: &Status) -> Vec<Entry> {
    let all = topology.cpus.parse().unwrap_or_default();
    let groups = holders.pus_by_holder(&all);
    let mut entries = Vec::new();
    for (n, job) in status.jobs.iter().enumerate().filter(|(_, job)| !job.cpus.is_empty()) {
        let id = escape_control_characters(&job.id);
        let text = format!("{}, CPUs {}", truncate_text(&id, 60), shorten_cpu_list(&job.cpus, 20));
        let hint = format!("{id}: CPUs {}", escape_control_characters(&job.cpus));
        entries.push(Entry::new(
            FillStyle::for_holder(Holder::Job(n)),
            job_symbol(n).to_string(),
            text,
            hint,
        ));
    }
    for holder in [Holder::SeveralJobs, Holder::Lent, Holder::Housekeeping, Holder::Free, Holder::Offline] {
        if let Some(pus) = groups.get(&holder) {
            let has_symbol = matches!(holder, Holder::SeveralJobs | Holder::Lent);
            let cell = if has_symbol { holder.symbol().0.to_string() } else { String::new() };
            let word = holder.name(&[]);
            let text = format!("{word}, CPUs {}", shorten_cpu_list(&pus.to_string(), 20));
            let hint = format!("{word}: {}, CPUs {pus}", count_with_noun(pus.len() as u64, "CPU", "CPUs"));
            entries.push(Entry::new(FillStyle::for_holder(holder), cell, text, hint));
        }
    }
    entries
}

#[cfg(test)]
mod tests;
