//! The directories of the socket and the state. They are created if needed, and used only if no other user can
//! replace files in them.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use nix::libc::{O_DIRECTORY, O_NOFOLLOW, O_NONBLOCK};
use nix::unistd::Uid;
use pjw_core::own_cgroups::OwnCgroupNames;
use tracing::info;

const STICKY: u32 = 0o1000;
const OTHERS_MAY_WRITE: u32 = 0o002;

/// Creates the default directory `dir` for the socket and the state files of the daemon of the user `uid`. The parent
/// directory must exist. An existing directory is accepted only if it belongs to this user: below /tmp, other users
/// can create directories too.
///
/// # Errors
/// If the directory can't be created, is not a directory, or belongs to another user. If another user can replace
/// files in the directory.
pub fn make_default_directory(dir: &Path, uid: u32) -> anyhow::Result<()> {
    make_default_and_record(dir, uid, &mut Vec::new())
}

/// Creates the default directory `dir` as [`make_default_directory`] does. Adds it to `made` if this call created it.
fn make_default_and_record(dir: &Path, uid: u32, made: &mut Vec<PathBuf>) -> anyhow::Result<()> {
    let mode = if uid == 0 { 0o755 } else { 0o700 };
    match DirBuilder::new().mode(mode).create(dir) {
        Ok(()) => made.push(dir.to_owned()),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(error) => {
            return Err(error).with_context(|| {
                format!("can't make {}: choose --socket and --state-dir somewhere writable", dir.display())
            });
        }
    }
    let meta = std::fs::symlink_metadata(dir)
        .with_context(|| format!("can't read the owner and mode of {}", dir.display()))?;
    if !meta.is_dir() || meta.uid() != uid {
        bail!(
            "{} is not a directory of user {uid}: remove it, or choose --socket and --state-dir",
            dir.display()
        );
    }
    check_owners_and_modes(dir, uid)
}

/// Creates the directory `dir` for the state files of the daemon of the user `uid`, with its missing parent
/// directories. Logs the creation of `dir`. An existing directory is kept. Then checks that no other user can replace
/// files in `dir`.
///
/// # Errors
/// If the directory can't be created, or another user can replace files in it.
pub fn make_state_directory(dir: &Path, uid: u32) -> anyhow::Result<()> {
    make_state_and_record(dir, uid, &mut Vec::new())
}

/// Creates the directory `dir` as [`make_state_directory`] does. Adds each directory that this call created to `made`,
/// after its parent.
fn make_state_and_record(dir: &Path, uid: u32, made: &mut Vec<PathBuf>) -> anyhow::Result<()> {
    let made_before = made.len();
    make_with_parents(dir, made)
        .with_context(|| format!("can't make {}: choose another --state-dir", dir.display()))?;
    if made[made_before..].iter().any(|new| new == dir) {
        log_new_directory(dir);
    }
    check_owners_and_modes(dir, uid)
}

/// Creates the directory `dir` and its missing parent directories, as [`std::fs::create_dir_all`] does. Adds each
/// directory that this call created to `made`, after its parent. A directory that another process creates at the same
/// time is not added.
fn make_with_parents(dir: &Path, made: &mut Vec<PathBuf>) -> io::Result<()> {
    // The empty path means the working directory.
    if dir.as_os_str().is_empty() {
        return Ok(());
    }
    let mut created = std::fs::create_dir(dir);
    if let (Err(error), Some(parent)) = (&created, dir.parent())
        && error.kind() == io::ErrorKind::NotFound
    {
        make_with_parents(parent, made)?;
        created = std::fs::create_dir(dir);
    }
    match created {
        Ok(()) => made.push(dir.to_owned()),
        Err(_) if dir.is_dir() => {}
        Err(error) => return Err(error),
    }
    Ok(())
}

/// Returns whether neither a file nor a directory exists at the path `dir`. A symbolic link counts as a file, even if
/// its target does not exist. Returns false for the empty path, which means the working directory, and for a path that
/// can't be checked.
#[must_use]
pub fn is_missing(dir: &Path) -> bool {
    !dir.as_os_str().is_empty()
        && std::fs::symlink_metadata(dir).is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
}

