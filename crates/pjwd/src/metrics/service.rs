//! The metrics service, on the thread of the control server: follows the configuration, writes the text file, listens
//! for HTTP.
//!
//! No fault here ends the daemon. A fault is logged when it begins and when it ends, and the operation is retried.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::future::pending;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use pjw_linux::sys::own_usage::own_resource_usage;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::{AbortHandle, spawn_blocking, spawn_local};
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tracing::{info, warn};

use super::http::{ConnectionCount, HttpLimits, MetricsSource, serve_http};
use super::meter::{MetricsReceiver, MetricsSnapshot};
use super::text::{MetricsFormat, metrics_text};
use super::{facts::MetricValues, textfile};
use crate::{config::MetricsSettings, host::directories::remove_file_if_exists};

/// The time for which a text is served again before a new text is made.
const CACHE_TIME: Duration = Duration::from_millis(250);
/// The delay after a failure to listen at an address, before the next attempt.
const LISTEN_RETRY: Duration = Duration::from_secs(5);
/// The time for which the stop of the daemon waits for the removal of the text file.
const REMOVAL_TIMEOUT: Duration = Duration::from_secs(1);

/// A text and the time at which it was made.
type CachedText = (Instant, Rc<str>);

/// Makes the metrics text on demand, and caches it for [`CACHE_TIME`].
#[derive(Debug)]
struct TextCache {
    snapshot: watch::Receiver<Option<Arc<MetricsSnapshot>>>,
    settings: watch::Receiver<MetricsSettings>,
    /// The last text in each format: classic, then OpenMetrics.
    last_texts: RefCell<[Option<CachedText>; 2]>,
}

impl TextCache {
    fn render(&self, format: MetricsFormat) -> Option<String> {
        let snapshot = self.snapshot.borrow().clone()?;
        let max_jobs = usize::try_from(self.settings.borrow().max_jobs).unwrap_or(usize::MAX);
        Some(metrics_text(&MetricValues::new(&snapshot, own_resource_usage(), max_jobs), format))
    }
}

impl MetricsSource for TextCache {
    fn text(&self, format: MetricsFormat) -> Option<Rc<str>> {
        let index = usize::from(format == MetricsFormat::OpenMetrics);
        let last_text = self.last_texts.borrow()[index].clone();
        if let Some((_, text)) = last_text.filter(|(made_at, _)| made_at.elapsed() < CACHE_TIME) {
            return Some(text);
        }
        let text: Rc<str> = self.render(format)?.into();
        self.last_texts.borrow_mut()[index] = Some((Instant::now(), Rc::clone(&text)));
        Some(text)
    }
}

/// Publishes the metrics of pjwd until `stop` becomes true. The metrics settings in `receiver` say whether the
/// metrics are written to a file, served over HTTP, or both. Changed settings are applied at once. When `stop`
/// becomes true, removes the file, stops the HTTP server and returns. Must run inside a [`tokio::task::LocalSet`].
pub async fn serve_metrics(receiver: MetricsReceiver, mut stop: watch::Receiver<bool>) {
    let MetricsReceiver { snapshot, mut settings } = receiver;
    let cache = Rc::new(TextCache { snapshot, settings: settings.clone(), last_texts: RefCell::default() });
    let mut listeners = Listeners {
        cache: Rc::clone(&cache),
        connections: ConnectionCount::default(),
        open: BTreeMap::new(),
    };
    let mut file_writer = TextFileWriter { cache, path: None, is_failing: false, next_write: Instant::now() };
    loop {
        let current = settings.borrow_and_update().clone();
        listeners.set_addresses(&current.listen_addresses);
        file_writer.set_path(current.textfile_path.as_deref()).await;
        let is_stopping = loop {
            tokio::select! {
                () = file_writer.due() => file_writer.write_file(current.write_interval).await,
                Ok(()) = settings.changed() => break false,
                _ = stop.wait_for(|stop| *stop) => break true,
            }
        };
        if is_stopping {
            break;
        }
    }
    listeners.set_addresses(&[]);
    let _ = timeout(REMOVAL_TIMEOUT, file_writer.set_path(None)).await;
}

/// The listeners of the HTTP endpoint.
struct Listeners {
    cache: Rc<TextCache>,
    connections: ConnectionCount,
    open: BTreeMap<SocketAddr, AbortHandle>,
}

