//! The log: to the journal where the journal reads it, else as text on stderr; one line per decision.

use std::io::IsTerminal;

use anyhow::Context;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use crate::config::Config;

/// Starts it. `PJW_LOG` (as in `debug` or `pjwd=debug`) overrides the configured level.
///
/// # Errors
/// If `PJW_LOG` makes no sense, or the journal was asked for and isn't there.
pub fn start(config: &Config) -> anyhow::Result<()> {
    let directives = std::env::var("PJW_LOG").unwrap_or_else(|_| config.log_level().to_owned());
    let filter =
        EnvFilter::try_new(&directives).context("PJW_LOG is no log level: write info, or pjwd=debug")?;
    let to_journal = match config.log_format() {
        "journald" => true,
        "text" => false,
        // systemd sets it for services whose stderr is the journal (systemd.exec(5)).
        _ => std::env::var_os("JOURNAL_STREAM").is_some(),
    };
    let registry = tracing_subscriber::registry().with(filter);
    if to_journal {
        let journal = tracing_journald::layer().context("log.format is journald and there is no journal")?;
        registry.with(journal.with_field_prefix(Some("PJW".to_owned()))).init();
    } else {
        let text = tracing_subscriber::fmt::layer()
            .with_writer(std::io::stderr)
            .with_target(false)
            .with_ansi(std::io::stderr().is_terminal());
        registry.with(text).init();
    }
    Ok(())
}
