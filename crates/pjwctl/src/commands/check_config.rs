//! `pjwctl check-config FILE`: has the daemon's own program read the file, as the caller.

use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::ExitCode;

use anyhow::anyhow;

use super::daemon_program;

/// Becomes `pjwd --check-config`, whose output and exit code are the answer; returns only if that fails.
pub(super) fn run(file: &Path) -> anyhow::Result<ExitCode> {
    let mut pjwd = daemon_program::command()?;
    let error = pjwd.arg("--check-config").arg(daemon_program::option("--config", file.as_os_str())).exec();
    let program = Path::new(pjwd.get_program()).display();
    Err(anyhow!("can't start {program}: {error}; is pjw installed completely?"))
}
