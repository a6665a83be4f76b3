//! The log: journal fields under systemd, otherwise one line of text per event.
//!
//! Both outputs are always installed, and one of them is switched on. So level and format may change while the daemon
//! runs. `PJW_LOG` overrides the level until the daemon ends: `debug`, or per module as in `info,pjwd::warden=trace`.
//!
//! In text, an event is always one line. Users choose the names of processes, and a line break or an escape sequence
//! in a name must not forge a second event or move the cursor. So control characters are escaped, and there are no
//! colours.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use thiserror::Error;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Subscriber, warn};
use tracing_subscriber::filter::EnvFilter;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::FormatTime;
use tracing_subscriber::layer::{Context, SubscriberExt};
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Layer, Registry, fmt, reload};

use crate::config::{LogFormat, LogLevel, Settings};

/// The environment variable that overrides the level.
const LEVEL_VARIABLE: &str = "PJW_LOG";
/// systemd sets this variable to `device:inode` of the stream that is connected to the journal (systemd.exec(5)).
const JOURNAL_VARIABLE: &str = "JOURNAL_STREAM";

/// The log of this process. [`Logging::apply_settings`] changes the log level, and chooses between the systemd
/// journal and text on stderr.
#[derive(Debug)]
pub struct Logging {
    filter: reload::Handle<EnvFilter, Registry>,
    /// Whether `PJW_LOG` determines the level.
    is_level_overridden: bool,
    /// Whether the journal is available.
    has_journal: bool,
    to_journal: Arc<AtomicBool>,
    to_text: Arc<AtomicBool>,
}

/// The reason why [`Logging::start`] can't set up the log of this process.
#[derive(Debug, Error)]
pub enum LogError {
    /// Logging was already set up in this process.
    #[error("the log can't be started a second time in one process")]
    AlreadyStarted,
}

impl Logging {
    /// Sets up logging for this process with the level and the format in `settings`. If the environment
    /// variable `PJW_LOG` has a level, this level is used instead.
    ///
    /// # Errors
    /// If logging was already set up in this process.
    pub fn start(settings: &Settings) -> Result<Self, LogError> {
        let level_text = std::env::var(LEVEL_VARIABLE).ok().filter(|text| !text.is_empty());
        let (override_filter, level_error) = match level_text.as_deref().map(EnvFilter::try_new).transpose() {
            Ok(filter) => (filter, None),
            Err(error) => (None, Some(error)),
        };
        let is_level_overridden = override_filter.is_some();
        let first_filter = override_filter.unwrap_or_else(|| filter_of(settings.log_level));
        let (filter, handle) = reload::Layer::new(first_filter);
        let journal_layer = tracing_journald::layer().ok();
        let logging = Self {
            filter: handle,
            is_level_overridden,
            has_journal: journal_layer.is_some(),
            to_journal: Arc::default(),
            to_text: Arc::default(),
        };
        logging.set_outputs(settings.log_format);
        let journal = journal_layer.map(|layer| Switchable {
            layer: layer.with_syslog_identifier("pjwd".to_owned()).with_field_prefix(Some("PJW".to_owned())),
            is_on: Arc::clone(&logging.to_journal),
        });
        let text = Switchable { layer: text_layer(io::stderr), is_on: Arc::clone(&logging.to_text) };
        let subscriber = tracing_subscriber::registry().with(filter).with(journal).with(text);
        subscriber.try_init().map_err(|_| LogError::AlreadyStarted)?;
        if let Some(error) = level_error {
            warn!(%error, "{LEVEL_VARIABLE} is not a log level and is ignored; write a level such as debug");
        }
        logging.warn_if_no_journal(settings.log_format);
        Ok(logging)
    }

    /// Applies the log level and the log format in `settings`, after the configuration was read again. If the
    /// environment variable `PJW_LOG` has a level, the level does not change.
    pub fn apply_settings(&self, settings: &Settings) {
        self.set_outputs(settings.log_format);
        self.warn_if_no_journal(settings.log_format);
        if self.is_level_overridden {
            return;
        }
        if let Err(error) = self.filter.reload(filter_of(settings.log_level)) {
            warn!(%error, "the log level can't be changed");
        }
    }

