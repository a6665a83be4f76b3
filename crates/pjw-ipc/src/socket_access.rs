//! The users who may connect to a Unix socket: the mode, the owner and the group of the socket file decide.

use std::fs::{Metadata, OpenOptions, Permissions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::Path;

use nix::fcntl::{AtFlags, OFlag};
use nix::sys::socket::{AddressFamily, Backlog, SockFlag, SockType, UnixAddr, bind, listen, socket};
use nix::unistd::{Gid, Uid, fchownat};

/// The users who may connect to a Unix socket, as the mode, the owner and the group of the socket file. The kernel
/// allows a connection to a user with write permission for the file (unix(7)).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SocketAccess {
    /// The permission bits of the file.
    mode: u32,
    /// The user id and the group id of the file. `None` if the file has those that the kernel gives to a new file.
    owner: Option<(u32, u32)>,
}

impl SocketAccess {
    /// Every user may connect to the Unix socket: the socket file has the mode 0666.
    pub const EVERY_USER: Self = Self { mode: 0o666, owner: None };
    /// Only root and the user of this process may connect to the Unix socket: the socket file has the mode 0600.
    pub const OWN_USER: Self = Self { mode: 0o600, owner: None };

    /// Returns the mode, the owner and the group of an existing socket file, so that another socket file can get the
    /// same. `file` is the metadata of the existing file.
    #[must_use]
    pub fn of_file(file: &Metadata) -> Self {
        Self { mode: file.mode() & 0o777, owner: Some((file.uid(), file.gid())) }
    }

    /// Creates a socket file at `path` with this mode, owner and group, and listens on the socket. Listening begins
    /// only when the file has its mode, owner and group, so no other user can connect before.
    ///
    /// # Errors
    /// If a file exists at `path`. If this process may not create the file, or may not give it this mode, owner and
    /// group: the function then leaves no file behind.
    pub(crate) fn listen_at(&self, path: &Path) -> io::Result<UnixListener> {
        let fd = socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
        bind(fd.as_raw_fd(), &UnixAddr::new(path)?)?;
        let listening =
            self.apply_to(path).and_then(|()| listen(&fd, Backlog::MAXCONN).map_err(io::Error::from));
        if let Err(error) = listening {
            let _ = std::fs::remove_file(path);
            return Err(error);
        }
        Ok(UnixListener::from(fd))
    }

    /// Gives the socket file at `path` this mode, owner and group. Fails if another program has put another file in its
    /// place, such as a link to a file of another user.
    fn apply_to(&self, path: &Path) -> io::Result<()> {
        let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW;
        let opened = OpenOptions::new().read(true).custom_flags(flags.bits()).open(path)?;
        let file = opened.metadata()?;
        if !file.file_type().is_socket() {
            return Err(io::Error::other("another program has replaced the new socket"));
        }
        let change_owner = |user: Option<Uid>, group: Option<Gid>| {
            fchownat(&opened, "", user, group, AtFlags::AT_EMPTY_PATH)
        };
        let (user, group) = self.owner.unwrap_or((file.uid(), file.gid()));
        if group != file.gid() {
            change_owner(None, Some(Gid::from_raw(group)))?;
        }
        // The path could lead to another file by now.
        let opened_path = format!("/proc/self/fd/{}", opened.as_raw_fd());
        std::fs::set_permissions(opened_path, Permissions::from_mode(self.mode))?;
        // The owner changes last: only the owner may set the mode, and pjwd has no CAP_FOWNER under systemd.
        if user != file.uid() {
            change_owner(Some(Uid::from_raw(user)), None)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{lchown, symlink};

    use nix::unistd::geteuid;

    use super::*;

    fn access_of(path: &Path) -> SocketAccess {
        SocketAccess::of_file(&std::fs::symlink_metadata(path).unwrap())
    }

    #[test]
    fn a_new_socket_has_the_mode_the_owner_and_the_group_of_an_earlier_file() {
        let dir = tempfile::tempdir().unwrap();
        let (earlier, path) = (dir.path().join("earlier"), dir.path().join("pjwd.sock"));
        std::fs::write(&earlier, "").unwrap();
        std::fs::set_permissions(&earlier, Permissions::from_mode(0o620)).unwrap();
        if geteuid().is_root() {
            // A user namespace may have no other users. Then the owner stays.
            let _ = lchown(&earlier, Some(1), Some(2));
        }
        let access = access_of(&earlier);
        let _listener = access.listen_at(&path).unwrap();
        assert_eq!(access_of(&path), access);
        assert_eq!(access.mode, 0o620);
    }

    #[test]
    fn a_link_in_place_of_the_new_socket_is_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let (target, link) = (dir.path().join("target"), dir.path().join("pjwd.sock"));
        std::fs::write(&target, "precious").unwrap();
        std::fs::set_permissions(&target, Permissions::from_mode(0o600)).unwrap();
        symlink(&target, &link).unwrap();
        assert!(SocketAccess::EVERY_USER.apply_to(&link).is_err());
        assert_eq!(access_of(&target).mode, 0o600);
    }

    #[test]
    fn a_socket_that_can_not_get_its_owner_is_not_left() {
        if geteuid().is_root() {
            eprintln!("skipped: root may give a file to each user");
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pjwd.sock");
        let of_root = SocketAccess { mode: 0o600, owner: Some((0, 0)) };
        assert!(of_root.listen_at(&path).is_err());
        assert!(!path.exists());
    }
}
