//! The settings in slurm.conf(5) and cgroup.conf(5) that decide whether Slurm binds jobs, and how the cgroups of jobs
//! are named.
//!
//! A missing key has Slurm's default. Except: if the file includes other files, which are not read, the key may be in
//! one of them.

use crate::config_text::find_value;

/// The settings in Slurm's files `slurm.conf` and `cgroup.conf` that pjw needs: whether Slurm binds jobs to cores, and
/// how the cgroups of jobs are named.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlurmConf {
    /// Whether `ConstrainCores` is set. `None` if an included file may set it.
    pub constrains_cores: Option<bool>,
    /// Whether `TaskPlugin` has the plugin `task/cgroup`. Without it, `ConstrainCores` has no effect. `None` if an
    /// included file may set `TaskPlugin`, or if `slurm.conf` is missing.
    pub has_task_cgroup: Option<bool>,
    /// Whether `TaskPlugin` has the plugin `task/affinity`, which binds tasks by a mask when they start. `None` as for
    /// `has_task_cgroup`.
    pub has_task_affinity: Option<bool>,
    /// Whether the cgroup directories of jobs in cgroup v2 are named by the SLUID (Slurm's unique id of a job) instead
    /// of the job number. This applies to Slurm 26.05 and later. Earlier versions always use the job number.
    pub has_sluid_directories: bool,
}

impl SlurmConf {
    /// Reads the settings from the texts of Slurm's files `slurm.conf` and `cgroup.conf`. `slurm_conf` is `None` if
    /// this file is missing. Its plugins are then unknown. `cgroup_conf` is empty if that file is missing. Slurm's
    /// defaults then apply.
    ///
    /// Files that these texts include (`Include`) are not read. So a field of the result is `None` if its setting is
    /// missing in a text that includes other files. `has_sluid_directories` can't be `None`: Slurm's default applies if
    /// a setting is missing.
    #[must_use]
    pub fn parse(slurm_conf: Option<&str>, cgroup_conf: &str) -> Self {
        let has_task_plugin =
            |name: &str| is_set_to(slurm_conf?, "TaskPlugin", |plugins| has_plugin(plugins, name));
        let uses_cgroup_v1 =
            find_value(cgroup_conf, "CgroupPlugin").is_some_and(|plugin| has_plugin(plugin, "v1"));
        let tracks_by_cgroup = find_value(slurm_conf.unwrap_or_default(), "ProctrackType")
            .is_none_or(|plugin| has_plugin(plugin, "cgroup"));
        let uses_job_numbers = find_value(cgroup_conf, "CgroupJobIdPaths").is_some_and(is_true);
        Self {
            constrains_cores: is_set_to(cgroup_conf, "ConstrainCores", is_true),
            has_task_cgroup: has_task_plugin("cgroup"),
            has_task_affinity: has_task_plugin("affinity"),
            has_sluid_directories: !uses_cgroup_v1 && tracks_by_cgroup && !uses_job_numbers,
        }
    }

    /// Returns whether Slurm gives each job a cpuset of its own. This requires `ConstrainCores=yes` and the plugin
    /// `task/cgroup`. `None` if this can't be determined: one of the two settings is possibly in an included file, or
    /// `slurm.conf` is missing.
    #[must_use]
    pub fn gives_cpusets(&self) -> Option<bool> {
        match (self.constrains_cores, self.has_task_cgroup) {
            (Some(false), _) | (_, Some(false)) => Some(false),
            (Some(true), Some(true)) => Some(true),
            _ => None,
        }
    }
}

/// Returns whether `text` sets `key` to a value for which `condition` holds. `None` if `text` does not set the key and
/// includes other files.
fn is_set_to(text: &str, key: &str, condition: impl Fn(&str) -> bool) -> Option<bool> {
    let has_includes = find_value(text, "Include").is_some();
    find_value(text, key).map_or((!has_includes).then_some(false), |value| Some(condition(value)))
}

/// Returns whether Slurm reads `value` as true (`s_p_handle_boolean` in Slurm's source).
fn is_true(value: &str) -> bool {
    ["yes", "up", "true", "1"].iter().any(|text| value.eq_ignore_ascii_case(text))
}