    /// Switches the outputs of the log as `format` says: either the journal or text on standard error. A system
    /// without a journal gets text.
    fn set_outputs(&self, format: LogFormat) {
        let to_journal = self.has_journal
            && match format {
                LogFormat::Auto => stderr_is_the_journal(),
                LogFormat::Journald => true,
                LogFormat::Text => false,
            };
        self.to_journal.store(to_journal, Ordering::Relaxed);
        self.to_text.store(!to_journal, Ordering::Relaxed);
    }

    fn warn_if_no_journal(&self, format: LogFormat) {
        if format == LogFormat::Journald && !self.has_journal {
            warn!("log_format is \"journald\" and this system has no journal: text is logged instead");
        }
    }
}

fn filter_of(level: LogLevel) -> EnvFilter {
    EnvFilter::new(match level {
        LogLevel::Error => "error",
        LogLevel::Warn => "warn",
        LogLevel::Info => "info",
        LogLevel::Debug => "debug",
        LogLevel::Trace => "trace",
    })
}

fn stderr_is_the_journal() -> bool {
    let Ok(stream) = std::env::var(JOURNAL_VARIABLE) else { return false };
    let metadata = io::stderr().as_fd().try_clone_to_owned().and_then(|fd| File::from(fd).metadata());
    metadata.is_ok_and(|file| is_stream(&stream, file.dev(), file.ino()))
}

fn is_stream(stream: &str, device: u64, inode: u64) -> bool {
    let numbers = stream.split_once(':').map(|(device, inode)| (device.parse(), inode.parse()));
    numbers == Some((Ok(device), Ok(inode)))
}

/// An output that can be switched off. It follows spans in any case, so that it can be switched on while spans are
/// open.
struct Switchable<L> {
    layer: L,
    is_on: Arc<AtomicBool>,
}

impl<S: Subscriber + for<'a> LookupSpan<'a>, L: Layer<S>> Layer<S> for Switchable<L> {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        self.layer.on_new_span(attributes, id, context);
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, context: Context<'_, S>) {
        self.layer.on_record(id, values, context);
    }

    fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
        if self.is_on.load(Ordering::Relaxed) {
            self.layer.on_event(event, context);
        }
    }
}

fn text_layer<S, M, W>(make: M) -> impl Layer<S>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    M: Fn() -> W + 'static,
    W: Write,
{
    let writer = move || OneLine { inner: make() };
    fmt::layer().compact().with_target(false).with_ansi(false).with_timer(Utc).with_writer(writer)
}

/// RFC 3339 in UTC with milliseconds.
struct Utc;

impl FormatTime for Utc {
    fn format_time(&self, writer: &mut Writer<'_>) -> std::fmt::Result {
        write!(writer, "{:.3}", jiff::Timestamp::now())
    }
}

/// Writes each event as one line without control characters. Each call of `write` gets a whole event.
struct OneLine<W> {
    inner: W,
}

impl<W: Write> Write for OneLine<W> {
    fn write(&mut self, event: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(event.strip_suffix(b"\n").unwrap_or(event));
        let mut line = String::with_capacity(event.len());
        for character in text.chars() {
            if character.is_control() {
                line.extend(character.escape_default());
            } else {
                line.push(character);
            }
        }
        line.push('\n');
        self.inner.write_all(line.as_bytes())?;
        Ok(event.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};
    use std::sync::{Arc, Mutex, PoisonError};

    use tracing::{debug, info, warn};

    use super::*;

    #[derive(Clone, Default)]
    struct LogText(Arc<Mutex<Vec<u8>>>);

    impl LogText {
        fn text(&self) -> String {
            let bytes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            String::from_utf8_lossy(&bytes).into_owned()
        }
    }

    impl Write for LogText {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn logged(action: impl FnOnce()) -> String {
        let output = LogText::default();
        let writer = output.clone();
        let layer = text_layer(move || writer.clone());
        tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), action);
        output.text()
    }

