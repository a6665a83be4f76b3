//! The cgroup paths in `/proc/PID/cgroup`: the order in which they are searched for a job, and the trusted part of each
//! path.
//!
//! Only the end of a path has a known form. Other directories can precede it, such as that of a container. Below the
//! directory of a user's service manager, `user@<uid>.service`, systemd lets that user create any directories
//! (systemd's CGROUP_DELEGATION.md). So a path is trusted only down to that directory. The whole path is trusted
//! below the manager of root, and below the manager of Flux's own user, because Flux runs jobs in services there.
//!
//! Not covered: a system service with `Delegate=` that runs as a plain user, and unprivileged containers outside of
//! `user@<uid>.service`, can also choose names. On nodes where users may start such things, the owner of the
//! directory would have to be checked too.

use pjw_core::{ids::Uid, process_cgroups::ProcessCgroups};

use crate::number::parse_digits;

/// Returns the cgroup paths of a process in the order in which pjw searches them for a job. The path in the v2
/// hierarchy comes first, then the path in the v1 hierarchy of the cpuset controller, then the paths in the other v1
/// hierarchies that batch systems use.
pub(crate) fn paths_by_priority(cgroups: &ProcessCgroups) -> impl Iterator<Item = &str> {
    const ORDER: [&str; 7] = ["", "cpuset", "name=systemd", "freezer", "memory", "cpu", "cpuacct"];
    ORDER.into_iter().flat_map(move |wanted| {
        let lines = cgroups.lines.iter();
        let lines = lines.filter(move |(controllers, _)| controllers.split(',').any(|name| name == wanted));
        lines.map(|(_, path)| path.as_str())
    })
}

/// A cgroup path with the list of its trusted directories. The directory of a user's service manager
/// (`user@UID.service`) and all directories below it are not trusted, because the user can create directories there.
pub(crate) struct CgroupPath<'a> {
    path: &'a str,
    trusted_directories: Vec<&'a str>,
}

impl<'a> CgroupPath<'a> {
    /// Splits `path` into its directories. The directories of the service managers of root and of `flux_user`
    /// (the user of the batch system Flux) are trusted too. Returns `None` if `path` ends in ` (deleted)`,
    /// because the cgroup was removed, or if `path` does not begin with `/`.
    pub(crate) fn new(path: &'a str, flux_user: Option<Uid>) -> Option<Self> {
        if path.ends_with(" (deleted)") {
            return None;
        }
        let is_trusted = |directory: &&str| match service_manager_user(directory) {
            Some(user) => user == Some(Uid::ROOT) || (flux_user.is_some() && user == flux_user),
            None => true,
        };
        let directories = path.strip_prefix('/')?.split('/');
        Some(Self { path, trusted_directories: directories.take_while(is_trusted).collect() })
    }

    /// Returns the names of the trusted directories of the path ([`CgroupPath`]), outermost first.
    pub(crate) fn trusted_directories(&self) -> &[&'a str] {
        &self.trusted_directories
    }

    /// Returns the path of the trusted directory with the index `depth`. The outermost directory has the index 0.
    pub(crate) fn path_to_directory(&self, depth: usize) -> String {
        let directories = self.trusted_directories.iter().take(depth + 1);
        let length: usize = directories.map(|directory| directory.len() + 1).sum();
        self.path.get(..length).unwrap_or(self.path).to_owned()
    }
}

/// Returns the user id in `directory`, the name of a cgroup directory, if this is the directory of a user's service
/// manager (`user@UID.service`). `None` for any other name. `Some(None)` if the user id can't be parsed.
pub(crate) fn service_manager_user(directory: &str) -> Option<Option<Uid>> {
    let user = directory.strip_prefix("user@")?.strip_suffix(".service")?;
    Some(parse_digits(user).map(Uid))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trusted(path: &str) -> Vec<&str> {
        CgroupPath::new(path, Some(Uid(64))).map_or(Vec::new(), |path| path.trusted_directories)
    }

    #[test]
    fn a_path_is_trusted_down_to_the_manager_of_a_plain_user() {
        assert_eq!(trusted("/user.slice/user-7.slice/user@7.service/a"), ["user.slice", "user-7.slice"]);
        assert_eq!(trusted("/user@x.service/a"), [""; 0]);
        assert_eq!(trusted("/user@+0.service/a"), [""; 0]);
        assert_eq!(trusted("/user@64.service/a"), ["user@64.service", "a"]);
        assert_eq!(trusted("/user@0.service/a"), ["user@0.service", "a"]);
        assert_eq!(trusted("/a/b (deleted)"), [""; 0]);
    }

    #[test]
    fn the_unified_hierarchy_comes_first_then_cpuset() {
        let lines =
            [("cpuacct,cpu", "/e"), ("memory", "/d"), ("cpuset", "/b"), ("name=systemd", "/c"), ("", "/a")];
        let lines = lines.map(|(controllers, path)| (controllers.to_owned(), path.to_owned()));
        let cgroups = ProcessCgroups { lines: lines.into() };
        let order: Vec<&str> = paths_by_priority(&cgroups).collect();
        assert_eq!(order, ["/a", "/b", "/c", "/d", "/e", "/e"]);
    }
}