/// The directories that this process has created during the start of pjwd. If the start fails, this value is dropped.
/// The drop removes those of the directories that are empty. After a successful start, [`NewDirectories::keep`] must be
/// called instead. Directories that existed before, or that another process created, are never removed.
#[derive(Debug, Default)]
pub struct NewDirectories {
    /// The directories that this process made, each after its parent.
    paths: Vec<PathBuf>,
}

impl NewDirectories {
    /// Creates the directories for the daemon of the user `uid`, if they are missing. The state directory `state_dir`
    /// is created as by [`make_state_directory`]. The default directory `default_dir` is created before, as by
    /// [`make_default_directory`]. `default_dir` is `None` if the daemon does not use this directory.
    ///
    /// # Errors
    /// The errors of [`make_default_directory`] and [`make_state_directory`]. The directories that this call created
    /// are then removed again if they are empty.
    pub fn make(default_dir: Option<&Path>, state_dir: &Path, uid: u32) -> anyhow::Result<Self> {
        let mut new_directories = Self::default();
        if let Some(dir) = default_dir {
            make_default_and_record(dir, uid, &mut new_directories.paths)?;
        }
        make_state_and_record(state_dir, uid, &mut new_directories.paths)?;
        Ok(new_directories)
    }

    /// Drops this value without removing the directories. Must be called when the start of pjwd has succeeded.
    pub fn keep(mut self) {
        self.paths.clear();
    }
}

impl Drop for NewDirectories {
    fn drop(&mut self) {
        for dir in self.paths.iter().rev() {
            let _ = std::fs::remove_dir(dir);
        }
    }
}

/// Returns whether the paths `one` and `other` lead to the same directory. Symbolic links are followed. If a path can't
/// be resolved, for example because nothing exists at the path, the text of the path is compared instead.
#[must_use]
pub fn is_same_directory(one: &Path, other: &Path) -> bool {
    let real = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
    real(one) == real(other)
}

/// Logs that pjwd created the directory `dir`. The user chose its path, and can see from the log whether the path is a
/// mistake.
pub fn log_new_directory(dir: &Path) {
    info!(directory = %dir.display(), "the directory was missing; it was made");
}

/// Returns the names of the cgroups that this pjwd creates for jobs. `is_second_pjwd` says whether this pjwd was
/// started with `--beside`, as a second pjwd of the same user. If true, the names contain a hash of the path of its
/// state directory `state_dir`, and differ from the names that the first pjwd uses.
#[must_use]
pub fn own_cgroup_names(state_dir: &Path, is_second_pjwd: bool) -> OwnCgroupNames {
    if !is_second_pjwd {
        return OwnCgroupNames::default();
    }
    OwnCgroupNames::for_additional_daemon(real_path(state_dir).as_os_str().as_bytes())
}

/// The absolute path without symbolic links, as `Path::canonicalize` returns it. A directory that is missing has the
/// path that it would have if it were made: after it was deleted, its path is the same.
fn real_path(path: &Path) -> PathBuf {
    let Ok(absolute) = std::path::absolute(path) else { return path.to_owned() };
    let existing = absolute.ancestors().find_map(|above| Some((above, above.canonicalize().ok()?)));
    let Some((above, real)) = existing else { return absolute };
    let missing = absolute.strip_prefix(above).unwrap_or(Path::new(""));
    // A join with the empty path would add a slash, and the hash of the text would be another one.
    if missing.as_os_str().is_empty() { real } else { real.join(missing) }
}

