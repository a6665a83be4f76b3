//! The layers inside a crate: modules have no import cycles, import only from lower layers, and folders have few
//! files.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use super::imports::{Imports, Module, display_name};
use super::{assert_no_violations, root, sources};

/// The layer of each folder or file below the `src` of a crate. A module may import from lower layers, and from its own
/// folder or file. A file that is not in this list is above all layers and may import anything. Each folder is in the
/// list.
const LAYERS: &[(&str, &[(&str, u8)])] = &[
    (
        "pjw-core",
        &[
            ("basics", 0),
            ("machine", 1),
            ("terms", 2),
            ("state", 3),
            ("allocate", 4),
            ("phases", 5),
            ("audit", 6),
            ("diagnosis", 6),
            ("fork_fastpath", 6),
        ],
    ),
    (
        "pjw-linux",
        &[
            ("sys", 0),
            ("inotify", 0),
            ("proc", 1),
            ("topology", 1),
            ("cgroup", 2),
            ("systemd", 1),
            ("bpf", 3),
            ("cpuset", 3),
            ("node", 4),
            ("probe", 4),
        ],
    ),
    (
        "pjwd",
        &[
            ("error_text", 0),
            ("memory", 1),
            ("config", 2),
            ("options", 2),
            ("host", 3),
            ("store", 4),
            ("job_files", 4),
            ("warden", 5),
            ("view", 6),
            ("control", 7),
            ("metrics", 7),
            ("run", 8),
            ("undo", 9),
            ("startup", 10),
        ],
    ),
];

/// Folders that may import only the listed folders: (crate, folder or file, allowed imports).
const ALLOWED_IMPORTS: &[(&str, &str, &[&str])] =
    &[("pjw-core", "diagnosis", &["basics", "machine", "terms"])];

/// Imports that a module may have in addition: (crate, module, folder or file, reason).
const EXTRA_IMPORTS: &[(&str, &str, &str, &str)] =
    &[("pjw-core", "diagnosis::watch", "state", "it reads which processes belong to which job")];

/// Folders that must not import the listed folders: (crate, folder or file, forbidden imports, reason).
const FORBIDDEN_IMPORTS: &[(&str, &str, &[&str], &str)] =
    &[("pjw-core", "audit", &["phases", "allocate"], "a check shares no code with the checked code")];

/// Crates for which the number of files in a folder is limited.
const SMALL_FOLDERS: &[&str] = &["pjw-core", "pjw-linux", "pjwd"];
/// The most files with product code in one folder.
const MAX_FILES_IN_A_FOLDER: usize = 12;

/// Returns the imports of each crate.
fn crates() -> &'static BTreeMap<String, Imports> {
    static CRATES: OnceLock<BTreeMap<String, Imports>> = OnceLock::new();
    CRATES.get_or_init(read_crates)
}

fn read_crates() -> BTreeMap<String, Imports> {
    let sources = sources();
    let mut names: BTreeSet<String> = BTreeSet::new();
    for source in sources {
        if let Ok(inside) = source.path.strip_prefix("crates") {
            names.extend(inside.iter().next().map(|name| name.to_string_lossy().into_owned()));
        }
    }
    let imports = |folder: PathBuf| Imports::of_crate(&folder.join("src"), sources);
    let mut crates: BTreeMap<String, Imports> =
        names.iter().map(|name| (name.clone(), imports(Path::new("crates").join(name)))).collect();
    for (name, folder) in [("pjw-benches", "benches"), ("pjw-tests", "tests")] {
        crates.insert(name.to_owned(), imports(folder.into()));
    }
    crates
}

/// Returns the folder or file below `src` that has the module.
fn part(module: &Module) -> &str {
    module.first().map_or("", String::as_str)
}

#[test]
fn modules_have_no_import_cycles() {
    let mut violations = Vec::new();
    for (name, imports) in crates() {
        violations.extend(imports.cycles().into_iter().map(|cycle| format!("{name}: {cycle}")));
    }
    assert_no_violations(&violations);
}

