//! A peer: `cgrulesengd` of libcgroup, which receives process events as pjwd does, and moves processes to cgroups by
//! rules. It runs in a mount namespace of its own. In it, `/etc` and `/run` are directories of the bench. So the
//! rules of this machine, and a `cgrulesengd` that already runs, are not changed. Its only rule is for a program with
//! a unique name.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, bail};
use pjw_core::{cpuset::CpuSet, ids::Tid};
use pjw_linux::sys::affinity;
use tempfile::TempDir;

use crate::programs::program::{Program, wait_for};
use crate::{peers::cgroups::Cgroup, programs::interrupt::StopSignal};

const START_TIMEOUT: Duration = Duration::from_secs(20);
const STOP_TIMEOUT: Duration = Duration::from_secs(5);
/// Binds other directories to `/etc` and `/run` in the mount namespace of the daemon.
const SCRIPT: &str =
    "mount --bind \"$0/etc\" /etc && mount --bind \"$0/run\" /run && exec cgrulesengd -n -f \"$0/log\"";

/// A running `cgrulesengd`: a daemon of libcgroup that moves new processes to cgroups by rules. It has one rule, which
/// moves the processes of one program to one cgroup with a cpuset. Benches compare pjwd with this daemon.
#[derive(Debug)]
pub struct Cgrulesengd {
    daemon: Program,
    worker: PathBuf,
    // The fields are dropped in this order: when the cgroup is removed, its processes have ended.
    _group: Cgroup,
    _dir: TempDir,
}

impl Cgrulesengd {
    /// Starts `cgrulesengd` with one rule, which moves the processes of one program to a cgroup with the PUs (logical
    /// CPUs) `cpus`. Waits until the daemon has moved a first process of this program.
    ///
    /// # Errors
    /// If the daemon is not installed, lacks permission or moves no process. The error is the reason why a bench skips
    /// the measurement.
    pub fn start(cpus: &CpuSet, interrupt: &StopSignal) -> anyhow::Result<Self> {
        let installed =
            Command::new("cgrulesengd").arg("--help").stdout(Stdio::null()).stderr(Stdio::null()).status();
        installed.context("there is no cgrulesengd: make peers")?;
        let group = Cgroup::new("cpuset", "rules")?;
        group.set_cpus(cpus)?;
        let dir =
            tempfile::Builder::new().prefix("pjw-bench-").tempdir().context("no temporary directory")?;
        let worker = dir.path().join(format!("pjwb{}", std::process::id()));
        let name = worker.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        fs::copy(find_sleep()?, &worker).context("can't copy sleep(1)")?;
        write_directories(dir.path(), &format!("*:{name}\tcpuset\t{}\n", group.name()))?;
        let mut command = Command::new("unshare");
        command.args(["--mount", "--propagation", "private", "sh", "-c", SCRIPT]).arg(dir.path());
        let daemon = Program::start("cgrulesengd", &mut command)?;
        let mut rules = Self { daemon, worker, _group: group, _dir: dir };
        rules.wait_until_worker_is_moved(cpus, interrupt)?;
        Ok(rules)
    }

    /// Starts test workers one after the other, until cgrulesengd has moved one to the PUs `cpus` within 100 ms.
    ///
    /// # Errors
    /// If cgrulesengd ends, or if no worker is moved within [`START_TIMEOUT`].
    fn wait_until_worker_is_moved(&mut self, cpus: &CpuSet, interrupt: &StopSignal) -> anyhow::Result<()> {
        wait_for("cgrulesengd moves no process", START_TIMEOUT, interrupt, || {
            if let Some(status) = self.daemon.exit_status()? {
                bail!("cgrulesengd ended: {status}");
            }
            let worker = TestWorker(
                Command::new(&self.worker).arg("60").spawn().context("can't start the test worker")?,
            );
            std::thread::sleep(Duration::from_millis(100));
            Ok(affinity::get_mask(Tid(worker.0.id())).is_ok_and(|mask| mask == *cpus).then_some(()))
        })
    }

    /// Returns the path of the program whose processes the rule of `cgrulesengd` moves. The program is a copy of
    /// sleep(1) with a unique name.
    #[must_use]
    pub fn worker(&self) -> &Path {
        &self.worker
    }
}

impl Drop for Cgrulesengd {
    fn drop(&mut self) {
        self.daemon.terminate(STOP_TIMEOUT);
    }
}

/// A process that is killed when this value is dropped.
struct TestWorker(Child);

impl Drop for TestWorker {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Returns the path of the program sleep(1).
///
/// # Errors
/// If no directory in `PATH` contains the program.
pub fn find_sleep() -> anyhow::Result<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut found = std::env::split_paths(&path).map(|dir| dir.join("sleep")).filter(|file| file.is_file());
    found.next().context("there is no sleep(1) on the path")
}

/// Makes the directories `run` and `etc` in `dir`, which replace `/run` and `/etc` for cgrulesengd. `etc` has the files
/// that cgrulesengd reads, with `rule` as its only rule.
fn write_directories(dir: &Path, rule: &str) -> anyhow::Result<()> {
    let etc = dir.join("etc");
    for path in [dir.join("run"), etc.clone(), etc.join("cgconfig.d"), etc.join("cgrules.d")] {
        fs::create_dir(&path).context("can't write in the temporary directory")?;
    }
    // The daemon resolves the names of users and groups.
    for file in ["passwd", "group", "nsswitch.conf"] {
        let _ = fs::copy(Path::new("/etc").join(file), etc.join(file));
    }
    fs::write(etc.join("cgconfig.conf"), "")?;
    fs::write(etc.join("cgrules.conf"), rule).context("can't write in the temporary directory")
}
