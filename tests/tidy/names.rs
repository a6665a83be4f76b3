//! Identifiers in the code of the product and in the tests of its crates use the terms of the field.

use std::collections::BTreeSet;

use super::source::Source;
use super::{assert_no_violations, is_in_crate_folder, is_product, sources};

/// Words that no identifier may have as a part: (word, term to use). For example, `touched_cpus` has
/// the parts `touched` and `cpus`, and `WallRecord` has the parts `wall` and `record`.
const FORBIDDEN_WORDS: &[(&str, &str)] = &[
    ("acquaintance", "process cache entry"),
    ("aside", "excluded"),
    ("askers", "affinity attempts"),
    ("asks", "affinity attempts"),
    ("attendant", "event loop"),
    ("bell", "event descriptor"),
    ("bequeathed", "inherited from this thread"),
    ("birthmark", "inherited mask"),
    ("blind", "incomplete"),
    ("book", "registry"),
    ("books", "records"),
    ("company", "interference"),
    ("crowd", "processes"),
    ("deaf", "paused"),
    ("desk", "client"),
    ("enroll", "add member"),
    ("everybody", "all processes"),
    ("face", "stat fields"),
    ("fittings", "devices"),
    ("forgive", "retry"),
    ("fortify", "plan cpusets"),
    ("founders", "initial processes"),
    ("glance", "mask probe"),
    ("ground", "platform capabilities"),
    ("heal", "defragment"),
    ("healing", "defragment"),
    ("heard", "received, pending"),
    ("heed", "apply"),
    ("home", "target mask, original cgroup"),
    ("ink", "SVG"),
    ("keeping", "enforcement"),
    ("lingering", "removal failed"),
    ("lingers", "removal failed"),
    ("mason", "owner of the cgroup"),
    ("meet", "update_state"),
    ("met", "first seen"),
    ("newborn", "forked process"),
    ("newborns", "forked processes"),
    ("nobody", "unassigned"),
    ("pat", "ping"),
    ("patience", "timeout"),
    ("raze", "remove"),
    ("residents", "processes in the cgroup"),
    ("seat", "thread plan, free core"),
    ("sleepers", "idle processes"),
    ("somebody", "the type of the thing"),
    ("speaker", "representative thread"),
    ("stacked", "oversubscribed"),
    ("standing", "mask status"),
    ("stirred", "dirty"),
    ("strangers", "processes outside jobs"),
    ("told", "reported, given"),
    ("touch", "mask entry"),
    ("touched", "mask entry"),
    ("troubles", "faults"),
    ("unmet", "not scanned yet"),
    ("walled", "enforced by a cpuset"),
    ("walls", "cpusets"),
    ("welcome", "confine a forked process"),
    ("whoever", "the type of the thing"),
    ("wish", "request, original mask"),
    ("wishes", "requests"),
    ("woken", "active"),
    ("yard", "test cgroup tree"),
];

/// Identifiers that may have such a word: (path, identifier, reason).
const EXCEPTIONS: &[(&str, &str, &str)] = &[
    ("crates/pjwd/src/config/mod.rs", "home", "the home directory of a user"),
    ("crates/pjwd/src/store/journal/reading.rs", "aside", "an unreadable file is set aside"),
    ("crates/pjwd/src/store/journal/reading.rs", "set_aside", "an unreadable file is set aside"),
];

#[test]
fn identifiers_use_the_terms_of_the_field() {
    let mut exceptions: BTreeSet<(&str, &str)> =
        EXCEPTIONS.iter().map(|(path, name, _)| (*path, *name)).collect();
    let mut violations = Vec::new();
    let mut reported: BTreeSet<(String, String)> = BTreeSet::new();
    for source in sources() {
        let path = source.path.to_str().unwrap();
        for (number, line) in checked_lines(source) {
            for name in identifiers(line) {
                let parts = parts(name);
                let found = FORBIDDEN_WORDS.iter().find(|(word, _)| parts.iter().any(|part| part == word));
                let Some((word, term)) = found else { continue };
                let is_exception =
                    EXCEPTIONS.iter().any(|(file, exception, _)| *file == path && *exception == name);
                exceptions.remove(&(path, name));
                if !is_exception && reported.insert((path.to_owned(), name.to_owned())) {
                    violations
                        .push(format!("{path}:{number}: {name}: instead of {word}, use the term: {term}"));
                }
            }
        }
    }
    violations.extend(
        exceptions.iter().map(|(path, name)| {
            format!("{path}: {name}: the exception is not needed: remove it from the list")
        }),
    );
    assert_no_violations(&violations);
}

/// Returns the lines of code whose identifiers are checked, with their numbers from 1: those of the product that are
/// not compiled for tests only, and all lines of the tests in the folders `tests` of the crates.
fn checked_lines(source: &Source) -> Vec<(usize, &str)> {
    if is_in_crate_folder(&source.path, "tests") {
        source.code.iter().enumerate().map(|(at, line)| (at + 1, line.as_str())).collect()
    } else if is_product(&source.path) {
        source.product().collect()
    } else {
        Vec::new()
    }
}

/// Returns the identifiers in a line of code.
fn identifiers(line: &str) -> impl Iterator<Item = &str> {
    line.split(|c: char| !c.is_alphanumeric() && c != '_')
        .filter(|name| name.starts_with(|c: char| c.is_alphabetic() || c == '_'))
}

/// Returns the parts of an identifier, in lower case.
fn parts(name: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut after_capital = true;
    for c in name.chars() {
        if c == '_' || (c.is_uppercase() && !after_capital) {
            parts.push(String::new());
        }
        after_capital = c.is_uppercase() || c == '_';
        if let Some(part) = parts.last_mut() {
            part.extend(c.to_lowercase().filter(|c| *c != '_'));
        }
    }
    parts.retain(|part| !part.is_empty());
    parts
}

#[test]
fn identifiers_are_split_into_words() {
    assert_eq!(parts("touched_cpus"), ["touched", "cpus"]);
    assert_eq!(parts("WallRecord"), ["wall", "record"]);
    assert_eq!(parts("MOST_WALLS"), ["most", "walls"]);
    assert_eq!(parts("_wish2"), ["wish2"]);
    assert_eq!(identifiers("let a_b = C::d(1u8, e);").collect::<Vec<_>>(), ["let", "a_b", "C", "d", "e"]);
}