    #[test]
    fn an_event_is_one_line_with_time_level_message_and_fields() {
        let text = logged(|| info!(job = "manual:a", cpus = %"2-3", "assigned"));
        let (time, rest) = text.split_once(' ').unwrap();
        assert!(time.parse::<jiff::Timestamp>().is_ok() && time.ends_with('Z'), "{time}");
        assert_eq!(rest.trim_start(), "INFO assigned job=\"manual:a\" cpus=2-3\n");
    }

    #[test]
    fn control_characters_in_process_names_are_escaped() {
        let text = logged(|| {
            let comm = "a\nERROR b\r\x1b[2J\x07\u{9b}";
            warn!(%comm, "{comm} is astray");
        });
        let line = text.strip_suffix('\n').unwrap();
        assert!(line.contains("is astray comm=a") && !line.contains(char::is_control), "{line:?}");
    }

    #[test]
    fn the_journal_stream_is_recognized_by_device_and_inode() {
        assert!(is_stream("8:1234", 8, 1234));
        for other in ["8:1235", "9:1234", "8", "", ":", "8:", "x:1234", "8:1234:"] {
            assert!(!is_stream(other, 8, 1234), "{other:?}");
        }
    }

    #[test]
    #[ignore = "run in a child by level_and_variable_decide_what_is_logged"]
    fn child_that_logs() {
        let settings =
            Settings { log_level: LogLevel::Info, log_format: LogFormat::Auto, ..Settings::default() };
        let logging = Logging::start(&settings).unwrap();
        info!("first info");
        debug!("first debug");
        let quiet =
            Settings { log_level: LogLevel::Warn, log_format: LogFormat::Text, ..Settings::default() };
        logging.apply_settings(&quiet);
        info!("second info");
        warn!("second warn");
        assert!(Logging::start(&settings).is_err());
    }

    #[test]
    #[ignore = "run in a child by without_a_journal_the_log_is_text"]
    fn child_that_wants_the_journal() {
        let settings = Settings { log_format: LogFormat::Journald, ..Settings::default() };
        Logging::start(&settings).unwrap();
        info!("an event");
    }

    #[test]
    fn without_a_journal_the_log_is_text() {
        if tracing_journald::layer().is_ok() {
            eprintln!("skipped: there is a journal here");
            return;
        }
        let text = child_logs("child_that_wants_the_journal", None);
        assert!(text.contains("text is logged instead") && text.contains("INFO an event"), "{text}");
    }

    fn child_logs(role: &str, variable: Option<&str>) -> String {
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args([&format!("host::logging::tests::{role}"), "--exact", "--ignored", "--nocapture"]);
        child.env_remove(LEVEL_VARIABLE).env_remove(JOURNAL_VARIABLE).stdout(Stdio::piped());
        child.envs(variable.map(|value| (LEVEL_VARIABLE, value)));
        let output = child.output().unwrap();
        assert!(output.status.success());
        String::from_utf8_lossy(&output.stderr).into_owned()
    }

    #[test]
    fn level_and_variable_decide_what_is_logged() {
        let child_logs = |variable| child_logs("child_that_logs", variable);
        let is_logged = |text: &str| {
            ["first info", "first debug", "second info", "second warn"].map(|event| text.contains(event))
        };
        assert_eq!(is_logged(&child_logs(None)), [true, false, false, true], "a reload changes the level");
        assert_eq!(is_logged(&child_logs(Some("debug"))), [true, true, true, true], "the variable stays");
        let bad = child_logs(Some("pjwd=loud"));
        assert_eq!(is_logged(&bad), [true, false, false, true], "{bad}");
        assert!(bad.contains("PJW_LOG is not a log level"), "{bad}");
    }
}
