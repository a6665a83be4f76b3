//! The option `--json`, which several verbs have.

use clap::Args;

/// The option for JSON output.
#[derive(Debug, Clone, Copy, Args)]
pub struct JsonOption {
    /// Print JSON; scripts may rely on its names
    #[arg(long)]
    pub json: bool,
}
