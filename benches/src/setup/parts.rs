//! A bench that has several parts: all of them, or those that the command line chooses by `--only`.

use anyhow::ensure;

use crate::measure::results::{Figure, publish};

/// A part of a bench: its name, and the function that measures and returns its figures. `B` is what all parts of
/// the bench share.
pub type Part<B> = (&'static str, fn(&B) -> anyhow::Result<Vec<Figure>>);

/// Runs all parts of the bench `name`, or only the part that the arguments of this program name after `--only`. Then
/// publishes the figures.
///
/// # Errors
/// If there is no such part, or a part fails, or the figures can't be written.
pub fn run_parts<B>(name: &str, bench: &B, parts: &[Part<B>]) -> anyhow::Result<()> {
    let only = argument_of_only();
    let names: Vec<&str> = parts.iter().map(|(name, _)| *name).collect();
    ensure!(
        only.as_ref().is_none_or(|only| names.contains(&only.as_str())),
        "--only: there is no such part: choose from {}",
        names.join(", ")
    );
    let mut figures = Vec::new();
    for (part, measure) in parts {
        if only.as_ref().is_none_or(|only| only == part) {
            figures.extend(measure(bench)?);
        }
    }
    publish(name, &figures)
}

/// Returns whether a case of a bench is selected: `--only TEXT` in the arguments of this program selects the cases
/// whose names contain the text. Without it, all are.
#[must_use]
pub fn is_selected(name: &str) -> bool {
    argument_of_only().is_none_or(|text| name.contains(&text))
}

fn argument_of_only() -> Option<String> {
    std::env::args().skip_while(|argument| argument != "--only").nth(1)
}