/// Returns whether the list `plugins` contains the plugin `name`. In the list, the kind of a plugin can precede its
/// name, such as `task/`.
fn has_plugin(plugins: &str, name: &str) -> bool {
    plugins.split([',', '/']).any(|word| word.trim().eq_ignore_ascii_case(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gives_cpusets(slurm: &str, cgroup: &str) -> Option<bool> {
        SlurmConf::parse(Some(slurm), cgroup).gives_cpusets()
    }

    #[test]
    fn slurm_gives_cpusets_only_if_configured_and_the_plugin_is_enabled() {
        for (slurm, cgroup, expected) in [
            ("TaskPlugin=task/cgroup,task/affinity\n", "ConstrainCores=yes\n", true),
            ("taskplugin = affinity, cgroup # both\n", "  constraincores = YES\n", true),
            ("TaskPlugin=\"task/cgroup\"\n", "ConstrainCores=\"yes\"\n", true),
            ("TaskPlugin=task/none\n", "ConstrainCores=yes\n", false),
            ("TaskPlugin=task/affinity\n", "ConstrainCores=yes\n", false),
            // By default there is no task plugin.
            ("ClusterName=a\n", "ConstrainCores=yes\n", false),
            ("TaskPlugin=task/cgroup\n", "ConstrainCores=no\n", false),
            ("TaskPlugin=task/cgroup\n", "#ConstrainCores=yes\n", false),
            ("TaskPlugin=task/cgroup\n", "", false),
        ] {
            assert_eq!(gives_cpusets(slurm, cgroup), Some(expected), "{slurm:?} {cgroup:?}");
        }
    }

    #[test]
    fn a_setting_is_true_for_the_words_that_slurm_takes() {
        let is_true =
            |word: &str| gives_cpusets("TaskPlugin=task/cgroup\n", &format!("ConstrainCores={word}\n"));
        for word in ["yes", "True", "UP", "1"] {
            assert_eq!(is_true(word), Some(true), "{word}");
        }
        for word in ["no", "false", "down", "0", "on", "y", "2"] {
            assert_eq!(is_true(word), Some(false), "{word}");
        }
    }

    #[test]
    fn a_setting_that_an_unread_file_may_have_is_unknown() {
        let include = "Include /etc/slurm/site.conf\n";
        assert_eq!(gives_cpusets(include, "ConstrainCores=yes\n"), None);
        assert_eq!(SlurmConf::parse(None, "ConstrainCores=yes\n").gives_cpusets(), None);
        assert_eq!(gives_cpusets("TaskPlugin=task/cgroup\n", include), None);
        // What the files say themselves decides.
        assert_eq!(
            gives_cpusets("Include a\nTaskPlugin=task/affinity\n", "ConstrainCores=yes\n"),
            Some(false)
        );
        assert_eq!(gives_cpusets(include, "ConstrainCores=no\n"), Some(false));
        assert_eq!(SlurmConf::parse(None, "").gives_cpusets(), Some(false));
    }

    #[test]
    fn the_last_line_counts() {
        let cgroup = "ConstrainCores=yes\nConstrainCores=no\n";
        assert_eq!(gives_cpusets("TaskPlugin=task/cgroup\n", cgroup), Some(false));
    }

    #[test]
    fn directories_are_named_by_sluid_unless_configured_otherwise() {
        let has_sluids = |slurm, cgroup| SlurmConf::parse(Some(slurm), cgroup).has_sluid_directories;
        assert!(has_sluids("", ""));
        assert!(SlurmConf::parse(None, "").has_sluid_directories);
        assert!(has_sluids("ProctrackType=proctrack/cgroup\n", "CgroupPlugin=cgroup/v2\n"));
        assert!(!has_sluids("", "CgroupJobIdPaths=yes\n"));
        assert!(!has_sluids("", "CgroupJobIdPaths=true\n"));
        assert!(!has_sluids("", "CgroupPlugin=cgroup/v1\n"));
        assert!(!has_sluids("ProctrackType=proctrack/linuxproc\n", ""));
    }
}
