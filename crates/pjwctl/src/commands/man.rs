//! `pjwctl man`: manual pages. Those of the commands come from their one definition, that of the daemon from what its
//! program says of itself, that of the configuration from the file that is shipped.

mod config;
mod daemon;
mod roff;
mod verb;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::anyhow;

use super::daemon_program;
use crate::cli;
use crate::output;

/// One manual page.
struct Page {
    /// As in `pjwctl-run`.
    name: String,
    section: u8,
    text: String,
}

impl Page {
    /// Its place: in a directory that is a `man1`, the pages of other sections go beside it, where man(1) looks for
    /// them.
    fn path(&self, dir: &Path) -> PathBuf {
        let file = format!("{}.{}", self.name, self.section);
        match dir.parent() {
            Some(root) if self.section != 1 && dir.ends_with("man1") => {
                root.join(format!("man{}", self.section)).join(file)
            }
            _ => dir.join(file),
        }
    }

    fn write(&self, dir: &Path) -> anyhow::Result<()> {
        let path = self.path(dir);
        // The directory that was named must be there; one beside it may be made.
        let made = match path.parent() {
            Some(other) if other != dir && dir.is_dir() => std::fs::create_dir_all(other),
            _ => Ok(()),
        };
        made.and_then(|()| std::fs::write(&path, &self.text))
            .map_err(|error| anyhow!("can't write {}: {error}; is the directory there?", path.display()))
    }
}

pub(super) fn run(dir: Option<&Path>) -> anyhow::Result<ExitCode> {
    let mut pages = of_commands()?;
    let Some(dir) = dir else {
        output::print(pages.first().map_or("", |page| page.text.as_str()))?;
        return Ok(ExitCode::SUCCESS);
    };
    pages.push(of_the_daemon()?);
    pages.push(config::page());
    pages.iter().try_for_each(|page| page.write(dir))?;
    Ok(ExitCode::SUCCESS)
}

/// The command's own page first, then one for each verb.
fn of_commands() -> anyhow::Result<Vec<Page>> {
    let command = cli::definition().mut_subcommand("help", |help| help.hide(true));
    let verbs = command.get_subcommands().filter(|verb| !verb.is_hide_set());
    std::iter::once(&command).chain(verbs).map(verb::page).collect()
}

fn of_the_daemon() -> anyhow::Result<Page> {
    let mut pjwd = daemon_program::command()?;
    let program = Path::new(pjwd.get_program()).display().to_string();
    let said = pjwd.arg("--help").output().map_err(|error| anyhow!("can't start {program}: {error}"))?;
    daemon::page(&String::from_utf8_lossy(&said.stdout)).ok_or_else(|| {
        anyhow!("{program} --help can't be understood: is it of pjwctl's version? Install pjw completely")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_visible_verb_has_a_page() {
        let pages = of_commands().unwrap();
        assert_eq!(pages[0].name, "pjwctl");
        for verb in cli::definition().get_subcommands().filter(|verb| !verb.is_hide_set()) {
            let name = format!("pjwctl-{}", verb.get_name());
            let page = pages.iter().find(|page| page.name == name);
            assert_eq!(page.is_some(), verb.get_name() != "help", "{name}");
        }
    }

    #[test]
    fn every_page_has_its_sections_and_none_is_called_extra() {
        for page in of_commands().unwrap() {
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
