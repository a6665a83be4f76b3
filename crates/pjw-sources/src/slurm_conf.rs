//! The settings in slurm.conf(5) and cgroup.conf(5) that decide whether jobs get cpusets, and how the cgroups of jobs
//! are named.
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
    let is_yes = |value: &str| value.eq_ignore_ascii_case("yes");
    let constrains_cores = last_value(cgroup_conf, "ConstrainCores").is_some_and(is_yes);
    // TaskPlugin may be in a file that slurm.conf includes. Then cgroup.conf alone decides.
    let has_includes = last_value_after(slurm_conf, "Include", char::is_whitespace).is_some();
    let is_complete = !slurm_conf.is_empty() && !has_includes;
    let has_cgroup_tasks = last_value(slurm_conf, "TaskPlugin")
        .map_or(!is_complete, |plugins| has_plugin(plugins, "task", "cgroup"));
    let uses_cgroup_v1 =
        last_value(cgroup_conf, "CgroupPlugin").is_some_and(|plugin| has_plugin(plugin, "cgroup", "v1"));
    let tracks_by_cgroup = last_value(slurm_conf, "ProctrackType")
        .is_none_or(|plugin| has_plugin(plugin, "proctrack", "cgroup"));
    let uses_job_numbers = last_value(cgroup_conf, "CgroupJobIdPaths").is_some_and(is_yes);
    SlurmConf {
        constrains_cores: constrains_cores && has_cgroup_tasks,
        has_sluid_directories: has_only_cgroup_v2 && !uses_cgroup_v1 && tracks_by_cgroup && !uses_job_numbers,
    }
}

/// Returns whether the list `plugins` contains the plugin `name`, with or without its `kind` as a prefix.
fn has_plugin(plugins: &str, kind: &str, name: &str) -> bool {
    plugins.split(',').map(str::trim).any(|plugin| {
        let plugin = plugin.strip_prefix(kind).and_then(|suffix| suffix.strip_prefix('/')).unwrap_or(plugin);
        plugin.eq_ignore_ascii_case(name)
    })
}

/// Returns the lines of `text` without comments.
fn settings(text: &str) -> impl Iterator<Item = &str> {
    text.lines().map(|line| line.split('#').next().unwrap_or_default().trim())
}

/// Returns the value of `key` in the last line of the form `KEY=VALUE`.
fn last_value<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    last_value_after(text, key, |c| c == '=').map(|value| value.trim_matches('"'))
}

/// Returns the value of `key` in the last line that consists of the key, a separator and a value.
fn last_value_after<'a>(text: &'a str, key: &str, separator: fn(char) -> bool) -> Option<&'a str> {
    let value = |line: &'a str| {
        let (name, value) = line.split_once(separator)?;
        name.trim().eq_ignore_ascii_case(key).then(|| value.trim())
    };
    settings(text).filter_map(value).last()
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
        let has_sluids = |slurm, cgroup, is_v2| parse(slurm, cgroup, is_v2).has_sluid_directories;
        assert!(has_sluids("", "", true));
        assert!(has_sluids("ProctrackType=proctrack/cgroup\n", "CgroupPlugin=cgroup/v2\n", true));
        assert!(!has_sluids("", "", false));
        assert!(!has_sluids("", "CgroupJobIdPaths=yes\n", true));
        assert!(!has_sluids("", "CgroupPlugin=cgroup/v1\n", true));
        assert!(!has_sluids("ProctrackType=proctrack/linuxproc\n", "", true));
    }
}
