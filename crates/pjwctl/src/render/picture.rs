//! `topology --svg`: the machine as a drawing of boxes in boxes, in the manner of hwloc's lstopo, and in colour
//! who holds what.
//!
//! `frame` turns the answer into boxes, `layout` gives them sizes and places, `ink` writes SVG. The same
//! answer gives the same bytes. All numbers are whole pixels; texts are measured by a guess that is too wide for
//! any usual font, so that none is cut off by another viewer's.

mod frame;
mod ink;
mod layout;

use pjw_ipc::wire::{Status, Topology};

use super::core_map::{Holder, Holders, letter};
use super::text::{count, printable, short_list};
use frame::Frame;
use ink::{Ink, Paint};
use layout::columns_of;

/// Around everything.
const MARGIN: u32 = 14;
/// The drawing is at least this wide, or the words above it wouldn't fit.
const NARROWEST: u32 = 500;
const TITLE: u32 = 16;
const WORDS: u32 = 11;
const LINE: u32 = 16;

/// The drawing under its title. With a status, PUs are coloured by who holds them, and a legend tells the jobs.
#[must_use]
pub fn picture(title: &str, topology: &Topology, status: Option<&Status>) -> String {
    let holders = status.map(|status| (Holders::new(&status.pool, &status.jobs), status));
    let mut machine = Frame::machine(topology, holders.as_ref().map(|(holders, status)| (holders, *status)));
    layout::arrange(&mut machine);
    let width = machine.width.max(NARROWEST);
    let words = words(topology, status, width);
    let entries =
        holders.as_ref().map(|(holders, status)| legend(topology, holders, status)).unwrap_or_default();

    let top = MARGIN + TITLE + 6 + LINE * count_of(words.len()) + 6;
    let columns = columns_of(&entries.iter().map(|entry| entry.width).collect::<Vec<_>>(), width);
    let rows = entries.len().div_ceil(columns.len().max(1));
    let legend_top = top + machine.height + if rows > 0 { 14 } else { 0 };
    let height = legend_top + count_of(rows) * (LINE + 4) + MARGIN;

    let mut ink = Ink::new(width + 2 * MARGIN, height);
    let letters = (width * 100 / (TITLE * 70)) as usize;
    ink.heading(MARGIN, MARGIN + TITLE - 3, TITLE, &layout::shortened(&printable(title), letters));
    for (n, line) in (0..).zip(&words) {
        ink.words(MARGIN, MARGIN + TITLE + 6 + LINE * n + 11, WORDS, line);
    }
    machine.draw(&mut ink, MARGIN, top);
    for (n, entry) in entries.iter().enumerate() {
        // Down the columns, as lists are read.
        let left: u32 = columns.iter().take(n / rows).sum();
        entry.draw(&mut ink, MARGIN + left, legend_top + count_of(n % rows) * (LINE + 4));
    }
    ink.finish()
}

/// What is above the drawing, in lines that fit.
fn words(topology: &Topology, status: Option<&Status>, width: u32) -> Vec<String> {
    let columns = (width * 100 / (WORDS * 62)) as usize;
    let mut lines = vec![counts(topology)];
    if let Some(fits) = status.map(|status| &status.fits).or(topology.fits.as_ref()) {
        lines.push(super::topology::fits(topology, fits));
    }
    let note = "cells are CPUs by the kernel's numbers, C0 is core 0";
    lines.push(note.to_owned());
    let wrapped = lines.iter().map(|line| super::text::wrap(line, columns, "", "  "));
    wrapped.flat_map(|text| text.lines().map(str::to_owned).collect::<Vec<_>>()).collect()
}

fn counts(topology: &Topology) -> String {
    format!("{}, CPUs {}", super::topology::counts(topology), short_list(&topology.cpus, 24))
}

/// An entry of the legend.
struct Entry {
    paint: Paint,
    letter: String,
    text: String,
    hint: String,
    width: u32,
}

impl Entry {
    fn new(paint: Paint, letter: String, text: String, hint: String) -> Self {
        let width = 30 + ink::width_of(&text, WORDS) + 18;
        Self { paint, letter, text, hint, width }
    }

    fn draw(&self, ink: &mut Ink, x: u32, y: u32) {
        ink.open(&self.hint);
        ink.cell((x, y), (22, LINE), &self.paint, &self.letter);
        ink.words(x + 30, y + 12, WORDS, &self.text);
        ink.close();
    }
}

/// Who is in the drawing: jobs that hold PUs, and the other colours that occur.
fn legend(topology: &Topology, holders: &Holders, status: &Status) -> Vec<Entry> {
    let all = topology.cpus.parse().unwrap_or_default();
    let among = holders.among(&all);
    let mut entries = Vec::new();
    for (n, job) in status.jobs.iter().enumerate().filter(|(_, job)| !job.cpus.is_empty()) {
        let id = printable(&job.id);
        let text = format!("{}, CPUs {}", layout::shortened(&id, 60), short_list(&job.cpus, 20));
        let hint = format!("{id}: CPUs {}", printable(&job.cpus));
        entries.push(Entry::new(Paint::of(Holder::Job(n)), letter(n).to_string(), text, hint));
    }
    for (holder, cell, word) in [
        (Holder::Several, "!", "several jobs"),
        (Holder::Housekeeping, "", "housekeeping"),
        (Holder::Free, "", "free"),
        (Holder::Offline, "", "offline"),
    ] {
        if let Some(pus) = among.get(&holder) {
            let text = format!("{word}, CPUs {}", short_list(&pus.to_string(), 20));
            let hint = format!("{word}: {}, CPUs {pus}", count(pus.len() as u64, "CPU", "CPUs"));
            entries.push(Entry::new(Paint::of(holder), cell.to_owned(), text, hint));
        }
    }
    entries
}

fn count_of(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

#[cfg(test)]
#[path = "picture/tests.rs"]
mod tests;
