//! What tells the metrics, on the control server's thread: follows the configuration, writes the file, listens.
//!
//! Nothing that goes wrong here ends the daemon: it is logged when it begins and when it is over, and tried again.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::future::pending;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use pjw_linux::own_cost::own_cost;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::{AbortHandle, spawn_blocking, spawn_local};
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tracing::{info, warn};

use super::facts::Facts;
use super::http::{Crowd, Limits, Teller, serve};
use super::pulse::{Pulse, Told};
use super::text::{Dialect, write};
use super::textfile;
use crate::config::MetricsSettings;

/// A text is told again for so long, however often it is asked for.
const TOLD_AGAIN: Duration = Duration::from_millis(250);
/// When it is tried again to listen where that failed.
const LISTEN_AGAIN: Duration = Duration::from_secs(5);
/// How long the end of the daemon waits for the file to be removed.
const REMOVAL: Duration = Duration::from_secs(1);

/// A text, and when it was made.
type Written = (Instant, Rc<str>);

/// The text as of now, made when it is asked for.
#[derive(Debug)]
struct Narrator {
    pulse: watch::Receiver<Option<Arc<Pulse>>>,
    settings: watch::Receiver<MetricsSettings>,
    /// What was told last in each format, and when.
    last: RefCell<[Option<Written>; 2]>,
}

impl Narrator {
    fn text(&self, dialect: Dialect) -> Option<String> {
        let pulse = self.pulse.borrow().clone()?;
        let max_jobs = usize::try_from(self.settings.borrow().max_jobs).unwrap_or(usize::MAX);
        Some(write(&Facts::new(&pulse, own_cost(), max_jobs), dialect))
    }
}

impl Teller for Narrator {
    fn tell(&self, dialect: Dialect) -> Option<Rc<str>> {
        let place = usize::from(dialect == Dialect::OpenMetrics);
        let told = self.last.borrow()[place].clone();
        if let Some((_, text)) = told.filter(|(at, _)| at.elapsed() < TOLD_AGAIN) {
            return Some(text);
        }
        let text: Rc<str> = self.text(dialect)?.into();
        self.last.borrow_mut()[place] = Some((Instant::now(), Rc::clone(&text)));
        Some(text)
    }
}

/// Tells the metrics until `stop` becomes true, and takes the file away then. Must run inside a
/// [`tokio::task::LocalSet`].
pub async fn run(told: Told, mut stop: watch::Receiver<bool>) {
    let Told { pulse, mut settings } = told;
    let narrator = Rc::new(Narrator { pulse, settings: settings.clone(), last: RefCell::default() });
    let mut ears = Ears { narrator: Rc::clone(&narrator), crowd: Crowd::default(), open: BTreeMap::new() };
    let mut paper = Paper { narrator, path: None, failing: false, next: Instant::now() };
    loop {
        let now = settings.borrow_and_update().clone();
        ears.listen_at(&now.listen);
        paper.move_to(now.textfile.as_deref()).await;
        loop {
            tokio::select! {
                () = paper.due() => {
                    paper.write(now.interval).await;
                    continue;
                }
                Ok(()) = settings.changed() => break,
                () = told_to(&mut stop) => {}
            }
            ears.listen_at(&[]);
            let _ = timeout(REMOVAL, paper.move_to(None)).await;
            return;
        }
    }
}

async fn told_to(stop: &mut watch::Receiver<bool>) {
    let _ = stop.wait_for(|stop| *stop).await;
}

/// The endpoint's listeners.
struct Ears {
    narrator: Rc<Narrator>,
    crowd: Crowd,
    open: BTreeMap<SocketAddr, AbortHandle>,
}

impl Ears {
    /// Listens at these addresses and no others. What stays is not disturbed.
    fn listen_at(&mut self, wanted: &[SocketAddr]) {
        self.open.retain(|address, task| {
            let stays = wanted.contains(address);
            if !stays {
                task.abort();
            }
            stays
        });
        for &address in wanted {
            let (narrator, crowd) = (Rc::clone(&self.narrator), self.crowd.clone());
            self.open.entry(address).or_insert_with(|| {
                let listening = async move {
                    let listener = listener(address).await;
                    serve(listener, narrator, Limits::default(), crowd).await;
                };
                spawn_local(listening).abort_handle()
            });
        }
    }
}

async fn listener(address: SocketAddr) -> TcpListener {
    let mut failing = false;
    loop {
        match TcpListener::bind(address).await {
            Ok(listener) => {
                info!(%address, "metrics are told at http://{address}/metrics");
                if !address.ip().is_loopback() {
                    warn!(%address, "whoever reaches {address} can read the names of jobs; nobody is asked who he is");
                }
                return listener;
            }
            Err(error) => {
                if !failing {
                    warn!(%address, "can't listen for metrics at {address}: {error}; {}", remedy_of(&error));
                }
                failing = true;
                sleep(LISTEN_AGAIN).await;
            }
        }
    }
}

fn remedy_of(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::AddrInUse => {
            "another program has the port: name another in metrics.listen; it is tried again"
        }
        io::ErrorKind::AddrNotAvailable => {
            "this machine has no such address: correct metrics.listen; it is tried again"
        }
        io::ErrorKind::PermissionDenied => {
            "only root may use ports below 1024: name another in metrics.listen; it is tried again"
        }
        _ => "it is tried again",
    }
}

/// The text file.
struct Paper {
    narrator: Rc<Narrator>,
    path: Option<PathBuf>,
    failing: bool,
    next: Instant,
}

impl Paper {
    /// Comes back when the file is to be written.
    async fn due(&self) {
        match self.path {
            Some(_) => sleep_until(self.next).await,
            None => pending().await,
        }
    }

    /// Another place, or none: the file in the old one goes.
    async fn move_to(&mut self, path: Option<&Path>) {
        self.next = Instant::now();
        if self.path.as_deref() == path {
            return;
        }
        self.failing = false;
        if let Some(old) = std::mem::replace(&mut self.path, path.map(Path::to_owned)) {
            let name = old.display().to_string();
            if let Err(error) = aside(move || textfile::remove(&old)).await {
                warn!("the metrics in {name} can't be removed: {error}; remove them by hand");
            }
        }
    }

    async fn write(&mut self, interval: Duration) {
        let begun = Instant::now();
        let (Some(path), Some(text)) = (self.path.clone(), self.narrator.text(Dialect::Classic)) else {
            // The first cycle since metrics were switched on is under way.
            self.next = begun + TOLD_AGAIN;
            return;
        };
        let name = path.display().to_string();
        let written = aside(move || textfile::write(&path, &text)).await;
        match &written {
            Ok(()) if self.failing => info!("the metrics in {name} can be written again"),
            Err(error) if !self.failing => warn!(
                "the metrics can't be written to {name}: {error}; make its directory, or, under systemd, let the unit \
                 write there (docs/metrics.md); it is tried again each metrics.interval"
            ),
            _ => {}
        }
        self.failing = written.is_err();
        self.next = begun + interval;
    }
}

/// A disk may take its time, and nobody else's.
async fn aside(work: impl FnOnce() -> io::Result<()> + Send + 'static) -> io::Result<()> {
    spawn_blocking(work).await.unwrap_or_else(|lost| Err(io::Error::other(lost)))
}
