//! A Rust source file as the rules read it: its lines, its lines without comments and literals, and which lines are
//! tests.
//!
//! This is not a parser. It finds comments, strings and characters, and counts braces. That is enough for code that
//! rustfmt has formatted.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// A Rust source file.
pub(crate) struct Source {
    /// The path, relative to the root of the workspace.
    pub(crate) path: PathBuf,
    /// The lines.
    pub(crate) lines: Vec<String>,
    /// The lines, with blanks instead of comments and the contents of literals.
    pub(crate) code: Vec<String>,
    /// For each line, whether it is compiled for tests only.
    pub(crate) is_test: Vec<bool>,
}

/// A function and the number of its lines.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Function {
    pub(crate) name: String,
    /// The number of the first line, from 1.
    pub(crate) line: usize,
    pub(crate) lines: usize,
}

/// The attributes of code that is compiled for tests only. Only dev-dependencies enable the feature `testing`.
const FOR_TESTS: &[&str] =
    &["#[cfg(test)]", "#[cfg(feature = \"testing\")]", "#[cfg(any(test, feature = \"testing\"))]"];

impl Source {
    /// Parses the text of a file. With `only_tests`, all of the file is a test.
    pub(crate) fn new(path: &Path, text: &str, only_tests: bool) -> Self {
        let lines: Vec<String> = text.lines().map(str::to_owned).collect();
        let code: Vec<String> = blank_out(text).lines().map(str::to_owned).collect();
        let mut is_test = vec![only_tests; lines.len()];
        let is_for_tests =
            |at: &usize| code[*at].trim().starts_with("#[cfg(") && FOR_TESTS.contains(&lines[*at].trim());
        for at in (0..code.len()).filter(is_for_tests) {
            let last = end_of_item(&code, at);
            is_test[at..=last].fill(true);
        }
        Self { path: path.to_owned(), lines, code, is_test }
    }

    /// Returns the lines of code that are not compiled for tests only, with their numbers from 1.
    pub(crate) fn product(&self) -> impl Iterator<Item = (usize, &str)> {
        let lines = self.code.iter().zip(&self.is_test).enumerate();
        lines.filter(|(_, (_, is_test))| !**is_test).map(|(at, (line, _))| (at + 1, line.as_str()))
    }

    /// Returns the functions, including tests.
    pub(crate) fn functions(&self) -> Vec<Function> {
        let mut functions = Vec::new();
        for (at, line) in self.code.iter().enumerate() {
            let Some(name) = name_after_fn(line) else { continue };
            let last = end_of_item(&self.code, at);
            functions.push(Function { name, line: at + 1, lines: last - at + 1 });
        }
        functions
    }

    /// Returns the paths of modules that are compiled for tests only: `#[cfg(test)] mod tests;`.
    pub(crate) fn test_modules(&self) -> BTreeSet<PathBuf> {
        let directory = match self.path.file_stem().and_then(|stem| stem.to_str()) {
            Some("lib" | "main" | "mod") | None => self.path.parent().unwrap().to_owned(),
            Some(stem) => self.path.with_file_name(stem),
        };
        let declared = self.code.iter().zip(&self.is_test).filter(|(_, is_test)| **is_test);
        let names = declared.filter_map(|(line, _)| {
            let (before, name) = line.trim().strip_suffix(';')?.split_once("mod ")?;
            (before.is_empty() || before.starts_with("pub")).then_some(name)
        });
        names
            .flat_map(|name| [directory.join(format!("{name}.rs")), directory.join(name).join("mod.rs")])
            .collect()
    }
}

/// Returns the name of the function that a line of code declares.
fn name_after_fn(line: &str) -> Option<String> {
    let (before, after) = line.split_once("fn ")?;
    let words = ["pub", "const", "async", "unsafe", "extern", "\"C\"", "\"\""];
    let is_declared = before.split_whitespace().all(|word| words.contains(&word) || word.starts_with("pub("));
    let name: String = after.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
    (is_declared && !name.is_empty()).then_some(name)
}

/// Returns the index of the last line of the item that begins at line `begin`: the line with its outermost closing
/// brace, or with a semicolon before any brace.
fn end_of_item(code: &[String], begin: usize) -> usize {
    let mut depth = 0_usize;
    let mut brackets = 0_usize;
    for (at, line) in code.iter().enumerate().skip(begin) {
        for c in line.chars() {
            match c {
                '(' | '[' => brackets += 1,
                ')' | ']' => brackets = brackets.saturating_sub(1),
                '{' => depth += 1,
                '}' if depth <= 1 => return at,
                '}' => depth -= 1,
                ';' if depth == 0 && brackets == 0 => return at,
                _ => {}
            }
        }
    }
    code.len() - 1
}