impl Listeners {
    /// Makes the HTTP endpoint listen on exactly the addresses in `wanted`. Closes the listeners of other addresses,
    /// and opens the missing ones in the background. The other listeners and their connections stay.
    fn set_addresses(&mut self, wanted: &[SocketAddr]) {
        self.open.retain(|address, task| {
            let stays = wanted.contains(address);
            if !stays {
                task.abort();
            }
            stays
        });
        for &address in wanted {
            let (cache, connections) = (Rc::clone(&self.cache), self.connections.clone());
            self.open.entry(address).or_insert_with(|| {
                let listening = async move {
                    let listener = bind_until_success(address).await;
                    serve_http(listener, cache, HttpLimits::default(), connections).await;
                };
                spawn_local(listening).abort_handle()
            });
        }
    }
}

/// Returns a listener at `address`. If the address can't be used yet, tries again each [`LISTEN_RETRY`] until it can
/// be used. Logs the first failure.
async fn bind_until_success(address: SocketAddr) -> TcpListener {
    let mut is_failing = false;
    loop {
        match TcpListener::bind(address).await {
            Ok(listener) => {
                info!(%address, "metrics are served at http://{address}/metrics");
                if !address.ip().is_loopback() {
                    warn!(%address, "every host that reaches {address} can read the names of jobs; there is no authentication");
                }
                return listener;
            }
            Err(error) => {
                if !is_failing {
                    warn!(%address, "can't listen for metrics at {address}: {error}; {}", remedy_of(&error));
                }
                is_failing = true;
                sleep(LISTEN_RETRY).await;
            }
        }
    }
}

/// Returns what an administrator can do about `error`, a failure to listen for metrics.
fn remedy_of(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::AddrInUse => {
            "another program uses the port: set another in metrics.listen; pjwd retries"
        }
        io::ErrorKind::AddrNotAvailable => {
            "this machine does not have the address: correct metrics.listen; pjwd retries"
        }
        io::ErrorKind::PermissionDenied => {
            "only root may use ports below 1024: set another in metrics.listen; pjwd retries"
        }
        _ => "it is tried again",
    }
}

/// Writes the text file.
struct TextFileWriter {
    cache: Rc<TextCache>,
    path: Option<PathBuf>,
    is_failing: bool,
    next_write: Instant,
}

impl TextFileWriter {
    /// Waits until the file is due. Never returns if no file is configured.
    async fn due(&self) {
        match self.path {
            Some(_) => sleep_until(self.next_write).await,
            None => pending().await,
        }
    }

    /// Sets the path of the file, `None` for no file. If the path changes, removes the file at the old path. If this
    /// file can't be removed, logs the failure. The next write is due at once in any case.
    async fn set_path(&mut self, path: Option<&Path>) {
        self.next_write = Instant::now();
        if self.path.as_deref() == path {
            return;
        }
        self.is_failing = false;
        if let Some(old) = std::mem::replace(&mut self.path, path.map(Path::to_owned)) {
            let name = old.display().to_string();
            if let Err(error) = blocking(move || remove_file_if_exists(&old)).await {
                warn!("the metrics in {name} can't be removed: {error}; remove them by hand");
            }
        }
    }

    /// Writes the metrics to the file, and plans the next write after `interval`. Without a path or without metrics,
    /// only plans the next attempt after [`CACHE_TIME`]. Logs when writes begin to fail, and when they succeed again.
    async fn write_file(&mut self, interval: Duration) {
        let begun = Instant::now();
        let (Some(path), Some(text)) = (self.path.clone(), self.cache.render(MetricsFormat::Classic)) else {
            self.next_write = begun + CACHE_TIME;
            return;
        };
        let name = path.display().to_string();
        let written = blocking(move || textfile::write_metrics_file(&path, &text)).await;
        match &written {
            Ok(()) if self.is_failing => info!("the metrics in {name} can be written again"),
            Err(error) if !self.is_failing => warn!(
                "the metrics can't be written to {name}: {error}; make the directory, or, under systemd, let the unit write there (docs/metrics.md); pjwd retries each metrics.interval"
            ),
            _ => {}
        }
        self.is_failing = written.is_err();
        self.next_write = begun + interval;
    }
}

/// Runs disk I/O on a thread of its own.
async fn blocking(work: impl FnOnce() -> io::Result<()> + Send + 'static) -> io::Result<()> {
    spawn_blocking(work).await.unwrap_or_else(|error| Err(io::Error::other(error)))
}
