//! The words of `pjwctl doctor`.

use clap::Args;

use super::Json;

/// Printed after its help.
pub(super) const EXAMPLES: &str = "Examples:\n  \
    pjwctl doctor           what is wrong, most urgent first, each with its remedy\n  \
    pjwctl doctor --all     with what needs no action, and every fact\n  \
    pjwctl doctor --json    for scripts\n\n\
    Reads only, and needs neither pjwd nor root; root sees more. It watches for a second: who is busy, and which \
    interrupts come, can't be told from one look. If pjwd runs it is asked too.\n\n\
    Exit codes: 0 if it could look, whatever it found; 1 if it could not; 2 usage.";

/// `doctor`.
#[derive(Debug, Args)]
pub struct Doctor {
    /// Show also what needs no action, and every fact
    #[arg(long, short)]
    pub all: bool,
    /// How it is told.
    #[command(flatten)]
    pub json: Json,
}
