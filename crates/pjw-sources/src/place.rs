//! The lines of `/proc/PID/cgroup`: which to read first, and how far a path can be believed.
//!
//! Only the tail of a path has a known shape; in front of it may stand anything (a container's directory,
//! init's own). Below the directory of a user's service manager, `user@<uid>.service`, systemd lets that
//! user make what directories he likes (systemd's CGROUP_DELEGATION.md), so a path is believed only that
//! far. Root's manager is believed whole, and so is that of Flux's own user, since Flux runs jobs in
//! services there.
//!
//! Not covered: a system service with `Delegate=` that runs as a plain user, and unprivileged containers
//! outside `user@<uid>.service`, can make up paths as well. On nodes where users may start such things, the
//! directory's owner has to be looked at too.

use pjw_core::process::Uid;

/// The paths in the order in which they are asked: the unified tree first, then cpuset, which says most
/// about cores, then whatever a batch system tracks its jobs by (Slurm: freezer; HTCondor: memory).
pub(crate) fn lines_by_trust(lines: &[(String, String)]) -> impl Iterator<Item = &str> {
    const ORDER: [&str; 7] = ["", "cpuset", "name=systemd", "freezer", "memory", "cpu", "cpuacct"];
    ORDER.into_iter().flat_map(move |wanted| {
        let has = move |controllers: &str| controllers.split(',').any(|controller| controller == wanted);
        lines.iter().filter(move |(controllers, _)| has(controllers)).map(|(_, path)| path.as_str())
    })
}

/// A cgroup path, cut into its directories as far as it can be believed.
pub(crate) struct CgroupPath<'a> {
    whole: &'a str,
    parts: Vec<&'a str>,
}

impl<'a> CgroupPath<'a> {
    /// `None` if the directory has been removed: then only a zombie is left in it.
    pub(crate) fn new(path: &'a str, flux_user: Option<Uid>) -> Option<Self> {
        if path.ends_with(" (deleted)") {
            return None;
        }
        let believed = |part: &&str| match manager_of(part) {
            Some(user) => user == Some(Uid::ROOT) || (flux_user.is_some() && user == flux_user),
            None => true,
        };
        let whole = path.strip_prefix('/')?;
        Some(Self { whole: path, parts: whole.split('/').take_while(believed).collect() })
    }

    pub(crate) fn parts(&self) -> &[&'a str] {
        &self.parts
    }

    /// The path down to its `depth`-th directory, that one included.
    pub(crate) fn down_to(&self, depth: usize) -> String {
        let length: usize = self.parts.iter().take(depth + 1).map(|part| part.len() + 1).sum();
        self.whole.get(..length).unwrap_or(self.whole).to_owned()
    }
}

/// Whose service manager the directory belongs to: `None` if it is no manager's, `Some(None)` if its user
/// can't be read.
pub(crate) fn manager_of(part: &str) -> Option<Option<Uid>> {
    let user = part.strip_prefix("user@")?.strip_suffix(".service")?;
    Some(user.parse().ok().map(Uid))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(path: &str) -> Vec<&str> {
        CgroupPath::new(path, Some(Uid(64))).map_or(Vec::new(), |path| path.parts)
    }

    #[test]
    fn a_path_is_believed_as_far_as_the_manager_of_a_plain_user() {
        assert_eq!(parts("/user.slice/user-7.slice/user@7.service/a"), ["user.slice", "user-7.slice"]);
        assert_eq!(parts("/user@x.service/a"), [""; 0]);
        assert_eq!(parts("/user@64.service/a"), ["user@64.service", "a"]);
        assert_eq!(parts("/user@0.service/a"), ["user@0.service", "a"]);
        assert_eq!(parts("/a/b (deleted)"), [""; 0]);
    }

    #[test]
    fn the_unified_tree_is_asked_first_then_cpuset() {
        let lines =
            [("cpuacct,cpu", "/e"), ("memory", "/d"), ("cpuset", "/b"), ("name=systemd", "/c"), ("", "/a")];
        let lines = lines.map(|(controllers, path)| (controllers.to_owned(), path.to_owned()));
        let order: Vec<&str> = lines_by_trust(&lines).collect();
        assert_eq!(order, ["/a", "/b", "/c", "/d", "/e", "/e"]);
    }
}
