//! The rules for the source tree, as tests.
//!
//! Each rule is one test. A failed test lists every place that breaks the rule, and says how to correct it.
//! Exceptions are listed in this file, each with its reason. An exception that is no longer needed fails the test
//! too.
#![forbid(unsafe_code)]
#![expect(clippy::unwrap_used, reason = "a rule that can't be checked fails")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use serde_json::Value;

#[path = "tidy/imports.rs"]
mod imports;
#[path = "tidy/layers.rs"]
mod layers;
#[path = "tidy/names.rs"]
mod names;
#[path = "tidy/promises.rs"]
mod promises;
#[path = "tidy/source.rs"]
mod source;
#[path = "tidy/warnings.rs"]
mod warnings;

use source::Source;

/// The most lines of a file.
const MAX_LINES_IN_A_FILE: usize = 500;
/// The most lines of a function.
const MAX_LINES_IN_A_FUNCTION: usize = 70;

/// Files that may be longer than the limit: (path, reason).
const LONG_FILES: &[(&str, &str)] = &[];
/// Functions that may be longer than the limit: (path, name, reason).
const LONG_FUNCTIONS: &[(&str, &str, &str)] = &[];

/// The crates of the workspace that each crate may depend on: see ARCHITECTURE.md, "The crates".
const ALLOWED_DEPENDENCIES: &[(&str, &[&str])] = &[
    ("pjw-core", &[]),
    ("pjw-linux", &["pjw-core"]),
    ("pjw-sources", &["pjw-core"]),
    ("pjw-ipc", &[]),
    ("pjw-job", &["pjw-core"]),
    ("pjw-job-c", &["pjw-core", "pjw-job"]),
    ("pjw-sim", &["pjw-core"]),
    ("pjw-spawn", &["pjw-core"]),
    ("pjw-spawn-c", &["pjw-core", "pjw-spawn"]),
    ("pjwd", &["pjw-core", "pjw-job", "pjw-linux", "pjw-sources", "pjw-ipc"]),
    ("pjwctl", &["pjw-core", "pjw-ipc", "pjw-linux", "pjw-sim", "pjw-sources", "pjw-spawn"]),
];
/// The crates that `pjw-core` may depend on.
const CORE_DEPENDENCIES: &[&str] = &["serde", "smallvec", "strum", "thiserror"];

/// Paths and types that `pjw-core` must not use: (word, reason).
const FORBIDDEN_IN_CORE: &[(&str, &str)] = &[
    ("std::fs", "the core gets facts in a Snapshot"),
    ("std::env", "the core gets settings in a Policy"),
    ("std::net", "the core has no network access"),
    ("std::os", "the core makes no system calls"),
    ("std::process", "the core starts no processes"),
    ("std::thread", "the core has no threads"),
    ("std::io", "the core does no I/O"),
    ("std::sync::Mutex", "one thread owns the state of the core"),
    ("Instant", "the caller passes the time"),
    ("SystemTime", "the caller passes the time"),
    ("HashMap", "the order must be the same on each machine: use BTreeMap"),
    ("HashSet", "the order must be the same on each machine: use BTreeSet"),
    ("f32", "decisions use integers"),
    ("f64", "decisions use integers"),
];

/// The crates that may have unsafe code: (crate, reason).
const UNSAFE_CRATES: &[(&str, &str)] = &[
    ("pjw-linux", "system calls, in small wrappers"),
    ("pjw-job", "the mapped page of the core map, and futex(2)"),
    ("pjw-job-c", "the functions that C programs call"),
    ("pjw-spawn-c", "the functions that C programs call"),
    ("pjw-spawn", "clone3 with a shared address space, and the C arrays of execve"),
];

/// The fields of `pjwctl --json` that are public interface: (type, fields).
const PUBLIC_FIELDS: &[(&str, &str)] = &[
    ("Status", "schema version pid mode discovery node pool fits jobs warnings"),
    ("Node", "hostname cpus cores packages numa_nodes l3"),
    ("Pool", "housekeeping free allocated"),
    ("Fits", "l3 numa_node package machine"),
    (
        "Job",
        "id source owner state class requested_cores cpus granted_by enforcement processes threads hot pinned \
         violations strays since wants",
    ),
    ("Warning", "code job text remedy"),
    ("Member", "pid start_time comm uid evidence threads"),
    ("Thread", "tid comm state demand hot last_cpu allowed pinned"),
    ("Action", "action job pid tid from to why"),
    ("Event", "time event job text"),
    ("Move", "job from to why"),
];

/// Returns the root of the workspace. The variable `PJW_TREE` names another checkout to test.
fn root() -> PathBuf {
    let other = std::env::var_os("PJW_TREE").map(PathBuf::from);
    other.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned())
}

