//! Whether the program exists, and whether it can be executed.

use std::ffi::OsStr;
use std::fs;
use std::io::ErrorKind;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::AtFlags;
use nix::unistd::{AccessFlags, faccessat};

use super::error::CheckError;

/// The path that execvp(3) searches without the variable `PATH`.
const DEFAULT_PATH: &str = "/bin:/usr/bin";

/// Returns the path of the file that execvp(3) would execute for `program`. A name without a slash is searched in the
/// directories of `PATH`. A directory that the caller may not search is skipped, as in shells.
///
/// # Errors
/// [`CheckError::NoProgram`] if no file was found. [`CheckError::NotExecutable`] if files were found, but none of them
/// can be executed. Also if `program` contains a slash, and the caller may not search one of the directories in this
/// path.
pub fn find_program(program: &OsStr) -> Result<PathBuf, CheckError> {
    if program.is_empty() || program.as_bytes().contains(&0) {
        return Err(no_program(program));
    }
    if program.as_bytes().contains(&b'/') {
        let path = Path::new(program);
        return match why_not_executable(path) {
            None => Ok(path.to_owned()),
            Some(why) => Err(refusal(path, why)),
        };
    }
    let path = std::env::var_os("PATH").unwrap_or_else(|| DEFAULT_PATH.into());
    let mut first_found = None;
    for candidate in std::env::split_paths(&path).map(|directory| directory.join(program)) {
        match why_not_executable(&candidate) {
            None => return Ok(candidate),
            Some(WhyNot::Missing | WhyNot::Hidden(_)) => {}
            Some(why) => first_found = first_found.or(Some(refusal(&candidate, why))),
        }
    }
    Err(first_found.unwrap_or_else(|| no_program(program)))
}

/// Why a file can't be executed.
enum WhyNot {
    /// There is no file at the path.
    Missing,
    /// A directory in the path may not be searched, so it is unknown whether the file exists. The variant contains the
    /// text for the user.
    Hidden(String),
    /// Another reason, as a text for the user.
    Because(String),
}

/// Returns the reason why the calling process can't execute the file at `path`. `None` if the file is a regular file
/// and the process has the permission to execute it. The content of the file is not checked.
fn why_not_executable(path: &Path) -> Option<WhyNot> {
    let because = |why: &str| Some(WhyNot::Because(why.to_owned()));
    match fs::metadata(path) {
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENOTDIR)) => {
            Some(WhyNot::Missing)
        }
        Err(error) if error.kind() == ErrorKind::PermissionDenied => {
            Some(WhyNot::Hidden(format!("{error}; check the permissions of its directories")))
        }
        Err(error) => because(&format!("{error}; check its path")),
        Ok(file) if file.is_dir() => because("it is a directory; name the program in it"),
        Ok(file) if !file.is_file() => because("it is no regular file; name a program"),
        Ok(_) => match faccessat(nix::fcntl::AT_FDCWD, path, AccessFlags::X_OK, AtFlags::AT_EACCESS) {
            Ok(()) => None,
            Err(Errno::EACCES) => because(
                "it may not be executed; check its permissions (chmod +x) and the mount option noexec",
            ),
            Err(errno) => because(errno.desc()),
        },
    }
}

fn refusal(path: &Path, why: WhyNot) -> CheckError {
    match why {
        WhyNot::Missing => no_program(path.as_os_str()),
        WhyNot::Hidden(why) | WhyNot::Because(why) => {
            CheckError::NotExecutable { program: path.display().to_string(), why }
        }
    }
}

fn no_program(program: &OsStr) -> CheckError {
    let name = program.to_string_lossy();
    CheckError::NoProgram { program: if name.is_empty() { "\"\"".to_owned() } else { name.into_owned() } }
}
