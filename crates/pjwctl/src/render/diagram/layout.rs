//! The sizes and positions of boxes: boxes go into the grid whose shape is nearest to that of a page.

use super::boxes::{BoxGroup, DiagramBox};
use super::svg::text_width;

/// The aspect ratio of a page: width and height.
const PAGE: (u32, u32) = (8, 5);
/// The minimum width of a group that flows, so that its boxes stand beside each other.
const MIN_FLOW_WIDTH: u32 = 250;
/// The maximum number of columns that is tried.
const MAX_COLUMNS: usize = 256;

/// Computes the size of `outer` and of all boxes inside it. Also computes the position of each box inside its outer
/// box.
pub(super) fn arrange(outer: &mut DiagramBox) {
    let metrics = outer.metrics();
    let (left, gap) = (metrics.padding, metrics.gap);
    if outer.groups.is_empty() {
        outer.width = outer.width.max(text_width(&outer.label, metrics.text) + 2 * left);
        outer.height = outer.height.max(metrics.header);
        return;
    }
    for group in &mut outer.groups {
        group.boxes.iter_mut().for_each(arrange);
    }
    let grids = outer.groups.iter_mut().filter(|group| !group.flows);
    let widest = grids.map(|group| arrange_in_grid(group, gap)).max().unwrap_or(0);
    let note = if outer.note.is_empty() { 0 } else { text_width(&outer.note, metrics.text) + 10 };
    let header = text_width(&outer.label, metrics.text) + note;
    let has_flow = outer.groups.iter().any(|group| group.flows);
    let inner_width = widest.max(header).max(if has_flow { MIN_FLOW_WIDTH } else { 0 });
    for group in outer.groups.iter_mut().filter(|group| !group.flows) {
        let used = group.boxes.iter().map(|child| child.x + child.width).max().unwrap_or(0);
        add_width(group, inner_width.saturating_sub(used));
    }
    let mut bottom = metrics.header.max(metrics.padding);
    for group in &mut outer.groups {
        if group.flows {
            arrange_in_rows(group, inner_width, gap);
        }
        let used = group.boxes.iter().map(|child| child.y + child.height).max().unwrap_or(0);
        for child in &mut group.boxes {
            child.x += left;
            child.y += bottom;
        }
        bottom += used + gap;
    }
    let right = outer.groups.iter().flat_map(|group| &group.boxes).map(|child| child.x + child.width);
    outer.width = right.max().unwrap_or(0).max(inner_width + left) + left;
    outer.height = bottom - gap + metrics.padding;
}

/// Places the boxes of `group` in rows and columns, with `gap` pixels between them. Makes all boxes of a column
/// equally wide, and all boxes of a row equally high. Returns the width of the grid, in pixels.
///
/// If `group` has no fixed number of columns, chooses the number for which the grid has few empty cells and an aspect
/// ratio near that of a page ([`PAGE`]). Empty cells count more than the aspect ratio.
fn arrange_in_grid(group: &mut BoxGroup, gap: u32) -> u32 {
    let n = group.boxes.len();
    let sizes: Vec<(u32, u32)> = group.boxes.iter().map(|child| (child.width, child.height)).collect();
    let max_columns = n.min(group.columns.unwrap_or(MAX_COLUMNS)).max(1);
    let min_columns = group.columns.map_or(1, |_| max_columns);
    let best = (min_columns..=max_columns).min_by_key(|&columns| (shape_cost(&sizes, columns, gap), columns));
    let columns = best.unwrap_or(1);
    let (widths, heights) = track_sizes(&sizes, columns);
    for (at, child) in group.boxes.iter_mut().enumerate() {
        let (column, row) = (at % columns, at / columns);
        child.x = widths[..column].iter().sum::<u32>() + count_to_u32(column) * gap;
        child.y = heights[..row].iter().sum::<u32>() + count_to_u32(row) * gap;
        widen(child, widths[column] - child.width);
        child.height = heights[row];
    }
    widths.iter().sum::<u32>() + count_to_u32(widths.len().saturating_sub(1)) * gap
}

/// Makes the group `group`, whose boxes were placed before, wider by `extra` pixels. If its number of columns is
/// fixed (the PUs of a core), all boxes become wider. Otherwise, a single box becomes wider, and several boxes keep
/// their size and are centred.
fn add_width(group: &mut BoxGroup, extra: u32) {
    match (group.columns, group.boxes.as_mut_slice()) {
        (Some(columns), cells) => {
            let each = extra / count_to_u32(columns.max(1));
            for (at, cell) in cells.iter_mut().enumerate() {
                cell.x += each * count_to_u32(at % columns.max(1));
                cell.width += each;
            }
        }
        (None, [only]) => widen(only, extra),
        (None, boxes) => boxes.iter_mut().for_each(|child| child.x += extra / 2),
    }
}

/// Makes an arranged box wider by `extra` pixels, and also the groups inside it.
fn widen(outer: &mut DiagramBox, extra: u32) {
    outer.width += extra;
    outer.groups.iter_mut().filter(|group| !group.flows).for_each(|group| add_width(group, extra));
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
    // The factor for empty cells is applied eight times, so that a grid with few of them is preferred to one with a
    // better shape.
    (0..8).fold(ratio, |cost, _| cost * places / taken.max(1))
}

/// Places the boxes of `group` one after the other, in as many rows as needed. `width` is the maximum width of a
/// row, and `gap` the distance between boxes, in pixels. A group with `stretch` has one box in each row, which
/// becomes at least `width` pixels wide.
fn arrange_in_rows(group: &mut BoxGroup, width: u32, gap: u32) {
    let (mut x, mut y, mut line) = (0, 0, 0);
    for child in &mut group.boxes {
        if x > 0 && x + child.width > width {
            (x, y, line) = (0, y + line + gap, 0);
        }
        if group.stretch {
            child.width = child.width.max(width);
        }
        (child.x, child.y) = (x, y);
        x += child.width + gap;
        line = line.max(child.height);
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
