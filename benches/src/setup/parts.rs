//! A bench that has several parts: all of them, or those that the command line chooses by `--only`.

use anyhow::ensure;

use crate::measure::results::{Figure, publish};

/// A part of a bench that can be run alone: its name, and the function that measures and returns the results of this
/// part. `B` is the type of the data that all parts of the bench share.
pub type Part<B> = (&'static str, fn(&B) -> anyhow::Result<Vec<Figure>>);

/// Runs all parts of the bench `name`. If the arguments of this program contain `--only PART`, runs only the part with
/// this name. Then prints the results, and writes them to a file. `bench` is passed to each part.
///
/// # Errors
/// If there is no such part, if a part fails, or if the results can't be written.
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

/// Returns whether the case with the name `name` of a bench is to be measured. If the arguments of this program contain
/// `--only TEXT`, these are the cases whose names contain the text. Otherwise returns true.
#[must_use]
pub fn is_selected(name: &str) -> bool {
    argument_of_only().is_none_or(|text| name.contains(&text))
}

fn argument_of_only() -> Option<String> {
    std::env::args().skip_while(|argument| argument != "--only").nth(1)
}