/// Replaces comments and the contents of literals by blanks. The number of lines stays the same.
fn blank_out(text: &str) -> String {
    let chars: Vec<char> = text.chars().collect();
    let mut out = String::with_capacity(text.len());
    let mut at = 0;
    while at < chars.len() {
        let end = end_of_comment_or_literal(&chars, at);
        match end {
            Some((inside, end)) => {
                out.extend(&chars[at..inside.start]);
                out.extend(chars[inside.clone()].iter().map(|c| if *c == '\n' { '\n' } else { ' ' }));
                out.extend(&chars[inside.end..end]);
                at = end;
            }
            None => {
                out.push(chars[at]);
                at += 1;
            }
        }
    }
    out
}

/// If a comment or a literal begins at `at`, returns the range to replace by blanks, and its end.
fn end_of_comment_or_literal(chars: &[char], at: usize) -> Option<(std::ops::Range<usize>, usize)> {
    let rest = &chars[at..];
    let find = |needle: &str, from: usize| {
        let needle: Vec<char> = needle.chars().collect();
        let found = chars[from..].windows(needle.len()).position(|window| window == needle);
        found.map_or(chars.len(), |found| from + found)
    };
    match rest {
        ['/', '/', ..] => {
            let end = find("\n", at);
            Some((at..end, end))
        }
        ['/', '*', ..] => {
            let end = (find("*/", at) + 2).min(chars.len());
            Some((at..end, end))
        }
        ['r', '#' | '"', ..] if at == 0 || !is_name(chars[at - 1]) || chars[at - 1] == 'b' => {
            let hashes = rest[1..].iter().take_while(|c| **c == '#').count();
            if rest.get(1 + hashes) != Some(&'"') {
                return None;
            }
            let begin = at + hashes + 2;
            let end = find(&format!("\"{}", "#".repeat(hashes)), begin);
            Some((begin..end, (end + 1 + hashes).min(chars.len())))
        }
        ['"', ..] => {
            let end = end_of_string(chars, at + 1, '"');
            Some((at + 1..end, (end + 1).min(chars.len())))
        }
        // A lifetime has no closing quote.
        ['\'', '\\', ..] | ['\'', _, '\'', ..] => {
            let end = end_of_string(chars, at + 1, '\'');
            Some((at + 1..end, (end + 1).min(chars.len())))
        }
        _ => None,
    }
}

fn is_name(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

fn end_of_string(chars: &[char], mut at: usize, quote: char) -> usize {
    while at < chars.len() && chars[at] != quote {
        at += if chars[at] == '\\' { 2 } else { 1 };
    }
    at.min(chars.len())
}

#[test]
fn comments_and_literals_are_not_code() {
    let text = r##"let a = "x.unwrap()"; // y.unwrap()
let b = 'u'; let c = r#"z "quoted" {"#; let d: &'static str = "\" {"; /* { */ let e = b'"';"##;
    let blanked = blank_out(text);
    assert!(!blanked.contains("unwrap"), "{blanked}");
    assert!(!blanked.contains('{'), "{blanked}");
    assert!(blanked.contains("let e = b' ';"), "{blanked}");
    assert_eq!(blanked.lines().count(), 2);
}

#[test]
fn functions_end_with_their_last_brace() {
    let text = "trait T {\n    fn declared(&self, a: [u8; 2]);\n}\npub(crate) fn long(\n    a: u8,\n) {\n    if a > 0 {\n    }\n}\n";
    let functions = Source::new(Path::new("a.rs"), text, false).functions();
    let found: Vec<_> =
        functions.iter().map(|function| (function.name.as_str(), function.line, function.lines)).collect();
    assert_eq!(found, [("declared", 2, 1), ("long", 4, 6)]);
}

#[test]
fn test_code_is_not_product_code() {
    let text = "fn a() {}\n#[cfg(test)]\nmod tests {\n    fn b() {}\n}\nfn c() {}\n#[cfg(test)]\npub(crate) mod other;\nfn d() {}\n#[cfg(feature = \"testing\")]\npub mod testing;\n";
    let source = Source::new(Path::new("crates/x/src/room.rs"), text, false);
    let product: Vec<_> = source.product().map(|(_, line)| line).collect();
    assert_eq!(product, ["fn a() {}", "fn c() {}", "fn d() {}"]);
    assert!(source.test_modules().contains(Path::new("crates/x/src/room/other.rs")));
    assert!(source.test_modules().contains(Path::new("crates/x/src/room/testing.rs")));
}
