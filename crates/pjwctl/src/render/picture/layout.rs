//! Sizes and places: children are put into the grid whose shape is nearest to a page's.

use super::count_of;
use super::frame::{Frame, Section};
use super::ink::width_of;

/// A page is eight wide where it is five high.
const PAGE: (u32, u32) = (8, 5);
/// Bars and devices get at least this much room to stand beside each other.
const STRIP: u32 = 250;
/// More columns than this are never tried.
const MOST_COLUMNS: usize = 256;

/// Gives a frame and all in it their sizes, and what is in it its place.
pub(super) fn arrange(frame: &mut Frame) {
    let metrics = frame.metrics();
    let (left, gap) = (metrics.padding, metrics.gap);
    if frame.sections.is_empty() {
        frame.width = frame.width.max(width_of(&frame.label, metrics.text) + 2 * left);
        frame.height = frame.height.max(metrics.header);
        return;
    }
    for section in &mut frame.sections {
        section.frames.iter_mut().for_each(arrange);
    }
    let grids = frame.sections.iter_mut().filter(|section| !section.flows);
    let widest = grids.map(|section| grid(section, gap)).max().unwrap_or(0);
    let note = if frame.note.is_empty() { 0 } else { width_of(&frame.note, metrics.text) + 10 };
    let header = width_of(&frame.label, metrics.text) + note;
    let has_strip = frame.sections.iter().any(|section| section.flows);
    let inner = widest.max(header).max(if has_strip { STRIP } else { 0 });
    for section in frame.sections.iter_mut().filter(|section| !section.flows) {
        let used = section.frames.iter().map(|frame| frame.x + frame.width).max().unwrap_or(0);
        fill(section, inner.saturating_sub(used));
    }
    let mut bottom = metrics.header.max(metrics.padding);
    for section in &mut frame.sections {
        if section.flows {
            flow(section, inner, gap);
        }
        let used = section.frames.iter().map(|frame| frame.y + frame.height).max().unwrap_or(0);
        for child in &mut section.frames {
            child.x += left;
            child.y += bottom;
        }
        bottom += used + gap;
    }
    let right = frame.sections.iter().flat_map(|section| &section.frames).map(|child| child.x + child.width);
    frame.width = right.max().unwrap_or(0).max(inner + left) + left;
    frame.height = bottom - gap + metrics.padding;
}

/// Puts the frames of a section into rows and columns; returns the width.
fn grid(section: &mut Section, gap: u32) -> u32 {
    let n = section.frames.len();
    let sizes: Vec<(u32, u32)> = section.frames.iter().map(|frame| (frame.width, frame.height)).collect();
    let most = n.min(section.columns.unwrap_or(MOST_COLUMNS)).max(1);
    let least = section.columns.map_or(1, |_| most);
    let best = (least..=most).min_by_key(|&columns| (badness(&sizes, columns, gap), columns));
    let columns = best.unwrap_or(1);
    let (widths, heights) = tracks(&sizes, columns);
    for (at, frame) in section.frames.iter_mut().enumerate() {
        let (column, row) = (at % columns, at / columns);
        frame.x = widths[..column].iter().sum::<u32>() + count_of(column) * gap;
        frame.y = heights[..row].iter().sum::<u32>() + count_of(row) * gap;
        widen(frame, widths[column] - frame.width);
        frame.height = heights[row];
    }
    widths.iter().sum::<u32>() + count_of(widths.len().saturating_sub(1)) * gap
}

/// Uses the room that is left beside the frames of a section: a single one and cells become wider, others move
/// to the middle.
fn fill(section: &mut Section, extra: u32) {
    match (section.columns, section.frames.as_mut_slice()) {
        (Some(columns), cells) => {
            let each = extra / count_of(columns.max(1));
            for (at, cell) in cells.iter_mut().enumerate() {
                cell.x += each * count_of(at % columns.max(1));
                cell.width += each;
            }
        }
        (None, [only]) => widen(only, extra),
        (None, frames) => frames.iter_mut().for_each(|frame| frame.x += extra / 2),
    }
}

/// Makes a frame wider that is arranged already.
fn widen(frame: &mut Frame, extra: u32) {
    frame.width += extra;
    frame.sections.iter_mut().filter(|section| !section.flows).for_each(|section| fill(section, extra));
}

/// The widths of the columns and the heights of the rows.
fn tracks(sizes: &[(u32, u32)], columns: usize) -> (Vec<u32>, Vec<u32>) {
    let mut widths = vec![0; columns];
    let mut heights = vec![0; sizes.len().div_ceil(columns)];
    for (at, &(width, height)) in sizes.iter().enumerate() {
        let (column, row) = (at % columns, at / columns);
        widths[column] = width.max(widths[column]);
        heights[row] = height.max(heights[row]);
    }
    (widths, heights)
}

/// How far from the shape of a page, in thousandths; empty places count too.
fn badness(sizes: &[(u32, u32)], columns: usize, gap: u32) -> u64 {
    let (widths, heights) = tracks(sizes, columns);
    let length = |tracks: &[u32]| u64::from(tracks.iter().sum::<u32>() + gap * count_of(tracks.len()));
    let (wide, high) = (length(&widths) * u64::from(PAGE.1), length(&heights) * u64::from(PAGE.0));
    let (places, taken) = ((widths.len() * heights.len()) as u64, sizes.len() as u64);
    let ratio = wide.max(high) * 1000 / wide.min(high).max(1);
    // A grid without holes is worth a shape that is a good deal worse.
    (0..8).fold(ratio, |badness, _| badness * places / taken.max(1))
}

/// Puts the frames of a section one after the other, on as many lines as they take.
fn flow(section: &mut Section, width: u32, gap: u32) {
    let (mut x, mut y, mut line) = (0, 0, 0);
    for frame in &mut section.frames {
        if x > 0 && x + frame.width > width {
            (x, y, line) = (0, y + line + gap, 0);
        }
        if section.stretch {
            frame.width = frame.width.max(width);
        }
        (frame.x, frame.y) = (x, y);
        x += frame.width + gap;
        line = line.max(frame.height);
    }
}

/// The widths of as many columns as fit, for entries that are listed down the columns.
pub(super) fn columns_of(widths: &[u32], room: u32) -> Vec<u32> {
    let columns = |count: usize| -> Vec<u32> {
        let rows = widths.len().div_ceil(count).max(1);
        widths.chunks(rows).map(|column| column.iter().copied().max().unwrap_or(0)).collect()
    };
    let fits = |count: &usize| columns(*count).iter().sum::<u32>() <= room;
    columns((2..=widths.len().min(MOST_COLUMNS)).rev().find(fits).unwrap_or(1))
}

/// The text, cut to so many letters.
pub(super) fn shortened(text: &str, most: usize) -> String {
    if text.chars().count() <= most {
        return text.to_owned();
    }
    text.chars().take(most.saturating_sub(1)).chain(['…']).collect()
}
