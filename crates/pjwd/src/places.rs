//! The directories the daemon keeps its socket and its state in: made if need be, and used only if nobody else can
//! put something there that the daemon would then believe, or write through.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use anyhow::{Context, bail};
use nix::libc::{O_NOFOLLOW, O_NONBLOCK};
use nix::unistd::Uid;

const STICKY: u32 = 0o1000;
const EVERYBODY_WRITES: u32 = 0o002;

/// Makes the default directory. A plain user's may be below /tmp, where others could have made it first.
///
/// # Errors
/// If it can't be made, or is somebody else's doing.
pub fn own_directory(dir: &Path, uid: u32) -> anyhow::Result<()> {
    let mode = if uid == 0 { 0o755 } else { 0o700 };
    let made = DirBuilder::new().mode(mode).create(dir);
    if let Err(error) = made
        && error.kind() != io::ErrorKind::AlreadyExists
    {
        return Err(error).with_context(|| {
            format!("can't make {}: choose --socket and --state-dir somewhere writable", dir.display())
        });
    }
    let meta = std::fs::symlink_metadata(dir).with_context(|| format!("can't look at {}", dir.display()))?;
    if !meta.is_dir() || meta.uid() != uid {
        bail!(
            "{} is not a directory of user {uid}: remove it, or choose --socket and --state-dir",
            dir.display()
        );
    }
    is_safe(dir, uid)
}

/// Makes a directory for the state that somebody chose.
///
/// # Errors
/// If it can't be made, or others could exchange what is in it.
pub fn state_directory(dir: &Path, uid: u32) -> anyhow::Result<()> {
    let made = DirBuilder::new().recursive(true).create(dir);
    made.with_context(|| format!("can't make {}: choose another --state-dir", dir.display()))?;
    is_safe(dir, uid)
}

/// Whether a directory and all above it belong to this user or to root, and to nobody else's pen: where everybody
/// may write, as in /tmp, at least nobody may rename what isn't theirs.
fn is_safe(dir: &Path, uid: u32) -> anyhow::Result<()> {
    let look = |path: &Path| {
        std::fs::metadata(path)
            .with_context(|| format!("can't look at {}: choose another --state-dir", path.display()))
    };
    let real = dir
        .canonicalize()
        .with_context(|| format!("can't look at {}: choose another --state-dir", dir.display()))?;
    // In a user namespace root's directories show as another user's. Whoever owns / is trusted anyway.
    let trusted = [uid, 0, look(Path::new("/"))?.uid()];
    for path in real.ancestors() {
        let meta = look(path)?;
        if !trusted.contains(&meta.uid()) {
            bail!(
                "{} belongs to user {}, who could exchange the state of user {uid}'s daemon: choose a --state-dir \
                 of user {uid}'s",
                path.display(),
                meta.uid()
            );
        }
        if meta.mode() & EVERYBODY_WRITES != 0 && meta.mode() & STICKY == 0 {
            bail!(
                "{path} can be written by everybody, who could exchange the daemon's state: chmod o-w {path}, or \
                 choose another --state-dir",
                path = path.display()
            );
        }
    }
    Ok(())
}

/// Opens a file of the daemon's own. A link, a pipe or another user's file is not opened: in a directory like /tmp
/// anybody can put one where the daemon will look.
///
/// # Errors
/// If it can't be opened, or isn't the daemon's own.
pub fn open_own(path: &Path, options: &mut OpenOptions) -> io::Result<File> {
    // A pipe without a writer must not hold up the start.
    let opened = options.custom_flags(O_NOFOLLOW | O_NONBLOCK).open(path);
    let file = opened.map_err(|error| match error.raw_os_error() {
        Some(nix::libc::ELOOP) => io::Error::other("it is a symbolic link"),
        _ => error,
    })?;
    let meta = file.metadata()?;
    let user = Uid::effective().as_raw();
    if !meta.is_file() {
        return Err(io::Error::other("it is not a file"));
    }
    if meta.uid() != user {
        return Err(io::Error::other(format!("it belongs to user {}, not to user {user}", meta.uid())));
    }
    if meta.nlink() > 1 {
        return Err(io::Error::other("it has a second name elsewhere (hard link)"));
    }
    Ok(file)
}

/// Makes a file anew, whatever stood in its place.
///
/// # Errors
/// If that can't be removed, or the file can't be made.
pub fn fresh(path: &Path) -> io::Result<File> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    fn with_mode(dir: &Path, mode: u32) {
        std::fs::set_permissions(dir, std::fs::Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn where_everybody_writes_only_a_sticky_directory_will_do() {
        let uid = Uid::effective().as_raw();
        let above = tempfile::tempdir().unwrap();
        let dir = above.path().join("state");
        state_directory(&dir, uid).unwrap();
        for open in [above.path(), &dir] {
            with_mode(open, 0o777);
            let refusal = state_directory(&dir, uid).unwrap_err().to_string();
            assert!(refusal.contains(&format!("chmod o-w {}", open.display())), "{refusal}");
            with_mode(open, 0o1777);
            state_directory(&dir, uid).unwrap();
            with_mode(open, 0o700);
        }
    }

    #[test]
    fn what_is_not_a_file_of_our_own_is_not_opened() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        std::fs::write(path("file"), "mine").unwrap();
        symlink(path("file"), path("link")).unwrap();
        nix::unistd::mkfifo(&path("pipe"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        let why = |name: &str| open_own(&path(name), OpenOptions::new().read(true)).unwrap_err().to_string();
        assert_eq!(why("link"), "it is a symbolic link");
        assert_eq!(why("pipe"), "it is not a file");
        assert!(open_own(&path("file"), OpenOptions::new().read(true)).is_ok());
        std::fs::hard_link(path("file"), path("other name")).unwrap();
        assert!(why("file").contains("second name"));
        assert!(why("none").contains("No such file"));
    }

    #[test]
    fn a_fresh_file_replaces_a_link_and_leaves_its_target() {
        let dir = tempfile::tempdir().unwrap();
        let (target, link) = (dir.path().join("target"), dir.path().join("link"));
        std::fs::write(&target, "precious").unwrap();
        symlink(&target, &link).unwrap();
        drop(fresh(&link).unwrap());
        assert!(std::fs::symlink_metadata(&link).unwrap().is_file());
        assert_eq!(std::fs::read_to_string(&target).unwrap(), "precious");
    }
}
