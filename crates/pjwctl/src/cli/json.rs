//! The option `--json`, which several verbs have.

use clap::Args;

/// The option `--json`, shared by the subcommands that can print their reply as JSON.
#[derive(Debug, Clone, Copy, Args)]
pub struct JsonArg {
    /// Print JSON; scripts may rely on its names
    #[arg(long)]
    pub json: bool,
}