/// Returns the path of every file of the workspace, relative to the root.
fn files() -> Vec<PathBuf> {
    fn walk(root: &Path, directory: &Path, files: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(root.join(directory)).unwrap() {
            let entry = entry.unwrap();
            let path = directory.join(entry.file_name());
            let name = entry.file_name().into_string().unwrap();
            let kind = entry.file_type().unwrap();
            if name == "target" || name == ".git" {
                continue;
            }
            if kind.is_dir() {
                walk(root, &path, files);
            } else if kind.is_file() && !name.ends_with(".swp") {
                files.push(path);
            }
        }
    }
    let mut files = Vec::new();
    walk(&root(), Path::new(""), &mut files);
    files.sort();
    assert!(files.len() > 50, "this is not the root of the workspace: {}", root().display());
    files
}

/// Returns the text files of the workspace: (path, text).
fn texts() -> Vec<(PathBuf, String)> {
    files()
        .into_iter()
        .filter_map(|path| Some((path.clone(), fs::read_to_string(root().join(path)).ok()?)))
        .collect()
}

/// Returns every Rust file of the workspace. The files are read once.
fn sources() -> &'static [Source] {
    static SOURCES: OnceLock<Vec<Source>> = OnceLock::new();
    SOURCES.get_or_init(read_sources)
}

fn read_sources() -> Vec<Source> {
    let all: Vec<(PathBuf, String)> = texts()
        .into_iter()
        .filter(|(path, _)| path.extension().is_some_and(|extension| extension == "rs"))
        .collect();
    let in_tests = |path: &Path| path.components().any(|part| part.as_os_str() == "tests");
    let read = |path: &Path, text: &str, only_tests| Source::new(path, text, only_tests);
    let modules: BTreeSet<PathBuf> =
        all.iter().flat_map(|(path, text)| read(path, text, false).test_modules()).collect();
    let only_tests = |path: &Path| {
        in_tests(path)
            || modules.iter().any(|module| path == module || path.starts_with(module.with_extension("")))
    };
    all.iter().map(|(path, text)| read(path, text, only_tests(path))).collect()
}

/// Fails with a list of the violations, if there are any.
fn assert_no_violations(violations: &[String]) {
    assert!(violations.is_empty(), "\n{}\n", violations.join("\n"));
}

/// Whether a file is code of the product, and not a test or a bench.
fn is_product(path: &Path) -> bool {
    is_in_crate_folder(path, "src")
}

/// Whether a file is in the folder `name` of a crate.
fn is_in_crate_folder(path: &Path, name: &str) -> bool {
    path.starts_with("crates") && path.components().nth(2).is_some_and(|part| part.as_os_str() == name)
}

/// Whether a line of code has `word` as a whole word.
fn has_word(line: &str, word: &str) -> bool {
    let is_name = |c: char| c.is_alphanumeric() || c == '_';
    line.match_indices(word).any(|(at, _)| {
        !line[..at].chars().next_back().is_some_and(is_name)
            && !line[at + word.len()..].chars().next().is_some_and(is_name)
    })
}

/// Returns the places in product code that have one of the words: (word, remedy).
fn find_in_product(words: &[(&str, &str)], is_included: impl Fn(&Path) -> bool) -> Vec<String> {
    let mut violations = Vec::new();
    for source in sources().iter().filter(|source| is_included(&source.path)) {
        for (number, line) in source.product() {
            for (word, remedy) in words.iter().filter(|(word, _)| has_word(line, word)) {
                violations.push(format!("{}:{number}: {word}: {remedy}", source.path.display()));
            }
        }
    }
    violations
}

#[test]
fn no_file_is_too_long() {
    let mut exceptions: BTreeSet<&str> = LONG_FILES.iter().map(|(path, _)| *path).collect();
    let mut violations = Vec::new();
    for source in sources() {
        let lines = source.lines.len();
        let path = source.path.to_str().unwrap();
        if lines > MAX_LINES_IN_A_FILE && !exceptions.remove(path) {
            violations
                .push(format!("{path}:{lines}: at most {MAX_LINES_IN_A_FILE} lines: split it by purpose"));
        }
    }
    violations.extend(
        exceptions.iter().map(|path| format!("{path}: the exception is not needed: remove it from the list")),
    );
    assert_no_violations(&violations);
}

