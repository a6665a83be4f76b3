//! The option `--json`, which several verbs have.

use clap::Args;

/// The output format of a verb.
#[derive(Debug, Clone, Copy, Args)]
pub struct Json {
    /// Print JSON; scripts may rely on its names
    #[arg(long)]
    pub json: bool,
}
