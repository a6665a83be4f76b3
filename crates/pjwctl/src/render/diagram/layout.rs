//! The sizes and positions of boxes: boxes go into the grid whose shape is nearest to that of a page.

use super::boxes::{BoxGroup, DiagramBox};
use super::svg::text_width;

/// The aspect ratio of a page: width and height.
const PAGE: (u32, u32) = (8, 5);
/// The minimum width of a section that flows, so that its boxes stand beside each other.
const MIN_FLOW_WIDTH: u32 = 250;
/// The maximum number of columns that is tried.
const MAX_COLUMNS: usize = 256;

/// Computes the size of `boxes` and of all boxes inside it. Also computes the position of each box inside its outer
/// box.
pub(super) fn arrange(boxes: &mut DiagramBox) {
    let metrics = boxes.metrics();
    let (left, gap) = (metrics.padding, metrics.gap);
    if boxes.sections.is_empty() {
        boxes.width = boxes.width.max(text_width(&boxes.label, metrics.text) + 2 * left);
        boxes.height = boxes.height.max(metrics.header);
        return;
    }
    for section in &mut boxes.sections {
        section.frames.iter_mut().for_each(arrange);
    }
    let grids = boxes.sections.iter_mut().filter(|section| !section.flows);
    let widest = grids.map(|section| arrange_in_grid(section, gap)).max().unwrap_or(0);
    let note = if boxes.note.is_empty() { 0 } else { text_width(&boxes.note, metrics.text) + 10 };
    let header = text_width(&boxes.label, metrics.text) + note;
    let has_strip = boxes.sections.iter().any(|section| section.flows);
    let inner = widest.max(header).max(if has_strip { MIN_FLOW_WIDTH } else { 0 });
    for section in boxes.sections.iter_mut().filter(|section| !section.flows) {
        let used = section.frames.iter().map(|boxes| boxes.x + boxes.width).max().unwrap_or(0);
        add_width(section, inner.saturating_sub(used));
    }
    let mut bottom = metrics.header.max(metrics.padding);
    for section in &mut boxes.sections {
        if section.flows {
            arrange_in_rows(section, inner, gap);
        }
        let used = section.frames.iter().map(|boxes| boxes.y + boxes.height).max().unwrap_or(0);
        for child in &mut section.frames {
            child.x += left;
            child.y += bottom;
        }
        bottom += used + gap;
    }
    let right = boxes.sections.iter().flat_map(|section| &section.frames).map(|child| child.x + child.width);
    boxes.width = right.max().unwrap_or(0).max(inner + left) + left;
    boxes.height = bottom - gap + metrics.padding;
}

/// Places the boxes of `section` in rows and columns, with `gap` pixels between them. Makes all boxes of a column
/// equally wide, and all boxes of a row equally high. Returns the width of the grid, in pixels.
///
/// If `section` has no fixed number of columns, chooses the number for which the grid has few empty cells and an aspect
/// ratio near that of a page ([`PAGE`]). Empty cells count more than the aspect ratio.
fn arrange_in_grid(section: &mut BoxGroup, gap: u32) -> u32 {
    let n = section.frames.len();
    let sizes: Vec<(u32, u32)> = section.frames.iter().map(|boxes| (boxes.width, boxes.height)).collect();
    let most = n.min(section.columns.unwrap_or(MAX_COLUMNS)).max(1);
    let least = section.columns.map_or(1, |_| most);
    let best = (least..=most).min_by_key(|&columns| (shape_cost(&sizes, columns, gap), columns));
    let columns = best.unwrap_or(1);
    let (widths, heights) = track_sizes(&sizes, columns);
    for (at, boxes) in section.frames.iter_mut().enumerate() {
        let (column, row) = (at % columns, at / columns);
        boxes.x = widths[..column].iter().sum::<u32>() + count_to_u32(column) * gap;
        boxes.y = heights[..row].iter().sum::<u32>() + count_to_u32(row) * gap;
        widen(boxes, widths[column] - boxes.width);
        boxes.height = heights[row];
    }
    widths.iter().sum::<u32>() + count_to_u32(widths.len().saturating_sub(1)) * gap
}

