//! `pjwctl man`: manual pages. Those of the verbs are generated from the definition of the command line, that of the
//! daemon from its `--help`, that of the configuration from the shipped file.

mod config;
mod daemon;
mod page;
mod roff;
mod verb;

use std::path::Path;
use std::process::ExitCode;

use anyhow::anyhow;

use super::daemon_program;
use crate::{cli, output};
use page::Page;

/// Runs `pjwctl man`: writes the manual pages of pjw into the directory `dir`, one file for each page. If `dir` is
/// `None`, prints the page pjwctl(1) instead.
pub(super) fn run(dir: Option<&Path>) -> anyhow::Result<ExitCode> {
    let mut pages = command_pages()?;
    let Some(dir) = dir else {
        output::print(pages.first().map_or("", |page| page.text.as_str()))?;
        return Ok(ExitCode::SUCCESS);
    };
    pages.push(daemon_page()?);
    pages.push(config::page());
    pages.iter().try_for_each(|page| page.write(dir))?;
    Ok(ExitCode::SUCCESS)
}

/// The page of pjwctl first, then one for each verb.
fn command_pages() -> anyhow::Result<Vec<Page>> {
    let command = cli::clap_command().mut_subcommand("help", |help| help.hide(true));
    let verbs = command.get_subcommands().filter(|verb| !verb.is_hide_set());
    std::iter::once(&command).chain(verbs).map(verb::page).collect()
}

fn daemon_page() -> anyhow::Result<Page> {
    let mut pjwd = daemon_program::pjwd_command()?;
    let program = Path::new(pjwd.get_program()).display().to_string();
    let output = pjwd.arg("--help").output().map_err(|error| anyhow!("can't start {program}: {error}"))?;
    daemon::page(&String::from_utf8_lossy(&output.stdout)).ok_or_else(|| {
        anyhow!("{program} --help can't be parsed: check that it has the same version as pjwctl; install pjw completely")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_visible_verb_has_a_page() {
        let pages = command_pages().unwrap();
        assert_eq!(pages[0].name, "pjwctl");
        for verb in cli::clap_command().get_subcommands().filter(|verb| !verb.is_hide_set()) {
            let name = format!("pjwctl-{}", verb.get_name());
            let page = pages.iter().find(|page| page.name == name);
            assert_eq!(page.is_some(), verb.get_name() != "help", "{name}");
        }
    }

    #[test]
    fn every_page_has_its_sections_and_none_is_called_extra() {
        for page in command_pages().unwrap() {
            for part in [".TH", ".SH NAME", ".SH SYNOPSIS", ".SH DESCRIPTION", ".SH \"SEE ALSO\""] {
                assert!(page.text.contains(part), "{}: {part} is missing", page.name);
            }
            assert!(
                !page.text.contains(".SH EXTRA") && !page.text.contains("pjwctl\\-help"),
                "{}",
                page.name
            );
            assert_eq!(page.text.matches(".SH NOTES").count().max(1), 1, "{}", page.name);
            assert!(page.text.is_ascii(), "{}: roff knows no other letters everywhere", page.name);
        }
    }

    #[test]
    fn a_page_goes_where_man_looks_for_its_section() {
        let page = |section| Page { name: "x".into(), section, text: String::new() };
        assert_eq!(page(1).path(Path::new("/a/man/man1")), Path::new("/a/man/man1/x.1"));
        assert_eq!(page(8).path(Path::new("/a/man/man1")), Path::new("/a/man/man8/x.8"));
        assert_eq!(page(8).path(Path::new("/a/pages")), Path::new("/a/pages/x.8"));
    }
}