#[test]
fn no_function_is_too_long() {
    let mut exceptions: BTreeSet<(String, String)> =
        LONG_FUNCTIONS.iter().map(|(path, name, _)| (String::from(*path), String::from(*name))).collect();
    let mut violations = Vec::new();
    for source in sources() {
        let path = source.path.to_str().unwrap();
        for function in source.functions().iter().filter(|function| function.lines > MAX_LINES_IN_A_FUNCTION)
        {
            if !exceptions.remove(&(path.to_owned(), function.name.clone())) {
                violations.push(format!(
                    "{path}:{}: {} has {} lines, at most {MAX_LINES_IN_A_FUNCTION}: split it into functions",
                    function.line, function.name, function.lines
                ));
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

#[test]
fn every_file_begins_with_a_description() {
    let undescribed =
        sources().iter().filter(|source| !source.lines.first().is_some_and(|line| line.starts_with("//!")));
    assert_no_violations(
        &undescribed
            .map(|source| format!("{}:1: begin the file with //! and a description", source.path.display()))
            .collect::<Vec<_>>(),
    );
}

#[test]
fn no_file_has_a_name_without_meaning() {
    let vague_names = ["utils", "util", "common", "misc", "helpers", "helper", "manager", "stuff"];
    let has_vague_name = |path: &Path| {
        path.iter().any(|part| vague_names.contains(&part.to_str().unwrap().trim_end_matches(".rs")))
    };
    let found = sources().iter().filter(|source| has_vague_name(&source.path));
    assert_no_violations(
        &found
            .map(|source| format!("{}:1: give the file a name that says what it does", source.path.display()))
            .collect::<Vec<_>>(),
    );
}

#[test]
fn no_unfinished_code_is_left() {
    let markers = [concat!("TO", "DO"), concat!("FIX", "ME"), concat!("XX", "X")];
    let mut violations = Vec::new();
    for source in sources() {
        for (at, (line, code)) in source.lines.iter().zip(&source.code).enumerate() {
            let macros = ["todo!", "unimplemented!", "dbg!"].iter().any(|word| code.contains(word));
            if macros || markers.iter().any(|mark| has_word(line, mark)) {
                violations.push(format!(
                    "{}:{}: finish the code, or open an issue",
                    source.path.display(),
                    at + 1
                ));
            }
        }
    }
    assert_no_violations(&violations);
}

#[test]
fn the_product_does_not_panic_on_purpose() {
    let mut violations = Vec::new();
    for source in sources().iter().filter(|source| is_product(&source.path)) {
        for (number, line) in source.product() {
            if [".unwrap()", ".expect(", "panic!("].iter().any(|word| line.contains(word)) {
                let path = source.path.display();
                violations
                    .push(format!("{path}:{number}: return an error, or make the wrong state impossible"));
            }
        }
    }
    assert_no_violations(&violations);
}

#[test]
fn only_listed_crates_have_unsafe_code() {
    let is_safe_code =
        |path: &Path| !UNSAFE_CRATES.iter().any(|(name, _)| path.starts_with(Path::new("crates").join(name)));
    let mut violations =
        find_in_product(&[("unsafe", "move it to pjw-linux, in a small wrapper")], is_safe_code);
    for source in sources().iter().filter(|source| is_safe_code(&source.path)) {
        let path = &source.path;
        let in_src = path.parent().is_some_and(|parent| parent.ends_with("src"));
        let is_root = in_src && ["lib.rs", "main.rs"].iter().any(|name| path.ends_with(name))
            || path.parent().is_some_and(|parent| parent.ends_with("src/bin"));
        if is_root && !source.code.iter().any(|line| line.trim() == "#![forbid(unsafe_code)]") {
            violations.push(format!("{}:1: add #![forbid(unsafe_code)]", path.display()));
        }
    }
    assert_no_violations(&violations);
}

#[test]
fn the_core_uses_no_io_clocks_threads_or_floats() {
    assert_no_violations(&find_in_product(FORBIDDEN_IN_CORE, |path| path.starts_with("crates/pjw-core/src")));
}

/// Returns the packages of the workspace, as `cargo metadata` prints them.
fn packages() -> Vec<Value> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let metadata = Command::new(cargo)
        .args(["metadata", "--offline", "--no-deps", "--format-version", "1"])
        .current_dir(root())
        .output()
        .unwrap();
    assert!(metadata.status.success(), "{}", String::from_utf8_lossy(&metadata.stderr));
    let metadata: Value = serde_json::from_slice(&metadata.stdout).unwrap();
    metadata["packages"].as_array().unwrap().clone()
}

#[test]
fn crates_depend_only_on_allowed_crates() {
    let allowed: BTreeMap<&str, &[&str]> = ALLOWED_DEPENDENCIES.iter().copied().collect();
    let mut violations = Vec::new();
    let mut seen = 0;
    for package in packages() {
        let name = package["name"].as_str().unwrap();
        let Some(allowed) = allowed.get(name) else { continue };
        seen += 1;
        for dependency in package["dependencies"].as_array().unwrap() {
            let other = dependency["name"].as_str().unwrap();
            let for_tests = dependency["kind"] == "dev";
            let is_own_crate = other.starts_with("pjw");
            if is_own_crate && !allowed.contains(&other) && !(for_tests && other == "pjw-sim") {
                violations.push(format!(
                    "{name}'s Cargo.toml: {name} must not depend on {other}: see ARCHITECTURE.md"
                ));
            }
            if name == "pjw-core" && !for_tests && !CORE_DEPENDENCIES.contains(&other) {
                violations.push(format!(
                    "{name}'s Cargo.toml: the core may depend on {CORE_DEPENDENCIES:?} only, not on {other}"
                ));
            }
        }
    }
    assert_eq!(seen, ALLOWED_DEPENDENCIES.len(), "a crate does not exist: correct ALLOWED_DEPENDENCIES");
    assert_no_violations(&violations);
}

#[test]
fn versions_and_lints_come_from_the_workspace() {
    let mut violations = Vec::new();
    for (path, text) in
        texts().into_iter().filter(|(path, _)| path.ends_with("Cargo.toml") && path.components().count() > 1)
    {
        if !text.contains("[lints]\nworkspace = true") {
            violations.push(format!("{}:1: add [lints] workspace = true", path.display()));
        }
        let mut table = "";
        for (at, line) in text.lines().enumerate() {
            table = if line.starts_with('[') { line } else { table };
            let is_dependency = table.ends_with("dependencies]") && line.contains('=');
            if is_dependency && !line.contains("workspace = true") {
                violations.push(format!(
                    "{}:{}: move the version to Cargo.toml in the root",
                    path.display(),
                    at + 1
                ));
            }
        }
    }
    assert_no_violations(&violations);
}

#[test]
fn dependencies_come_from_crates_io() {
    let lock = fs::read_to_string(root().join("Cargo.lock")).unwrap();
    let registry = "source = \"registry+https://github.com/rust-lang/crates.io-index\"";
    let others =
        lock.lines().enumerate().filter(|(_, line)| line.starts_with("source = ") && *line != registry);
    assert_no_violations(
        &others
            .map(|(at, line)| format!("Cargo.lock:{}: {line}: use a crate from crates.io", at + 1))
            .collect::<Vec<_>>(),
    );
}

#[test]
fn every_decision_is_in_the_index() {
    let index = fs::read_to_string(root().join("docs/adr/README.md")).unwrap();
    let mut violations = Vec::new();
    let mut numbers = BTreeSet::new();
    for path in files().iter().filter(|path| path.starts_with("docs/adr") && !path.ends_with("README.md")) {
        let name = path.file_name().unwrap().to_str().unwrap();
        if !index.contains(&format!("({name})")) {
            violations.push(format!("docs/adr/README.md: add a line for {name}"));
        }
        if !numbers.insert(name.split('-').next().unwrap().to_owned()) {
            violations.push(format!("docs/adr/{name}: another decision has this number"));
        }
    }
    assert!(!numbers.is_empty(), "docs/adr has no decisions");
    assert_no_violations(&violations);
}

#[test]
fn no_file_has_a_path_of_a_development_machine() {
    let words =
        [concat!("/wo", "rk/"), concat!("/tmp", "/w/"), concat!("/root", "/."), concat!("tmp/bash", "_jobs")];
    let mut violations = Vec::new();
    for (path, text) in texts() {
        for (at, line) in
            text.lines().enumerate().filter(|(_, line)| words.iter().any(|word| line.contains(word)))
        {
            violations.push(format!(
                "{}:{}: remove the path of a development machine: {}",
                path.display(),
                at + 1,
                line.trim()
            ));
        }
    }
    assert_no_violations(&violations);
}

#[test]
fn the_fields_that_scripts_rely_on_are_there() {
    let text = fs::read_to_string(root().join("crates/pjw-ipc/src/wire.rs")).unwrap();
    let source = Source::new(Path::new("wire.rs"), &text, false);
    let mut fields: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let mut current = String::new();
    for line in source.code.iter().map(|line| line.trim()) {
        if let Some(name) = line.strip_suffix(" {") {
            current = name.split_whitespace().next_back().unwrap_or_default().to_owned();
        } else if let Some((name, _)) = line.split_once(':') {
            let name = name.trim_start_matches("pub ").trim_start_matches("r#");
            fields.entry(current.clone()).or_default().insert(name.to_owned());
        }
    }
    let mut violations = Vec::new();
    for (name, public_fields) in PUBLIC_FIELDS {
        for field in public_fields.split_whitespace() {
            if !fields.get(*name).is_some_and(|fields| fields.contains(field)) {
                violations.push(format!(
                    "crates/pjw-ipc/src/wire.rs: {name} has no field {field}, which is public interface"
                ));
            }
        }
    }
    assert_no_violations(&violations);
}

#[test]
fn has_word_finds_whole_words_only() {
    assert!(has_word("let x: f64 = 1;", "f64"));
    assert!(has_word("use std::fs::File;", "std::fs"));
    assert!(!has_word("fn instant() {}", "Instant"));
    assert!(!has_word("let buf64 = 1;", "f64"));
    assert!(!has_word("forbid(unsafe_code)", "unsafe"));
}
