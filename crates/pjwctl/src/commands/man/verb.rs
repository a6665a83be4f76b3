//! The page of a verb, from its definition. The text after the help becomes sections.

use clap_mangen::Man;

use super::{page::Page, roff};

/// Makes the manual page of pjwctl or of one of its subcommands. `command` is its definition for the library clap.
pub(super) fn page(command: &clap::Command) -> anyhow::Result<Page> {
    let man = Man::new(command.clone());
    let name = command.get_display_name().unwrap_or_else(|| command.get_name()).to_owned();
    let about = command.get_about().map(ToString::to_string).unwrap_or_default();
    let mut text = roff::page_header(&name, 1, &about) + &roff::section("SYNOPSIS") + &synopsis(command);
    let mut sections = Vec::new();
    man.render_description_section(&mut sections)?;
    man.render_options_section(&mut sections)?;
    if command.has_subcommands() {
        man.render_subcommands_section(&mut sections)?;
    }
    text += &String::from_utf8_lossy(&sections).replace('…', "...");
    let after = command.get_after_help().map(ToString::to_string).unwrap_or_default();
    text += &after.split("\n\n").filter(|part| !part.is_empty()).map(after_help).collect::<String>();
    text += &roff::see_also(&name);
    Ok(Page { name, section: 1, text })
}

/// The usage as the command prints it, with the names of its values.
fn synopsis(command: &clap::Command) -> String {
    let usage = command.clone().render_usage().to_string();
    roff::escape_roff(usage.trim_start_matches("Usage:").trim()) + "\n"
}

/// Returns the section for `paragraph`, a paragraph of the text after the help. The text before its first colon decides
/// which section it is.
fn after_help(paragraph: &str) -> String {
    let (label, rest) = paragraph.split_once(':').unwrap_or_default();
    match label {
        "Example" | "Examples" => roff::section("EXAMPLES") + &roff::verbatim(rest.trim_start_matches('\n')),
        "Exit codes" => roff::section("EXIT STATUS") + &roff::escape_roff(rest.trim()) + "\n",
        "Socket" => roff::section("FILES") + &roff::escape_roff(rest.trim()) + "\n",
        _ => roff::section("NOTES") + &roff::escape_roff(paragraph) + "\n",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli;

    fn page_of(verb: &str) -> String {
        let definition = cli::clap_command();
        page(definition.find_subcommand(verb).unwrap_or(&definition)).unwrap().text
    }

    #[test]
    fn examples_and_exit_codes_have_sections_of_their_own() {
        let run = page_of("run");
        let section = |name: &str| {
            let (_, rest) = run.split_once(&roff::section(name)).unwrap();
            rest.split(".SH").next().unwrap().to_owned()
        };
        assert!(section("EXAMPLES").contains("pjwctl run \\-\\-cores 2 \\-\\- make"), "{run}");
        assert!(section("EXIT STATUS").contains("127"), "{run}");
        assert!(section("SYNOPSIS").contains("<\\-\\-cores <N|all>|\\-\\-cpus <LIST>>"), "{run}");
        assert!(page_of("").contains(".SH FILES") && page_of("").contains("/run/pjwd/pjwd.sock"));
    }
}