/// Checks that only trusted users can replace files in the directory `dir`. For `dir` and all its parents, the owner
/// must be the user `uid`, root or the owner of `/`. A directory that all users may write must have the sticky bit,
/// as /tmp has, so that nobody can rename files of others. The error names the first directory that is not safe.
fn check_owners_and_modes(dir: &Path, uid: u32) -> anyhow::Result<()> {
    let unreadable = |path: &Path| {
        format!("can't read the owner and mode of {}: choose another --state-dir", path.display())
    };
    let metadata = |path: &Path| std::fs::metadata(path).with_context(|| unreadable(path));
    let real = dir.canonicalize().with_context(|| unreadable(dir))?;
    // In a user namespace, directories of root show another owner. The owner of / is trusted in any case.
    let trusted = [uid, 0, metadata(Path::new("/"))?.uid()];
    for path in real.ancestors() {
        let meta = metadata(path)?;
        if !trusted.contains(&meta.uid()) {
            bail!(
                "{} belongs to user {}, who could replace the state files of user {uid}'s daemon: choose a --state-dir that belongs to user {uid}",
                path.display(),
                meta.uid()
            );
        }
        if meta.mode() & OTHERS_MAY_WRITE != 0 && meta.mode() & STICKY == 0 {
            bail!(
                "{path} is writable by all users, who could replace the daemon's state files: chmod o-w {path}, or choose another --state-dir",
                path = path.display()
            );
        }
    }
    Ok(())
}

/// Opens one of pjwd's own files, such as the lock file. `path` is the path of the file. `options` say how to open
/// the file, and whether to create a missing file. Refuses symbolic links, hard links, pipes and files of other
/// users, because any user can put these into a directory such as /tmp.
///
/// # Errors
/// If the file can't be opened, is not a regular file of the daemon's user, or has a second name (hard link).
pub fn open_own_file(path: &Path, options: &mut OpenOptions) -> io::Result<File> {
    // Opening a pipe without a writer must not block the start.
    let opened = options.custom_flags(O_NOFOLLOW | O_NONBLOCK).open(path);
    let file = opened.map_err(|error| match error.raw_os_error() {
        Some(nix::libc::ELOOP) => io::Error::other("it is a symbolic link"),
        _ => error,
    })?;
    let meta = file.metadata()?;
    let user = Uid::effective().as_raw();
    if !meta.is_file() {
        return Err(io::Error::other("it is not a regular file"));
    }
    if meta.uid() != user {
        return Err(io::Error::other(format!("it belongs to user {}, not to user {user}", meta.uid())));
    }
    if meta.nlink() > 1 {
        return Err(io::Error::other("it has a second name (hard link)"));
    }
    Ok(file)
}

/// Opens the directory `dir`, for example to lock it. `dir` may be a symbolic link to a directory.
///
/// # Errors
/// If `dir` is missing, is not a directory, or can't be opened. A named pipe at `dir` gives the error at once.
pub fn open_directory(dir: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).custom_flags(O_DIRECTORY).open(dir)
}

/// Creates an empty file at `path` that only its owner can read and write. An existing file or symbolic link
/// at `path` is removed first. Returns the new file, open for writing.
///
/// # Errors
/// If the old file can't be removed, or the new file can't be created.
pub fn recreate_file(path: &Path) -> io::Result<File> {
    remove_file_if_exists(path)?;
    OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)
}

