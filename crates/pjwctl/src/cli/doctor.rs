//! The command line of `pjwctl doctor`.

use clap::Args;

use super::json::JsonArg;

/// The examples below the help of `pjwctl doctor`.
pub(super) const EXAMPLES: &str = "Examples:\n  \
    pjwctl doctor           the findings, most urgent first, each with its remedy\n  \
    pjwctl doctor --all     also findings that need no action, and every fact\n  \
    pjwctl doctor --json    for scripts\n\n\
    Changes nothing, and needs neither pjwd nor root. As root it can read more. It takes a second, because hot \
    threads and interrupts show only between two scans. If pjwd runs, its state is read too.\n\n\
    Exit codes: 0 if the diagnosis was made, whatever its findings; 1 if not; 2 usage.";

/// The command line options of `pjwctl doctor`, which looks for problems with the setup of the machine.
#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// Show also findings that need no action, and every fact
    #[arg(long = "all", short = 'a')]
    pub show_all: bool,
    /// Whether the report is printed as JSON instead of text.
    #[command(flatten)]
    pub json: JsonArg,
}
