//! What slurm.conf(5) and cgroup.conf(5) say of what Slurm itself does with cores.
//!
//! Both are lines of `Key=Value`, with `#` comments; keys know no case. A file that isn't readable is an empty text, and
//! what is not said is Slurm's default.

/// What the two files say.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SlurmConf {
    /// Slurm gives each job a cpuset of its own: `ConstrainCores=yes`, and `task/cgroup` is there to do it.
    pub constrains_cores: bool,
    /// Jobs' cgroups go by the SLUID where there is one (26.05 and later, cgroup v2 only), not by the number.
    pub sluid_directories: bool,
}

/// Reads the two files' texts. `unified` is whether the node has cgroup v2 alone.
#[must_use]
pub fn read(slurm_conf: &str, cgroup_conf: &str, unified: bool) -> SlurmConf {
    let yes = |value: &str| value.eq_ignore_ascii_case("yes");
    let constrain = last(cgroup_conf, "ConstrainCores").is_some_and(yes);
    // The line may stand in a file that slurm.conf includes: then cgroup.conf alone tells what is meant.
    let whole = !slurm_conf.is_empty() && last_word(slurm_conf, "Include").is_none();
    let plugins = last(slurm_conf, "TaskPlugin");
    let by_cgroup = plugins.map_or(!whole, |plugins| lists(plugins, "task", "cgroup"));
    let v1 = last(cgroup_conf, "CgroupPlugin").is_some_and(|plugin| lists(plugin, "cgroup", "v1"));
    let tracked = last(slurm_conf, "ProctrackType").is_none_or(|plugin| lists(plugin, "proctrack", "cgroup"));
    let numbers = last(cgroup_conf, "CgroupJobIdPaths").is_some_and(yes);
    SlurmConf {
        constrains_cores: constrain && by_cgroup,
        sluid_directories: unified && !v1 && tracked && !numbers,
    }
}

/// Whether a list of plugins has one, with its kind in front or without.
fn lists(plugins: &str, kind: &str, name: &str) -> bool {
    plugins.split(',').map(str::trim).any(|plugin| {
        let plugin = plugin.strip_prefix(kind).and_then(|rest| rest.strip_prefix('/')).unwrap_or(plugin);
        plugin.eq_ignore_ascii_case(name)
    })
}

fn lines(text: &str) -> impl Iterator<Item = &str> {
    text.lines().map(|line| line.split('#').next().unwrap_or_default().trim())
}

/// The value of a key on a line of its own; the last one counts.
fn last<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    let value = |line: &'a str| {
        let (name, value) = line.split_once('=')?;
        name.trim().eq_ignore_ascii_case(key).then(|| value.trim().trim_matches('"'))
    };
    lines(text).filter_map(value).last()
}

/// The same for a key that a blank parts from its value.
fn last_word<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    let value = |line: &'a str| {
        let (name, value) = line.split_once(char::is_whitespace)?;
        name.eq_ignore_ascii_case(key).then(|| value.trim())
    };
    lines(text).filter_map(value).last()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn constrains(slurm: &str, cgroup: &str) -> bool {
        read(slurm, cgroup, true).constrains_cores
    }

    #[test]
    fn slurm_binds_only_where_it_is_told_to_and_has_the_means() {
        assert!(constrains("TaskPlugin=task/cgroup,task/affinity\n", "ConstrainCores=yes\n"));
        assert!(constrains("taskplugin = affinity, cgroup # both\n", "  constraincores = YES\n"));
        assert!(!constrains("TaskPlugin=task/none\n", "ConstrainCores=yes\n"));
        assert!(!constrains("TaskPlugin=task/affinity\n", "ConstrainCores=yes\n"));
        assert!(!constrains("ClusterName=a\n", "ConstrainCores=yes\n"), "by default there is no task plugin");
        assert!(!constrains("TaskPlugin=task/cgroup\n", "ConstrainCores=no\n"));
        assert!(!constrains("TaskPlugin=task/cgroup\n", "#ConstrainCores=yes\n"));
        assert!(!constrains("TaskPlugin=task/cgroup\n", ""));
    }

    #[test]
    fn what_stands_in_a_file_that_can_not_be_seen_is_believed_to_fit_the_other() {
        assert!(constrains("", "ConstrainCores=yes\n"));
        assert!(constrains("Include /etc/slurm/site.conf\n", "ConstrainCores=yes\n"));
        assert!(!constrains("Include a\nTaskPlugin=task/affinity\n", "ConstrainCores=yes\n"));
    }

    #[test]
    fn the_last_line_counts() {
        assert!(!constrains("TaskPlugin=task/cgroup\n", "ConstrainCores=yes\nConstrainCores=no\n"));
    }

    #[test]
    fn directories_are_named_by_sluid_unless_something_says_otherwise() {
        let sluids = |slurm, cgroup, unified| read(slurm, cgroup, unified).sluid_directories;
        assert!(sluids("", "", true));
        assert!(sluids("ProctrackType=proctrack/cgroup\n", "CgroupPlugin=cgroup/v2\n", true));
        assert!(!sluids("", "", false));
        assert!(!sluids("", "CgroupJobIdPaths=yes\n", true));
        assert!(!sluids("", "CgroupPlugin=cgroup/v1\n", true));
        assert!(!sluids("ProctrackType=proctrack/linuxproc\n", "", true));
    }
}