/// Makes the section `section`, whose boxes were placed before, wider by `extra` pixels. If its number of columns is
/// fixed (the PUs of a core), all boxes become wider. Otherwise, a single box becomes wider, and several boxes keep
/// their size and are centred.
fn add_width(section: &mut BoxGroup, extra: u32) {
    match (section.columns, section.frames.as_mut_slice()) {
        (Some(columns), cells) => {
            let each = extra / count_to_u32(columns.max(1));
            for (at, cell) in cells.iter_mut().enumerate() {
                cell.x += each * count_to_u32(at % columns.max(1));
                cell.width += each;
            }
        }
        (None, [only]) => widen(only, extra),
        (None, frames) => frames.iter_mut().for_each(|boxes| boxes.x += extra / 2),
    }
}

/// Makes an arranged box wider by `extra` pixels, and also the sections inside it.
fn widen(boxes: &mut DiagramBox, extra: u32) {
    boxes.width += extra;
    boxes.sections.iter_mut().filter(|section| !section.flows).for_each(|section| add_width(section, extra));
}

/// Returns the widths of the columns and the heights of the rows of a grid, in pixels. `sizes` has the width and the
/// height of each box. The boxes fill the grid row by row, in `columns` columns.
fn track_sizes(sizes: &[(u32, u32)], columns: usize) -> (Vec<u32>, Vec<u32>) {
    let mut widths = vec![0; columns];
    let mut heights = vec![0; sizes.len().div_ceil(columns)];
    for (at, &(width, height)) in sizes.iter().enumerate() {
        let (column, row) = (at % columns, at / columns);
        widths[column] = width.max(widths[column]);
        heights[row] = height.max(heights[row]);
    }
    (widths, heights)
}

/// Returns a number that says how much the shape of a grid differs from that of a page: 1000 for the same shape, and
/// more for any other. Empty cells of the grid add to it.
fn shape_cost(sizes: &[(u32, u32)], columns: usize, gap: u32) -> u64 {
    let (widths, heights) = track_sizes(sizes, columns);
    let length = |tracks: &[u32]| u64::from(tracks.iter().sum::<u32>() + gap * count_to_u32(tracks.len()));
    let (wide, high) = (length(&widths) * u64::from(PAGE.1), length(&heights) * u64::from(PAGE.0));
    let (places, taken) = ((widths.len() * heights.len()) as u64, sizes.len() as u64);
    let ratio = wide.max(high) * 1000 / wide.min(high).max(1);
    // A grid without empty cells is preferred to one with a better shape.
    (0..8).fold(ratio, |shape_cost, _| shape_cost * places / taken.max(1))
}

/// Places the boxes of `section` one after the other, in as many rows as needed. `width` is the maximum width of a
/// row, and `gap` the distance between boxes, in pixels. A section with `stretch` has one box in each row, which
/// becomes at least `width` pixels wide.
fn arrange_in_rows(section: &mut BoxGroup, width: u32, gap: u32) {
    let (mut x, mut y, mut line) = (0, 0, 0);
    for boxes in &mut section.frames {
        if x > 0 && x + boxes.width > width {
            (x, y, line) = (0, y + line + gap, 0);
        }
        if section.stretch {
            boxes.width = boxes.width.max(width);
        }
        (boxes.x, boxes.y) = (x, y);
        x += boxes.width + gap;
        line = line.max(boxes.height);
    }
}

/// Returns the widths of the columns of a table whose entries are listed column by column. `widths` contains the widths
/// of the entries. The table has as many columns as fit into `width_left`, but at least one. All widths are in pixels.
pub(super) fn column_widths(widths: &[u32], width_left: u32) -> Vec<u32> {
    let columns = |count: usize| -> Vec<u32> {
        let rows = widths.len().div_ceil(count).max(1);
        widths.chunks(rows).map(|column| column.iter().copied().max().unwrap_or(0)).collect()
    };
    let fits = |count: &usize| columns(*count).iter().sum::<u32>() <= width_left;
    columns((2..=widths.len().min(MAX_COLUMNS)).rev().find(fits).unwrap_or(1))
}

/// Converts `n`, a number of rows or columns, to `u32`, the type of all lengths. A larger number becomes `u32::MAX`.
pub(super) fn count_to_u32(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}
