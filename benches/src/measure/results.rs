//! Prints and writes the results of a bench: `target/bench/NAME.json` is a list of figures. Each figure has the value
//! of a peer that was measured in the same run. The names of the figures are public interface.

use std::fs;
use std::io::{Write, stdout};
use std::path::{Path, PathBuf};

use anyhow::Context;
use serde::Serialize;

/// A measured value of pjw, and the value of a peer for comparison. A peer is another program or method that was
/// measured in the same run of the bench.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Figure {
    /// The name of the measured quantity.
    pub name: String,
    /// The measured value of pjw: the median of the measurements.
    pub value: f64,
    /// The unit of `value` and `peer_value`.
    pub unit: String,
    /// The name of the peer: the program or method with which pjw is compared.
    pub peer: String,
    /// The measured value of the peer: the median of the measurements.
    pub peer_value: f64,
    /// The value of pjw divided by the value of the peer: `value / peer_value`.
    pub ratio: f64,
}

impl Figure {
    /// Makes a figure (a measured value of pjw and the value of a peer for comparison). The arguments are the fields of
    /// the figure, and `ratio` is computed from them.
    #[must_use]
    pub fn new(name: &str, value: f64, unit: &str, peer: &str, peer_value: f64) -> Self {
        let ratio = value / peer_value;
        Self { name: name.into(), value, unit: unit.into(), peer: peer.into(), peer_value, ratio }
    }
}

/// Returns the median of `values`: the middle value, or the mean of the two middle values. `None` if `values` is empty.
#[must_use]
pub fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => None,
        odd if odd % 2 == 1 => Some(sorted[middle]),
        _ => Some(f64::midpoint(sorted[middle - 1], sorted[middle])),
    }
}

/// Returns a quantile of `values` by the method of the nearest rank: the smallest value that is at least as large as
/// the share `share` of all values. `share` is from 0.0 to 1.0: 0.5 stands for the median, 0.99 for the 99th
/// percentile, and 1.0 for the largest value. `None` if `values` is empty.
#[must_use]
#[expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)]
pub fn quantile(values: &[f64], share: f64) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let rank = (share.clamp(0.0, 1.0) * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).copied()
}

/// Rounds `value` up to a whole number, and limits the result to the range from 1 to `most`.
#[must_use]
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "the value is between 1 and a u32"
)]
pub fn ceil_count(value: f64, most: u32) -> u64 {
    value.ceil().clamp(1.0, most.into()) as u64
}

/// Prints `line` to standard output, and flushes the output.
///
/// # Errors
/// If the output can't be written.
pub fn print_line(line: &str) -> anyhow::Result<()> {
    let mut out = stdout().lock();
    writeln!(out, "{line}").and_then(|()| out.flush()).context("can't write to stdout")
}

/// Prints the results of the bench `name` as a table, and writes them to `target/bench/NAME.json`. Each figure is a
/// measured value of pjw and the value of a peer for comparison.
///
/// # Errors
/// If the output or the file can't be written.
pub fn publish(name: &str, figures: &[Figure]) -> anyhow::Result<()> {
    let width =
        |text: fn(&Figure) -> &str| figures.iter().map(|figure| text(figure).len()).max().unwrap_or(0);
    let (name_width, peer_width) = (width(|figure| &figure.name), width(|figure| &figure.peer));
    print_line("")?;
    for Figure { name, value, unit, peer, peer_value, ratio } in figures {
        print_line(&format!(
            "{name:<name_width$}  {value:>12.3}  {peer:<peer_width$}  {peer_value:>12.3} {unit:<10}  \
             x{ratio:.3}"
        ))?;
    }
    let path = write_json(&target_directory()?, name, &figures)?;
    print_line(&format!("written to {}", path.display()))
}

/// Returns the path of the directory to which the benches write their results: `target/bench` of the workspace.
///
/// # Errors
/// If the benches are in no workspace.
pub fn target_directory() -> anyhow::Result<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().context("the benches are in no workspace")?;
    Ok(root.join("target/bench"))
}

/// Writes `value` as JSON to the file `DIR/NAME.json`, and returns the path of the file. DIR is `dir`, and NAME is
/// `name`.
///
/// # Errors
/// If the directory can't be created, or if the file can't be written.
pub fn write_json(dir: &Path, name: &str, value: &impl Serialize) -> anyhow::Result<PathBuf> {
    let path = dir.join(format!("{name}.json"));
    let text = serde_json::to_string_pretty(value)?;
    fs::create_dir_all(dir)
        .and_then(|()| fs::write(&path, text + "\n"))
        .with_context(|| format!("can't write {}", path.display()))?;
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_the_middle_value() {
        assert_eq!(median(&[]), None);
        assert_eq!(median(&[3.0]), Some(3.0));
        assert_eq!(median(&[9.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[4.0, 1.0, 2.0, 9.0]), Some(3.0));
    }

    #[test]
    fn a_quantile_is_one_of_the_values() {
        let values: Vec<f64> = (1..=200).rev().map(f64::from).collect();
        assert_eq!(quantile(&values, 0.5), Some(100.0));
        assert_eq!(quantile(&values, 0.99), Some(198.0));
        assert_eq!(quantile(&values, 1.0), Some(200.0));
        assert_eq!(quantile(&values, 0.0), Some(1.0));
        assert_eq!(quantile(&[], 0.5), None);
    }

    #[test]
    fn a_figure_has_the_names_that_scripts_rely_on() {
        let json = serde_json::to_value(Figure::new("a", 3.0, "ms", "b", 2.0)).unwrap();
        let names: Vec<&str> = json.as_object().unwrap().keys().map(String::as_str).collect();
        for name in ["name", "value", "unit", "peer", "peer_value", "ratio"] {
            assert!(names.contains(&name), "{names:?}");
        }
        assert_eq!(json["ratio"], 1.5);
    }
}
