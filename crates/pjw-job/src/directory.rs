//! The directory in which pjwd publishes the files of a job: how a program finds it, and the names of the files.

use std::env;
use std::ffi::OsString;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use pjw_core::job::JobId;

/// The name of the file with the core map in the directory of a job. The core map contains the CPUs of the job. pjwd
/// writes the file, and the programs of the job map it into their memory.
pub const CORE_MAP_FILE_NAME: &str = "coremap";
/// The name of the file in the directory of a job that contains the number of cores that the job wants at present. A
/// program of the job writes the number, and pjwd reads it.
pub const WANTED_CORES_FILE_NAME: &str = "want";
/// The permission bits of the files that pjwd writes in the directory of a job, such as the core map. All users may
/// read these files. The file `want`, which programs of the job write, has other permission bits.
pub const FILE_MODE: u32 = 0o644;

/// Finds the directory with the files of the job to which this process belongs. The first environment variable in
/// this list that is set determines the directory:
///
/// 1. `PJW_JOB_DIR` contains the absolute path of the directory. `pjwctl run`, `pjwctl spawn` and the hooks of batch
///    systems set this variable.
/// 2. `PJW_JOB` contains the id of the job, ID. The function uses the first of these directories that exists:
///    - Directories of a daemon of this user: `$XDG_RUNTIME_DIR/pjwd/jobs/ID`, `/run/user/UID/pjwd/jobs/ID` and
///      `/tmp/pjwd-UID/jobs/ID`. A process of root skips these directories.
///    - The directory of the daemon of root: `/run/pjwd/jobs/ID`.
/// 3. `SLURM_JOB_ID` contains a number N. The id of the job is `slurm:N`, and the directory is found as for
///    `PJW_JOB`.
///
/// A directory is used only if it exists and belongs to root or to the effective user of this process. `None` if no
/// variable is set, its value is invalid, or there is no such directory.
#[must_use]
pub fn find_job_directory() -> Option<PathBuf> {
    find_directory(|name| env::var_os(name))
}

/// Finds the directory of the job by the rules of [`find_job_directory`]. `variable` returns the value of the
/// environment variable with the given name, or `None` if this variable is not set.
fn find_directory(variable: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    // SAFETY: the call has no arguments and can't fail.
    let user = unsafe { libc::geteuid() };
    let is_trusted = |directory: &PathBuf| {
        let metadata = std::fs::metadata(directory);
        metadata.is_ok_and(|metadata| metadata.is_dir() && (metadata.uid() == 0 || metadata.uid() == user))
    };
    if let Some(directory) = variable("PJW_JOB_DIR").map(PathBuf::from) {
        return Some(directory).filter(|directory| directory.is_absolute() && is_trusted(directory));
    }
    let text = |name: &str| variable(name)?.into_string().ok();
    let id = text("PJW_JOB").or_else(|| text("SLURM_JOB_ID").map(|number| format!("slurm:{number}")))?;
    // An id has no slash and is neither `.` nor `..`, so it names a directory directly below.
    let id: JobId = id.parse().ok()?;
    let mut state_directories = Vec::new();
    if user != 0 {
        let xdg = variable("XDG_RUNTIME_DIR").map(|directory| PathBuf::from(directory).join("pjwd"));
        state_directories.extend(xdg.filter(|directory| directory.is_absolute()));
        state_directories.push(PathBuf::from(format!("/run/user/{user}/pjwd")));
        state_directories.push(PathBuf::from(format!("/tmp/pjwd-{user}")));
    }
    state_directories.push(PathBuf::from("/run/pjwd"));
    state_directories.into_iter().map(|directory| job_directory(&directory, &id)).find(is_trusted)
}

/// Returns the directory of a job of the daemon with the state directory `state_directory`.
fn job_directory(state_directory: &Path, id: &JobId) -> PathBuf {
    state_directory.join("jobs").join(id.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_directory_is_that_of_the_variables_if_it_is_there() {
        let directory = tempfile::tempdir().unwrap();
        let job = directory.path().join("pjwd/jobs/manual:a");
        std::fs::create_dir_all(&job).unwrap();
        let find = |variables: &[(&str, &Path)]| {
            find_directory(|name| {
                variables.iter().find(|(key, _)| *key == name).map(|(_, value)| value.as_os_str().to_owned())
            })
        };
        assert_eq!(find(&[("PJW_JOB_DIR", &job)]), Some(job.clone()));
        assert_eq!(find(&[("PJW_JOB_DIR", &directory.path().join("other"))]), None);
        assert_eq!(
            find(&[("PJW_JOB_DIR", Path::new("."))]),
            None,
            "it must not depend on the working directory"
        );
        assert_eq!(find(&[]), None);
        // SAFETY: the call has no arguments and can't fail.
        if unsafe { libc::geteuid() } != 0 {
            let runtime = ("XDG_RUNTIME_DIR", directory.path());
            assert_eq!(find(&[runtime, ("PJW_JOB", Path::new("a"))]), Some(job));
            assert_eq!(find(&[runtime, ("PJW_JOB", Path::new("../../jobs/manual:a"))]), None);
        }
    }
}
