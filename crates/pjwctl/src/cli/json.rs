//! The option `--json`, which several verbs have.

use clap::Args;

/// The command line option `--json`, with which a subcommand prints JSON instead of text.
#[derive(Debug, Clone, Copy, Args)]
pub struct JsonArg {
    /// Print JSON; scripts may rely on the names of its fields
    #[arg(long)]
    pub json: bool,
}
