//! The settings of slurm.conf(5) and cgroup.conf(5) for cores.
//!
//! Both files have lines of `Key=Value`, with `#` comments. Keys are not case-sensitive. A file that is not readable
//! is an empty text. A missing key has Slurm's default.

/// The settings in Slurm's files `slurm.conf` and `cgroup.conf` that pjwd needs: whether jobs get cpusets, and
/// how the cgroups of jobs are named.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SlurmConf {
    /// Whether Slurm gives each job a cpuset of its own. This requires `ConstrainCores=yes` and the plugin
    /// `task/cgroup`.
    pub constrains_cores: bool,
    /// Whether the cgroup directories of jobs are named by the SLUID (Slurm's unique id of a job) instead of
    /// the job number. This applies to Slurm 26.05 and later. Earlier versions always use the job number.
    pub has_sluid_directories: bool,
}

/// Parses Slurm's files `slurm.conf` and `cgroup.conf`. `slurm_conf` and `cgroup_conf` are the texts of these
/// files. A text must be empty if its file is missing. `has_only_cgroup_v2` must be true if this machine has only
/// cgroup v2, and false if it has cgroup v1.
///
/// Settings that pjwd does not need are ignored. A missing setting has Slurm's default value, with one
/// exception: if `slurm.conf` is missing or includes other files, a missing `TaskPlugin` is assumed to be
/// `task/cgroup`.
#[must_use]
pub fn parse(slurm_conf: &str, cgroup_conf: &str, has_only_cgroup_v2: bool) -> SlurmConf {
    let yes = |value: &str| value.eq_ignore_ascii_case("yes");
    let constrain = last(cgroup_conf, "ConstrainCores").is_some_and(yes);
    // The line may be in a file that slurm.conf includes. Then cgroup.conf alone decides.
    let whole = !slurm_conf.is_empty() && last_after(slurm_conf, "Include", char::is_whitespace).is_none();
    let plugins = last(slurm_conf, "TaskPlugin");
    let by_cgroup = plugins.map_or(!whole, |plugins| lists(plugins, "task", "cgroup"));
    let v1 = last(cgroup_conf, "CgroupPlugin").is_some_and(|plugin| lists(plugin, "cgroup", "v1"));
    let tracked = last(slurm_conf, "ProctrackType").is_none_or(|plugin| lists(plugin, "proctrack", "cgroup"));
    let numbers = last(cgroup_conf, "CgroupJobIdPaths").is_some_and(yes);
    SlurmConf {
        constrains_cores: constrain && by_cgroup,
        has_sluid_directories: has_only_cgroup_v2 && !v1 && tracked && !numbers,
    }
}

/// Whether a list of plugins contains one, with or without its kind as a prefix.
fn lists(plugins: &str, kind: &str, name: &str) -> bool {
    plugins.split(',').map(str::trim).any(|plugin| {
        let plugin = plugin.strip_prefix(kind).and_then(|rest| rest.strip_prefix('/')).unwrap_or(plugin);
        plugin.eq_ignore_ascii_case(name)
    })
}

fn lines(text: &str) -> impl Iterator<Item = &str> {
    text.lines().map(|line| line.split('#').next().unwrap_or_default().trim())
}

/// The value of a key in lines `KEY=VALUE`. The last line counts.
fn last<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    last_after(text, key, |c| c == '=').map(|value| value.trim_matches('"'))
}

/// The value of a key in lines of a key, a separator and a value. The last line counts.
fn last_after<'a>(text: &'a str, key: &str, separator: fn(char) -> bool) -> Option<&'a str> {
    let value = |line: &'a str| {
        let (name, value) = line.split_once(separator)?;
        name.trim().eq_ignore_ascii_case(key).then(|| value.trim())
    };
    lines(text).filter_map(value).last()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn constrains(slurm: &str, cgroup: &str) -> bool {
        parse(slurm, cgroup, true).constrains_cores
    }

    #[test]
    fn slurm_binds_only_if_configured_and_the_plugin_is_enabled() {
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
    fn a_setting_in_an_included_file_is_assumed_to_match_cgroup_conf() {
        assert!(constrains("", "ConstrainCores=yes\n"));
        assert!(constrains("Include /etc/slurm/site.conf\n", "ConstrainCores=yes\n"));
        assert!(!constrains("Include a\nTaskPlugin=task/affinity\n", "ConstrainCores=yes\n"));
    }

    #[test]
    fn the_last_line_counts() {
        assert!(!constrains("TaskPlugin=task/cgroup\n", "ConstrainCores=yes\nConstrainCores=no\n"));
    }

    #[test]
    fn directories_are_named_by_sluid_unless_configured_otherwise() {
        let sluids = |slurm, cgroup, unified| parse(slurm, cgroup, unified).has_sluid_directories;
        assert!(sluids("", "", true));
        assert!(sluids("ProctrackType=proctrack/cgroup\n", "CgroupPlugin=cgroup/v2\n", true));
        assert!(!sluids("", "", false));
        assert!(!sluids("", "CgroupJobIdPaths=yes\n", true));
        assert!(!sluids("", "CgroupPlugin=cgroup/v1\n", true));
        assert!(!sluids("ProctrackType=proctrack/linuxproc\n", "", true));
    }
}
