//! `pjwctl man`: manual pages, made from the command's definition.

use std::path::Path;
use std::process::ExitCode;

use anyhow::anyhow;
use clap_mangen::Man;

use crate::cli;
use crate::output;

pub(super) fn run(dir: Option<&Path>) -> anyhow::Result<ExitCode> {
    let pages = pages()?;
    let Some(dir) = dir else {
        output::print(&String::from_utf8_lossy(pages.first().map_or(&[], |(_, page)| page)))?;
        return Ok(ExitCode::SUCCESS);
    };
    for (name, page) in pages {
        let file = dir.join(name);
        std::fs::write(&file, page)
            .map_err(|error| anyhow!("can't write {}: {error}; is the directory there?", file.display()))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Every page with its file's name: the command's own first, then one for each verb.
///
/// # Errors
/// If a page can't be rendered.
pub fn pages() -> anyhow::Result<Vec<(String, Vec<u8>)>> {
    let command = cli::definition().disable_help_subcommand(true);
    let verbs = command.get_subcommands().filter(|verb| !verb.is_hide_set() && verb.get_name() != "help");
    let mut pages = Vec::new();
    for command in std::iter::once(&command).chain(verbs) {
        let man = Man::new(command.clone()).manual("pjw");
        let mut page = Vec::new();
        man.render(&mut page)?;
        pages.push((man.get_filename(), page));
    }
    Ok(pages)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_visible_verb_has_a_page() {
        let pages = pages().unwrap();
        assert_eq!(pages[0].0, "pjwctl.1");
        for verb in cli::definition().get_subcommands().filter(|verb| !verb.is_hide_set()) {
            let name = format!("pjwctl-{}.1", verb.get_name());
            let page = pages.iter().find(|(file, _)| *file == name);
            assert_eq!(page.is_some(), verb.get_name() != "help", "{name}");
        }
        for (name, page) in pages {
            let page = String::from_utf8(page).unwrap();
            assert!(page.contains(".TH") && page.contains(".SH NAME"), "{name}: {page}");
        }
    }
}
