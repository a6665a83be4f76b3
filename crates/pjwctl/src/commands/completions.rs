//! `pjwctl completions SHELL`: a completion script, generated from the definition of the command line.

use std::process::ExitCode;

use clap_complete::Shell;

use crate::{cli, output};

/// Runs `pjwctl completions`: prints the completion script for a shell.
pub(super) fn run(shell: Shell) -> anyhow::Result<ExitCode> {
    output::print(&String::from_utf8_lossy(&script(shell)))?;
    Ok(ExitCode::SUCCESS)
}

fn script(shell: Shell) -> Vec<u8> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut cli::clap_command(), "pjwctl", &mut script);
    script
}

#[cfg(test)]
mod tests {
    use clap::ValueEnum;

    use super::*;

    #[test]
    fn every_shell_gets_a_script_that_knows_every_verb() {
        for &shell in Shell::value_variants() {
            let script = String::from_utf8(script(shell)).unwrap();
            for verb in cli::clap_command().get_subcommands().filter(|verb| !verb.is_hide_set()) {
                assert!(script.contains(verb.get_name()), "{shell}: {}", verb.get_name());
            }
        }
    }
}
