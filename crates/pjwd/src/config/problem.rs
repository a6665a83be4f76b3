//! What is wrong with a configuration, shown where it stands.

use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Lines longer than this are cut when they are shown.
const LONGEST_LINE: usize = 120;

/// A file's text, to point into.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Page {
    path: PathBuf,
    text: Arc<str>,
}

/// Something wrong with a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    path: PathBuf,
    /// Line and column, counted from 1; `None` if the whole file is meant.
    place: Option<(usize, usize)>,
    /// The line, and how many characters of it are meant.
    excerpt: Option<(String, usize)>,
    what: String,
    hint: String,
}

impl Problem {
    /// A problem of a file as a whole.
    pub(super) fn of_file(path: &Path, what: String) -> Self {
        Self { path: path.to_owned(), place: None, excerpt: None, what, hint: String::new() }
    }
}

impl Page {
    pub(super) fn new(path: &Path, text: &str) -> Self {
        Self { path: path.to_owned(), text: text.into() }
    }

    /// A problem that no single place has.
    pub(super) fn whole(&self, what: String, hint: &str) -> Problem {
        Problem { hint: hint.to_owned(), ..Problem::of_file(&self.path, what) }
    }

    /// A problem at a range of bytes.
    pub(super) fn problem(&self, span: Range<usize>, what: String, hint: &str) -> Problem {
        let start = floor(&self.text, span.start);
        let before = &self.text[..start];
        let line_start = before.rfind('\n').map_or(0, |at| at + 1);
        let line = self.text[line_start..].lines().next().unwrap_or("");
        let column = self.text[line_start..start].chars().count() + 1;
        let end = floor(&self.text, span.end.min(line_start + line.len()).max(start));
        let width = self.text[start..end].chars().count().max(1);
        Problem {
            path: self.path.clone(),
            place: Some((before.matches('\n').count() + 1, column)),
            excerpt: Some((shown(line), width)),
            what: what.lines().collect::<Vec<_>>().join("; "),
            hint: hint.to_owned(),
        }
    }
}

fn floor(text: &str, at: usize) -> usize {
    (0..=at.min(text.len())).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0)
}

/// A text without characters that draw on a terminal, and not too long.
pub(super) fn shown(text: &str) -> String {
    let harmless = |character: char| if character.is_control() { '\u{fffd}' } else { character };
    text.chars().take(LONGEST_LINE).map(harmless).collect()
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.path.display())?;
        if let Some((line, column)) = self.place {
            write!(f, ":{line}:{column}")?;
        }
        write!(f, ": {}", self.what)?;
        if let (Some((text, width)), Some((line, column))) = (&self.excerpt, self.place) {
            let margin = line.to_string();
            let carets = "^".repeat((*width).min(LONGEST_LINE.saturating_sub(column).max(1)));
            write!(
                f,
                "\n  {margin} | {text}\n  {:2$} | {:3$}{carets}",
                "",
                "",
                margin.len(),
                column.min(LONGEST_LINE) - 1
            )?;
        }
        if !self.hint.is_empty() {
            write!(f, "\n    = {}", self.hint)?;
        }
        Ok(())
    }
}

/// `did you mean …`, if a known key is close enough to what was written.
pub(super) fn nearest<'k>(written: &str, known: impl Iterator<Item = &'k str>) -> String {
    let written: String = written.chars().take(60).collect();
    let closest = known.map(|key| (distance(&written, key), key)).min();
    match closest {
        Some((distance, key)) if distance <= (key.len() / 3).max(2) => format!("did you mean `{key}`?"),
        _ => "docs/config.md lists all keys".to_owned(),
    }
}

/// How many letters must be changed, added or taken away (Levenshtein).
fn distance(one: &str, other: &str) -> usize {
    let other: Vec<char> = other.chars().collect();
    let mut row: Vec<usize> = (0..=other.len()).collect();
    for (at, letter) in one.chars().enumerate() {
        let mut corner = row[0];
        row[0] = at + 1;
        for (index, same) in other.iter().map(|known| *known == letter).enumerate() {
            let changed = corner + usize::from(!same);
            corner = row[index + 1];
            row[index + 1] = changed.min(corner + 1).min(row[index] + 1);
        }
    }
    row[other.len()]
}
