//! The cgroups of one process.

use crate::basics::prelude::*;

/// The cgroups of one process in all hierarchies, as `/proc/PID/cgroup` lists them (cgroups(7)).
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ProcessCgroups {
    /// The lines of `/proc/PID/cgroup`, each as a pair: the list of controllers as text, separated by commas, and the
    /// path of the cgroup. The list of controllers is empty for the v2 hierarchy. A v1 hierarchy with a name has an
    /// entry such as `name=systemd` in its list.
    pub lines: Vec<(String, String)>,
}

impl ProcessCgroups {
    /// Returns the path of the cgroup in the v1 hierarchy with the controller `controller`, such as `cpu`, or with the
    /// name `controller`, such as `name=systemd`. `None` if there is no such hierarchy.
    #[must_use]
    pub fn v1_path(&self, controller: &str) -> Option<&str> {
        let is_listed = |controllers: &str| controllers.split(',').any(|listed| listed == controller);
        self.path_by(|controllers| !controllers.is_empty() && is_listed(controllers))
    }

    /// Returns the path of the cgroup in the v2 hierarchy. `None` if there is no v2 hierarchy.
    #[must_use]
    pub fn v2_path(&self) -> Option<&str> {
        self.path_by(str::is_empty)
    }

    /// Returns the path of the cgroup in the hierarchy that has the cpuset controller. This is a cgroup v1 hierarchy if
    /// a v1 hierarchy has the cpuset controller, otherwise the cgroup v2 hierarchy. `None` if the process has no cgroup
    /// in this hierarchy.
    #[must_use]
    pub fn cpuset_path(&self) -> Option<&str> {
        self.v1_path("cpuset").or_else(|| self.v2_path())
    }

    fn path_by(&self, is_wanted: impl Fn(&str) -> bool) -> Option<&str> {
        self.lines.iter().find(|(controllers, _)| is_wanted(controllers)).map(|(_, path)| path.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cgroups_of_lines(lines: &[(&str, &str)]) -> ProcessCgroups {
        let line = |(controllers, path): &(&str, &str)| ((*controllers).to_owned(), (*path).to_owned());
        ProcessCgroups { lines: lines.iter().map(line).collect() }
    }

    #[test]
    fn a_path_is_found_by_a_whole_name_of_a_controller_or_of_a_hierarchy() {
        let cgroups =
            cgroups_of_lines(&[("cpuacct,cpu", "/a"), ("cpuset", "/b"), ("name=systemd", "/c"), ("", "/d")]);
        let paths = ["cpu", "cpuacct", "cpuset", "name=systemd", "freezer", "cpua", ""];
        let paths = paths.map(|controller| cgroups.v1_path(controller));
        assert_eq!(paths, [Some("/a"), Some("/a"), Some("/b"), Some("/c"), None, None, None]);
        assert_eq!(cgroups.v2_path(), Some("/d"));
        assert_eq!(ProcessCgroups::default().v2_path(), None);
    }

    #[test]
    fn the_cpuset_is_in_the_v2_hierarchy_unless_a_v1_hierarchy_has_the_controller() {
        assert_eq!(cgroups_of_lines(&[("", "/a"), ("memory,cpuset", "/b")]).cpuset_path(), Some("/b"));
        assert_eq!(cgroups_of_lines(&[("memory", "/b"), ("", "/a")]).cpuset_path(), Some("/a"));
        assert_eq!(cgroups_of_lines(&[("memory", "/b")]).cpuset_path(), None);
    }
}
