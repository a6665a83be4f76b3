//! Text helpers for lists and numbers in findings.

use core::fmt::Display;

use crate::basics::prelude::*;

/// The maximum number of entries that are listed by name.
const MAX_NAMED: usize = 4;

/// Joins names to a list: `a`, `a and b`, `a, b, c, d and 5 more`.
pub(super) fn join_names<T: Display>(things: impl IntoIterator<Item = T>) -> String {
    let mut names: Vec<String> = Vec::new();
    let mut more = 0_usize;
    for thing in things {
        if names.len() < MAX_NAMED { names.push(thing.to_string()) } else { more += 1 }
    }
    if more > 0 {
        return format!("{} and {more} more", names.join(", "));
    }
    match names.split_last() {
        Some((last, earlier)) if !earlier.is_empty() => format!("{} and {last}", earlier.join(", ")),
        _ => names.concat(),
    }
}

/// Formats the number `n` with its noun: `1 thread`, `2 threads`. `one` is the noun in the singular.
pub(super) fn counted_noun(n: usize, one: &str) -> String {
    if n == 1 {
        return format!("1 {one}");
    }
    let plural = if one.ends_with("ss") { "es" } else { "s" };
    format!("{n} {one}{plural}")
}

/// Formats a size in bytes with one decimal and a binary unit: `1.2 GiB`, `512.0 MiB`.
pub(super) fn bytes_text(amount: u64) -> String {
    const UNITS: [(u64, &str); 3] = [(1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB")];
    let (size, unit) = UNITS.into_iter().find(|(size, _)| amount >= *size).unwrap_or((1 << 10, "KiB"));
    let tenths = u128::from(amount) * 10 / u128::from(size);
    format!("{}.{} {unit}", tenths / 10, tenths % 10)
}

/// Formats a share in permille as a percentage with one decimal: 302 as `30.2 %`.
pub(super) fn percent_text(permille: u64) -> String {
    format!("{}.{} %", permille / 10, permille % 10)
}