/// Removes the file or symbolic link at `path`. Does nothing if the file does not exist.
///
/// # Errors
/// If the file exists and can't be removed.
pub fn remove_file_if_exists(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::sync::Barrier;

    use super::*;

    fn set_mode(dir: &Path, mode: u32) {
        std::fs::set_permissions(dir, std::fs::Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn a_world_writable_directory_must_be_sticky() {
        let uid = Uid::effective().as_raw();
        let above = tempfile::tempdir().unwrap();
        let dir = above.path().join("state");
        make_state_directory(&dir, uid).unwrap();
        for directory in [above.path(), &dir] {
            set_mode(directory, 0o777);
            let refusal = make_state_directory(&dir, uid).unwrap_err().to_string();
            assert!(refusal.contains(&format!("chmod o-w {}", directory.display())), "{refusal}");
            set_mode(directory, 0o1777);
            make_state_directory(&dir, uid).unwrap();
            set_mode(directory, 0o700);
        }
    }

    #[test]
    fn a_failed_start_removes_the_empty_directories_that_it_made() {
        let above = tempfile::tempdir().unwrap();
        let (default_dir, dir) = (above.path().join("default"), above.path().join("new/state"));
        let make = || NewDirectories::make(Some(&default_dir), &dir, Uid::effective().as_raw()).unwrap();
        drop(make());
        assert!(!default_dir.exists() && !above.path().join("new").exists());
        make().keep();
        drop(make());
        assert!(dir.exists(), "it was there before");
        std::fs::remove_dir(&dir).unwrap();
        let new_directories = make();
        std::fs::write(dir.join("file"), "").unwrap();
        drop(new_directories);
        assert!(dir.join("file").exists());
    }

    #[test]
    fn of_two_starts_at_once_only_the_one_that_made_a_directory_removes_it() {
        let above = tempfile::tempdir().unwrap();
        let (barrier, uid) = (Barrier::new(2), Uid::effective().as_raw());
        let start = |dir: &Path| {
            barrier.wait();
            NewDirectories::make(None, dir, uid).unwrap()
        };
        for round in 0..500 {
            let new = above.path().join(round.to_string());
            let dir = new.join("state");
            let starts = std::thread::scope(|scope| {
                let other = scope.spawn(|| start(&dir));
                [start(&dir), other.join().unwrap()]
            });
            let mut made: Vec<&PathBuf> = starts.iter().flat_map(|start| &start.paths).collect();
            made.sort();
            assert_eq!(made, [&new, &dir], "each directory is of one start");
            drop(starts);
            assert!(!dir.exists(), "both starts failed");
        }
    }

    #[test]
    fn only_regular_files_of_the_own_user_are_opened() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        std::fs::write(path("file"), "mine").unwrap();
        symlink(path("file"), path("link")).unwrap();
        nix::unistd::mkfifo(&path("pipe"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        let why =
            |name: &str| open_own_file(&path(name), OpenOptions::new().read(true)).unwrap_err().to_string();
        assert_eq!(why("link"), "it is a symbolic link");
        assert_eq!(why("pipe"), "it is not a regular file");
        assert!(open_own_file(&path("file"), OpenOptions::new().read(true)).is_ok());
        std::fs::hard_link(path("file"), path("other name")).unwrap();
        assert!(why("file").contains("second name"));
        assert!(why("none").contains("No such file"));
    }

    #[test]
    fn a_second_daemon_has_the_same_cgroups_before_and_after_its_directory_is_deleted() {
        let above = tempfile::tempdir().unwrap();
        std::fs::create_dir(above.path().join("real")).unwrap();
        let (link, state) = (above.path().join("link"), above.path().join("real/deep/state"));
        symlink(above.path().join("real"), &link).unwrap();
        // A relative path from the working directory of the test.
        let working = std::env::current_dir().unwrap().canonicalize().unwrap();
        let up: PathBuf = working.ancestors().skip(1).map(|_| "..").collect();
        let relative =
            up.join(state.canonicalize().unwrap_or_else(|_| state.clone()).strip_prefix("/").unwrap());
        let paths = [state.clone(), link.join("deep/state"), relative];
        std::fs::create_dir_all(&state).unwrap();
        let names = own_cgroup_names(&state, true);
        for is_deleted in [false, true] {
            if is_deleted {
                std::fs::remove_dir_all(above.path().join("real/deep")).unwrap();
            }
            for path in &paths {
                assert_eq!(own_cgroup_names(path, true), names, "{}", path.display());
            }
        }
    }

    #[test]
    fn a_new_file_replaces_a_link_and_keeps_its_target() {
        let dir = tempfile::tempdir().unwrap();
        let (target, link) = (dir.path().join("target"), dir.path().join("link"));
        std::fs::write(&target, "precious").unwrap();
        symlink(&target, &link).unwrap();
        drop(recreate_file(&link).unwrap());
        assert!(std::fs::symlink_metadata(&link).unwrap().is_file());
        assert_eq!(std::fs::read_to_string(&target).unwrap(), "precious");
    }
}
