//! Each promise in `docs/promises.md` names its tests, and the tests exist.

use std::collections::{BTreeMap, BTreeSet};

use super::{assert_no_violations, root, texts};

const PROMISES: &str = "docs/promises.md";

/// Returns the tests that a line of the document names: `path::name` in backquotes, with the path of a file of the
/// workspace.
fn named_tests(line: &str) -> impl Iterator<Item = (&str, &str)> {
    line.split('`').skip(1).step_by(2).filter_map(|quoted| {
        let (path, name) = quoted.rsplit_once("::")?;
        path.contains('/').then_some((path, name))
    })
}

#[test]
fn every_promise_names_existing_tests() {
    let texts: BTreeMap<String, String> =
        texts().into_iter().map(|(path, text)| (path.to_string_lossy().into_owned(), text)).collect();
    let document = std::fs::read_to_string(root().join(PROMISES)).unwrap();
    let mut violations = Vec::new();
    let mut all = BTreeSet::new();
    for (at, line) in document.lines().enumerate() {
        for (path, name) in named_tests(line) {
            all.insert((path, name));
            let text = texts.get(path).map(String::as_str);
            let exists = if path.ends_with(".rs") {
                text.is_some_and(|text| has_test(text, name))
            } else {
                // For a case of the virtual machines, the name is that of a check in the shell script.
                text.is_some_and(|text| text.lines().any(|line| is_check(line, name)))
            };
            if !exists {
                violations.push(format!("{PROMISES}:{}: there is no test {path}::{name}", at + 1));
            }
        }
    }
    assert!(all.len() > 50, "{PROMISES} names only {} tests in the form `path::name`", all.len());
    assert_no_violations(&violations);
}

/// Whether the text of a file has a test function `name`.
fn has_test(text: &str, name: &str) -> bool {
    let declared = format!("fn {name}(");
    let lines: Vec<&str> = text.lines().map(str::trim).collect();
    let is_declared = |line: &&str| line.starts_with(&declared) || line.ends_with(&declared);
    lines.iter().enumerate().filter(|(_, line)| is_declared(line)).any(|(at, _)| {
        lines[..at].iter().rev().take_while(|line| line.starts_with("#[")).any(|line| *line == "#[test]")
    })
}

/// Whether a line of a shell script, which is no comment, has the name of a check.
fn is_check(line: &str, name: &str) -> bool {
    !line.trim_start().starts_with('#') && line.contains(name)
}

#[test]
fn only_functions_with_the_attribute_are_tests() {
    assert!(has_test("#[test]\n#[ignore]\nfn a() {}", "a"));
    assert!(!has_test("#[test]\nfn ab() {}\nfn a() {}", "a"));
    assert!(
        is_check("check 'all is undone' test", "all is undone")
            && !is_check("# all is undone", "all is undone")
    );
}

#[test]
fn every_section_of_the_design_and_every_command_of_the_readme_has_a_promise() {
    let document = std::fs::read_to_string(root().join(PROMISES)).unwrap();
    let readme = std::fs::read_to_string(root().join("README.md")).unwrap();
    let commands = readme.lines().filter(|line| line.starts_with("| `pjwctl "));
    let words =
        commands.flat_map(|line| line.split('|').nth(1).unwrap_or_default().split('`').skip(1).step_by(2));
    let verbs: BTreeSet<&str> = words.filter_map(|text| text.split(' ').nth(1)).collect();
    assert!(verbs.len() > 15, "README.md has only {} commands in its table", verbs.len());
    let missing = verbs.iter().filter(|verb| {
        !document.contains(&format!("`{verb}")) && !document.contains(&format!("pjwctl {verb}"))
    });
    assert_no_violations(
        &missing.map(|verb| format!("{PROMISES}: no promise names the command {verb}")).collect::<Vec<_>>(),
    );
}
