//! Each code of a warning that pjwd gives is in the table of `docs/contract.md`, and each code of the table is given.

use std::collections::BTreeSet;

use super::{assert_no_violations, is_product, root, sources};

const DOCUMENT: &str = "docs/contract.md";
/// What stands before the code of a warning in the source.
const BEFORE_CODE: &[&str] = &["Warning::new(", "warn(draft,", "warning(", "of_job(", "code:"];

/// Returns the first string literal in `text`, if it can be the code of a warning.
fn first_code(text: &str) -> Option<&str> {
    let (_, rest) = text.split_once('"')?;
    let (code, _) = rest.split_once('"')?;
    is_code(code).then_some(code)
}

fn is_code(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'-')
}

/// Returns the codes of the table in the section about warnings.
fn documented(document: &str) -> BTreeSet<&str> {
    let (_, section) = document.split_once("\n## Warnings\n").unwrap_or_default();
    let section = section.split("\n## ").next().unwrap_or_default();
    let rows = section.lines().filter_map(|line| line.strip_prefix("| `")?.split_once('`'));
    rows.map(|(code, _)| code).collect()
}

#[test]
fn every_code_of_a_warning_is_documented() {
    let document = std::fs::read_to_string(root().join(DOCUMENT)).unwrap();
    let documented = documented(&document);
    assert!(documented.len() > 25, "{DOCUMENT} has only {} codes of warnings", documented.len());
    let mut given = BTreeSet::new();
    let mut violations = Vec::new();
    for source in sources() {
        let is_of_daemon = ["crates/pjw-core", "crates/pjwd"].iter().any(|of| source.path.starts_with(of));
        // The findings of the doctor have codes and a table of their own.
        let is_of_doctor = source.path.starts_with("crates/pjw-core/src/diagnosis");
        if !is_product(&source.path) || !is_of_daemon || is_of_doctor {
            continue;
        }
        // The code of the source is without the content of its literals.
        for (number, line) in source.product() {
            // A long call is broken after its parenthesis.
            let text = source.lines[number - 1..].iter().take(2).map(String::as_str).collect::<String>();
            given.extend(text.split('"').skip(1).step_by(2).filter(|word| is_code(word)).map(str::to_owned));
            let before = BEFORE_CODE.iter().filter(|before| line.contains(**before));
            for code in before.filter_map(|before| first_code(text.split_once(before)?.1)) {
                if !documented.contains(code) {
                    let path = source.path.display();
                    violations.push(format!("{path}:{number}: add the warning {code} to {DOCUMENT}"));
                }
            }
        }
    }
    let unknown = documented.iter().filter(|code| !given.contains(**code));
    violations.extend(unknown.map(|code| format!("{DOCUMENT}: pjwd gives no warning {code}: remove it")));
    assert_no_violations(&violations);
}