#[test]
fn modules_import_only_from_lower_layers() {
    let layers: BTreeMap<&str, BTreeMap<&str, u8>> =
        LAYERS.iter().map(|(name, layers)| (*name, layers.iter().copied().collect())).collect();
    let mut violations = Vec::new();
    for (name, imports) in crates() {
        let Some(layers) = layers.get(name.as_str()) else { continue };
        for (from, targets) in &imports.of {
            let Some(own) = layers.get(part(from)) else { continue };
            for to in targets.keys().filter(|to| part(to) != part(from)) {
                if layers.get(part(to)).is_none_or(|layer| layer >= own) {
                    let location = imports.location(from, to);
                    violations.push(format!(
                        "{location}: {} (layer {own}) must not import {}: move the item down, or the import \
                         up",
                        part(from),
                        display_name(to)
                    ));
                }
            }
        }
    }
    assert_no_violations(&violations);
}

#[test]
fn each_folder_has_a_layer_and_each_layer_exists() {
    let mut violations = Vec::new();
    for (name, layers) in LAYERS {
        let source = root().join("crates").join(name).join("src");
        let is_folder = |module: &&Module| source.join(part(module)).is_dir() && !part(module).is_empty();
        let folders: BTreeSet<&str> = crates()[*name].files.keys().filter(is_folder).map(part).collect();
        let listed: BTreeSet<&str> = layers.iter().map(|(folder, _)| *folder).collect();
        let unlisted = folders.difference(&listed);
        violations.extend(unlisted.map(|folder| format!("{name}: {folder} has no layer: add it to LAYERS")));
        let exists = |part: &&&str| source.join(part).is_dir() || source.join(format!("{part}.rs")).is_file();
        let missing = listed.iter().filter(|part| !exists(part));
        violations
            .extend(missing.map(|part| format!("{name}: {part} does not exist: remove it from LAYERS")));
    }
    assert_no_violations(&violations);
}

#[test]
fn restricted_folders_import_only_what_is_allowed() {
    let mut violations = Vec::new();
    let mut check = |name: &str, folder: &str, is_wrong: &dyn Fn(&str) -> bool, why: &str| {
        let imports = &crates()[name];
        for (from, targets) in imports.of.iter().filter(|(from, _)| part(from) == folder) {
            let is_exception = |to: &Module| {
                EXTRA_IMPORTS.iter().any(|(of, module, extra, _)| {
                    *of == name && *module == display_name(from) && *extra == part(to)
                })
            };
            let wrong = |to: &&Module| part(to) != folder && is_wrong(part(to)) && !is_exception(to);
            for to in targets.keys().filter(wrong) {
                let location = imports.location(from, to);
                violations.push(format!("{location}: {folder} must not import {}: {why}", display_name(to)));
            }
        }
    };
    for (name, folder, allowed) in ALLOWED_IMPORTS {
        check(name, folder, &|to| !allowed.contains(&to), &format!("only {}", allowed.join(", ")));
    }
    for (name, folder, forbidden, why) in FORBIDDEN_IMPORTS {
        check(name, folder, &|to| forbidden.contains(&to), why);
    }
    assert_no_violations(&violations);
}

#[test]
fn no_folder_has_too_many_files() {
    let mut folders: BTreeMap<PathBuf, usize> = BTreeMap::new();
    for (name, imports) in crates() {
        if !SMALL_FOLDERS.contains(&name.as_str()) {
            continue;
        }
        for file in imports.files.values() {
            *folders.entry(file.parent().unwrap().to_owned()).or_default() += 1;
        }
    }
    let large = folders.iter().filter(|(_, files)| **files > MAX_FILES_IN_A_FOLDER);
    assert_no_violations(
        &large
            .map(|(folder, files)| {
                let folder = folder.display();
                format!("{folder}: {files} files, at most {MAX_FILES_IN_A_FOLDER}: group them into folders")
            })
            .collect::<Vec<_>>(),
    );
}

#[test]
fn the_core_is_built_without_the_standard_library() {
    let lib = std::fs::read_to_string(root().join("crates/pjw-core/src/lib.rs")).unwrap();
    let lines: Vec<&str> = lib.lines().map(str::trim).collect();
    assert!(
        lines.contains(&"#![no_std]"),
        "crates/pjw-core/src/lib.rs: add #![no_std], so that no decision can do I/O or read a clock"
    );
    let with_std = lines.windows(2).filter(|pair| pair[1].starts_with("extern crate std"));
    for pair in with_std {
        assert_eq!(
            pair[0], "#[cfg(test)]",
            "crates/pjw-core/src/lib.rs: only tests may use the standard library"
        );
    }
}
