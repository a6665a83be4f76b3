//! The inputs of a hook: the connection to the daemon, the environment, the host, the arguments and the options.

use std::fs::OpenOptions;
use std::io::Read;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

use jiff::Timestamp;
use nix::libc;
use pjw_core::snapshot::BatchAttributes;
use pjw_ipc::report::Thousandths;
use pjw_sources::{LocalHost, announcement::JobAnnouncement};

use super::client::HookClient;
use crate::cli::HookArgs;
use crate::{output, render};

/// The maximum number of bytes that a hook reads of a file.
pub(super) const MAX_FILE_BYTES: u64 = 1 << 20;

/// The minimum CPU time in seconds of a job about which a line is printed.
const MIN_REPORTED_CPU_TIME: Thousandths = Thousandths(50);

/// The names and values of the environment variables that a hook sets for the programs of a job.
pub(super) type JobVariables = Vec<(String, String)>;

/// The input of a hook of a batch system: the connection to the daemon, the environment variables and the arguments of
/// the hook, the host, and the number of cores to request.
pub(super) struct HookInput {
    pub(super) client: HookClient,
    /// The environment of the hook, as attributes that pjw-sources reads.
    pub(super) attributes: BatchAttributes,
    pub(super) host: LocalHost,
    /// The arguments of the hook.
    pub(super) arguments: Vec<String>,
    /// The number of cores in the hook's configuration, if it has one.
    pub(super) cores: Option<u32>,
}

impl HookInput {
    /// Makes the input of a hook from its environment variables and from `request`, its command line options. `socket`
    /// is the path of the daemon's socket, if the command line contains a path. All calls to the daemon end at
    /// `deadline`.
    pub(super) fn from_arguments(socket: Option<PathBuf>, request: &HookArgs, deadline: Instant) -> Self {
        let text = |word: std::ffi::OsString| word.to_string_lossy().into_owned();
        let environ = std::env::vars_os().map(|(name, value)| (text(name), text(value))).collect();
        let name = read_file(Path::new("/proc/sys/kernel/hostname")).unwrap_or_default().trim().to_owned();
        Self {
            client: HookClient::new(socket, deadline),
            attributes: BatchAttributes { environ, ..BatchAttributes::default() },
            host: LocalHost { name, flux_user: None },
            arguments: request.arguments.iter().cloned().map(text).collect(),
            cores: request.cores,
        }
    }

    /// Registers the job in `announcement` at the daemon, and requests its cores. Returns an empty list of environment
    /// variables.
    pub(super) fn register(&self, announcement: JobAnnouncement) -> anyhow::Result<JobVariables> {
        self.client.register(&announcement.job.clone(), announcement, self.cores)?;
        Ok(Vec::new())
    }

    /// Releases the job in `announcement`, and prints one line about how the job used its cores. Returns an empty list
    /// of environment variables.
    pub(super) fn release(&self, announcement: &JobAnnouncement) -> anyhow::Result<JobVariables> {
        self.client.release(announcement)?;
        self.print_usage_line(announcement);
        Ok(Vec::new())
    }

    /// Releases the job in `announcement`, and prints one line about how the job used its cores. If the hook runs as
    /// root, also writes this line to the system log, because the batch system discards the output of the hook. Returns
    /// an empty list of environment variables.
    pub(super) fn release_and_log(&self, announcement: &JobAnnouncement) -> anyhow::Result<JobVariables> {
        self.client.release(announcement)?;
        if let Some(line) = self.print_usage_line(announcement).filter(|_| is_root()) {
            output::log_info(Path::new(output::SYSTEM_LOG), &line);
        }
        Ok(Vec::new())
    }

    /// Prints one line about how a released job used its cores, and returns the line. `None` if there is nothing to
    /// say, because the job hardly ran here.
    fn print_usage_line(&self, announcement: &JobAnnouncement) -> Option<String> {
        let report = self.client.report(announcement, Timestamp::now())?;
        if report.cpu_s < MIN_REPORTED_CPU_TIME {
            return None;
        }
        let line = render::report::report_line(&report);
        // The job is released already, so a line that can't be printed is no failure of the hook.
        let _ = output::print(&line);
        Some(line)
    }

    /// Returns the arguments that the batch system passed to the hook.
    pub(super) fn arguments(&self) -> Vec<&str> {
        self.arguments.iter().map(String::as_str).collect()
    }

    /// Returns the value of the environment variable `name` of the hook. `None` if the variable is not set or is empty.
    pub(super) fn variable(&self, name: &str) -> Option<&str> {
        self.attributes.environ.get(name).map(String::as_str).filter(|value| !value.is_empty())
    }

    /// Returns the value of the environment variable `name` of the hook. The value can be empty. `None` if the variable
    /// is not set.
    pub(super) fn inherited_variable(&self, name: &str) -> Option<String> {
        self.attributes.environ.get(name).cloned()
    }

    /// Returns the content of the file whose path is the value of the environment variable `variable` of the hook.
    /// `None` if the variable is not set or is empty, or if the file can't be read.
    pub(super) fn file_named_by_variable(&self, variable: &str) -> Option<String> {
        read_file(Path::new(self.variable(variable)?))
    }
}

/// Returns the content of the file at `path`, at most [`MAX_FILE_BYTES`] bytes. `None` if the file can't be read, or is
/// no regular file: a user may have chosen the path, and for a device, open(2) alone can have an effect.
pub(super) fn read_file(path: &Path) -> Option<String> {
    let named = OpenOptions::new().read(true).custom_flags(libc::O_PATH | libc::O_CLOEXEC).open(path).ok()?;
    if !named.metadata().ok()?.is_file() {
        return None;
    }
    // The same file, whatever is at the path by now (proc_pid_fd(5)).
    let file = std::fs::File::open(format!("/proc/self/fd/{}", named.as_raw_fd())).ok()?;
    let mut text = Vec::new();
    file.take(MAX_FILE_BYTES).read_to_end(&mut text).ok()?;
    Some(String::from_utf8_lossy(&text).into_owned())
}

/// Returns whether this hook runs as root. Only root may register and release jobs of all users. If the hook does not
/// run as root, the daemon discovers the job without the help of the hook.
pub(super) fn is_root() -> bool {
    nix::unistd::geteuid().is_root()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_regular_files_are_opened() {
        let dir = tempfile::tempdir().unwrap();
        let (file, link, pipe) = (dir.path().join("file"), dir.path().join("link"), dir.path().join("pipe"));
        std::fs::write(&file, "n1 4 q r\n").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert_eq!([&file, &link].map(|path| read_file(path).unwrap()), ["n1 4 q r\n"; 2]);
        // An open of the pipe would wait for a writer.
        let others = [pipe.as_path(), dir.path(), Path::new("/dev/null"), Path::new("/nowhere")];
        assert_eq!(others.map(read_file), [None, None, None, None]);
    }
}
