//! The inputs of a hook: the connection to the daemon, the environment, the host, the arguments and the options.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Instant;

use jiff::Timestamp;
use pjw_core::snapshot::BatchAttributes;
use pjw_ipc::report::Thousandths;
use pjw_sources::{Host, announcement::JobAnnouncement};

use super::client::HookClient;
use crate::cli::HookArgs;
use crate::{output, render};

/// The maximum length of a file that a hook reads, in bytes.
pub(super) const MAX_FILE_BYTES: u64 = 1 << 20;

/// A job with less CPU time gets no line.
const LEAST_REPORTED: Thousandths = Thousandths(50);

/// The variables that a hook sets for the job: names and values.
pub(super) type Variables = Vec<(String, String)>;

/// The inputs of a hook.
pub(super) struct HookInput {
    pub(super) client: HookClient,
    /// The environment of the hook, as attributes that pjw-sources reads.
    pub(super) attributes: BatchAttributes,
    pub(super) host: Host,
    /// The arguments of the hook.
    pub(super) arguments: Vec<String>,
    /// The number of cores in the hook's configuration, if it has one.
    pub(super) cores: Option<u32>,
}

impl HookInput {
    /// Makes the inputs from the command line and the environment of the hook. Calls to the daemon end at `until`.
    pub(super) fn of(socket: Option<PathBuf>, request: &HookArgs, until: Instant) -> Self {
        let text = |word: std::ffi::OsString| word.to_string_lossy().into_owned();
        let environ = std::env::vars_os().map(|(name, value)| (text(name), text(value))).collect();
        let name = file(Path::new("/proc/sys/kernel/hostname")).unwrap_or_default().trim().to_owned();
        Self {
            client: HookClient::new(socket, until),
            attributes: BatchAttributes { environ, ..BatchAttributes::default() },
            host: Host { name, flux_user: None },
            arguments: request.arguments.iter().cloned().map(text).collect(),
            cores: request.cores,
        }
    }

    /// Registers the job at the daemon. No variables result.
    pub(super) fn register(&self, announcement: JobAnnouncement) -> anyhow::Result<Variables> {
        self.client.register(&announcement.job.clone(), announcement, self.cores)?;
        Ok(Vec::new())
    }

    /// Releases the job at the daemon, and prints one line about how the job used its cores. No variables result.
    pub(super) fn release(&self, announcement: &JobAnnouncement) -> anyhow::Result<Variables> {
        self.client.release(announcement)?;
        self.print_line_of(announcement);
        Ok(Vec::new())
    }

    /// Releases the job as [`HookInput::release`] does, for a batch system that discards the output of the hook.
    /// Therefore the line about the use of the cores also goes to the system log, but only if the hook runs as root.
    /// Otherwise users could write to the system log.
    pub(super) fn release_and_log(&self, announcement: &JobAnnouncement) -> anyhow::Result<Variables> {
        self.client.release(announcement)?;
        if let Some(line) = self.print_line_of(announcement).filter(|_| is_root()) {
            output::log_information(Path::new(output::SYSTEM_LOG), &line);
        }
        Ok(Vec::new())
    }

    /// Prints one line about how a released job used its cores, and returns the line. `None` if there is nothing to
    /// say, because the job hardly ran here.
    fn print_line_of(&self, announcement: &JobAnnouncement) -> Option<String> {
        let report = self.client.report(announcement, Timestamp::now());
        let line = render::report::report_line(&report.filter(|report| report.cpu_s >= LEAST_REPORTED)?);
        // The job is released already. The line is for its output, and nothing depends on it.
        let _ = output::print(&line);
        Some(line)
    }

    /// The arguments as text.
    pub(super) fn arguments(&self) -> Vec<&str> {
        self.arguments.iter().map(String::as_str).collect()
    }

    /// Returns the value of an environment variable that the batch system sets for the hook.
    pub(super) fn variable(&self, name: &str) -> Option<&str> {
        self.attributes.environ.get(name).map(String::as_str).filter(|value| !value.is_empty())
    }

    /// The value of a variable in the hook's environment, also if it is empty.
    pub(super) fn inherited(&self, name: &str) -> Option<String> {
        self.attributes.environ.get(name).cloned()
    }

    /// Returns the text of the file whose path is the value of the environment variable `variable`.
    pub(super) fn file_of(&self, variable: &str) -> Option<String> {
        file(Path::new(self.variable(variable)?))
    }
}

/// Returns the text of the file at `path`. `None` if the file can't be read.
pub(super) fn file(path: &Path) -> Option<String> {
    let mut text = Vec::new();
    std::fs::File::open(path).ok()?.take(MAX_FILE_BYTES).read_to_end(&mut text).ok()?;
    Some(String::from_utf8_lossy(&text).into_owned())
}

/// Returns whether this hook may register jobs, because it runs as root. A job of a hook that runs as its owner is
/// discovered by the daemon.
pub(super) fn is_root() -> bool {
    nix::unistd::geteuid().is_root()
}
