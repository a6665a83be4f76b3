//! The part of roff that a manual page needs: man(7).

/// Returns `text` with roff escapes, so that man(1) shows all characters of `text` unchanged.
pub(super) fn escape_roff(text: &str) -> String {
    let text = text.replace('\\', "\\e").replace('-', "\\-").replace('…', "...");
    // A line that begins with a dot or an apostrophe would be a request.
    let lines = text.lines().map(|line| match line.chars().next() {
        Some('.' | '\'') => format!("\\&{line}"),
        _ => line.to_owned(),
    });
    lines.collect::<Vec<_>>().join("\n")
}

/// Returns the beginning of a manual page in roff: the macro `.TH`, and the section NAME. `name` is the name of the
/// page, `section` the number of its section, and `about` a description in one line.
pub(super) fn page_header(name: &str, section: u8, about: &str) -> String {
    let version = env!("CARGO_PKG_VERSION");
    format!(
        ".TH {name} {section} \"\" \"pjw {version}\" \"pjw\"\n.SH NAME\n{name} \\- {}\n",
        escape_roff(about),
    )
}

/// Returns the heading of a section of a manual page in roff (the macro `.SH`). `name` is the text of the heading.
pub(super) fn section(name: &str) -> String {
    if name.contains(' ') { format!(".SH \"{name}\"\n") } else { format!(".SH {name}\n") }
}

/// Returns `text` in roff. A blank line in `text` begins a new paragraph.
pub(super) fn paragraphs(text: &str) -> String {
    text.split("\n\n")
        .map(|paragraph| format!("{}\n", escape_roff(paragraph.trim())))
        .collect::<Vec<_>>()
        .join(".PP\n")
}

/// Returns an entry of a list in roff (the macro `.TP`): `name` in bold, and below it the description `text`.
pub(super) fn list_entry(name: &str, text: &str) -> String {
    format!(".TP\n\\fB{}\\fR\n{}\n", escape_roff(name), escape_roff(text))
}

/// Returns `lines` in roff such that man(1) keeps the line breaks.
pub(super) fn verbatim(lines: &str) -> String {
    format!(".nf\n{}\n.fi\n", escape_roff(lines))
}

/// Returns the section SEE ALSO of the manual page with the name `own`: a list of the other main pages of pjw.
pub(super) fn see_also(own: &str) -> String {
    let pages =
        ["pjwctl(1)", "pjwctl-run(1)", "pjwctl-assign(1)", "pjwctl-spawn(1)", "pjwd.toml(5)", "pjwd(8)"];
    let others: Vec<&str> = pages.into_iter().filter(|page| !page.starts_with(&format!("{own}("))).collect();
    section("SEE ALSO") + &escape_roff(&others.join(", ")) + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_part_of_a_text_is_a_roff_request() {
        assert_eq!(escape_roff(".x\n'y\na\\b --c"), "\\&.x\n\\&'y\na\\eb \\-\\-c");
        assert_eq!(see_also("pjwd").lines().count(), 2);
        assert!(!see_also("pjwd").contains("pjwd(8)") && see_also("pjwd").contains("pjwd.toml(5)"));
    }
}
