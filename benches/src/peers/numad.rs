//! A peer: `numad`, which scans processes at an interval and binds large ones to NUMA nodes. Its process list has
//! only the load processes (`-S 0`). It runs in mount and IPC namespaces of its own, so it changes no other process.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;

use crate::{programs::interrupt::StopSignal, programs::program::wait_for};

const START_TIMEOUT: Duration = Duration::from_secs(10);
const STOP_TIMEOUT: Duration = Duration::from_secs(5);
/// A script that starts numad. Other directories replace `/run` and `/var/log` for it.
const SCRIPT: &str = "mount --bind \"$0/run\" /run && mount --bind \"$0/log\" /var/log && exec numad \"$@\"";
/// How often the kernel scans for huge pages, for the whole machine. numad changes this setting by default.
const HUGE_PAGES: &str = "/sys/kernel/mm/transparent_hugepage/khugepaged/scan_sleep_millisecs";

/// A running `numad`: a daemon that binds large processes to NUMA nodes. Benches compare pjwd with this daemon.
/// Dropping this value ends the daemon.
#[derive(Debug)]
pub struct Numad {
    pid: u32,
    _dir: TempDir,
}

impl Numad {
    /// Starts the daemon `numad`, which scans the processes `pids` every second.
    ///
    /// # Errors
    /// If the daemon is not installed, or does not run on this machine. The error is the reason why a bench skips the
    /// measurement.
    pub fn start(pids: &[u32], interrupt: &StopSignal) -> anyhow::Result<Self> {
        let installed = Command::new("numad").arg("-V").stdout(Stdio::null()).stderr(Stdio::null()).status();
        installed.context("there is no numad: make peers")?;
        let dir =
            tempfile::Builder::new().prefix("pjw-bench-").tempdir().context("no temporary directory")?;
        for name in ["run", "log"] {
            fs::create_dir(dir.path().join(name)).context("can't write in the temporary directory")?;
        }
        let huge_pages = fs::read_to_string(HUGE_PAGES).ok();
        let mut command = Command::new("unshare");
        command.args(["--mount", "--ipc", "--propagation", "private", "sh", "-c", SCRIPT]).arg(dir.path());
        command.args(["-S", "0", "-H", "0", "-i", "1:1"]);
        command.args(pids.iter().flat_map(|pid| ["-p".to_owned(), pid.to_string()]));
        let output = command.stdin(Stdio::null()).output().context("there is no unshare(1)")?;
        let stderr = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        if !output.status.success() {
            bail!("numad does not run here: {stderr}");
        }
        let file = dir.path().join("run/numad.pid");
        let pid = wait_for("numad does not run", START_TIMEOUT, interrupt, || {
            let text = fs::read_to_string(&file).unwrap_or_default();
            Ok(text.trim().parse().ok().filter(|&pid| is_numad(pid)))
        });
        let log = || fs::read_to_string(dir.path().join("log/numad.log")).unwrap_or_default();
        let pid = pid.with_context(|| format!("{stderr} {}", log()))?;
        if fs::read_to_string(HUGE_PAGES).ok() != huge_pages {
            // numad may change the setting in spite of `-H 0`. The old value is written back.
            let _ = huge_pages.map(|before| fs::write(HUGE_PAGES, before.trim()));
        }
        Ok(Self { pid, _dir: dir })
    }

    /// Returns the process id of the daemon `numad`.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.pid
    }
}

impl Drop for Numad {
    /// Ends numad, and waits for its end. numad is a daemon and no child of this process. So another process may get
    /// its process id after its end. Therefore the name of the process is checked before each signal.
    fn drop(&mut self) {
        let pid = Pid::from_raw(self.pid.cast_signed());
        let deadline = Instant::now() + STOP_TIMEOUT;
        let mut signal = Signal::SIGTERM;
        while is_numad(self.pid) {
            let _ = kill(pid, signal);
            thread::sleep(Duration::from_millis(50));
            if Instant::now() > deadline {
                signal = Signal::SIGKILL;
            }
        }
    }
}

/// Returns whether a process is a numad that has not ended.
fn is_numad(pid: u32) -> bool {
    let stat = fs::read_to_string(Path::new("/proc").join(pid.to_string()).join("stat")).unwrap_or_default();
    stat.contains("(numad)") && !stat.contains(") Z ")
}
