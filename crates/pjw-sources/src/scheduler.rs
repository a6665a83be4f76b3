//! The schedulers on a node, and what their configuration says about the binding of jobs.
//!
//! For `pjwctl doctor`: the daemons of each scheduler, its configuration files, and what the texts of these files
//! mean for pjwd. Other code reads the files. A setting that can't be determined is reported as unknown, never guessed.

use pjw_core::diagnosis::{DetectedBatchSystem, JobBinding};
use pjw_core::ids::{Comm, Uid};

use crate::config_text::find_value;
use crate::slurm_conf::SlurmConf;

/// A scheduler (batch system or container orchestrator) that `pjwctl doctor` can recognise on this machine, such as
/// Slurm or Kubernetes. `pjwctl doctor` recognises the scheduler by the program names of its daemons. For most
/// schedulers, the configuration files show whether the scheduler binds jobs to cores.
#[derive(Debug, Clone, Copy)]
pub struct Scheduler {
    /// The name of the scheduler, for display, such as `Grid Engine`.
    pub name: &'static str,
    /// The program names of the daemons of the scheduler.
    daemons: &'static [&'static str],
    /// The name of an environment variable whose value is a path. The path is that of the directory of the
    /// configuration files, or that of one configuration file. Empty if the scheduler has no such variable.
    pub config_variable: &'static str,
    /// The usual directories of the configuration files, in the order in which they are tried. The directory
    /// from the environment variable `config_variable` is tried before them. The first directory is chosen in
    /// which `config_files[0]` can be read. All configuration files are read from the chosen directory.
    pub config_directories: &'static [&'static str],
    /// The paths of the configuration files, relative to their directory. The first file must exist, the
    /// others may be missing. A path that ends in `/` stands for all files in that directory.
    pub config_files: &'static [&'static str],
    /// Returns how the configuration binds jobs to cores, and what this means for pjwd, as a text for users. The
    /// argument has the texts of `config_files`, in the same order. The text of a missing file is empty.
    describe: fn(&[String]) -> (JobBinding, &'static str),
}

/// All batch systems and container orchestrators that `pjwctl doctor` recognises on a machine.
pub const SCHEDULERS: [Scheduler; 9] = [
    Scheduler {
        name: "Slurm",
        daemons: &["slurmd", "slurmctld", "slurmstepd"],
        config_variable: "SLURM_CONF",
        config_directories: &[
            "/etc/slurm",
            "/etc/slurm-llnl",
            "/usr/local/etc",
            "/run/slurm/conf",
            "/var/spool/slurmd/conf-cache",
        ],
        config_files: &["slurm.conf", "cgroup.conf"],
        describe: slurm_binding,
    },
    Scheduler {
        name: "LSF",
        daemons: &["sbatchd", "lim"],
        config_variable: "LSF_ENVDIR",
        config_directories: &["/etc", "/usr/share/lsf/conf", "/opt/lsf/conf"],
        config_files: &["lsf.conf"],
        describe: |texts| lsf_binding(&texts.join("\n")),
    },
    Scheduler {
        name: "PBS",
        daemons: &["pbs_mom"],
        config_variable: "",
        config_directories: &["/var/spool/pbs/mom_priv/hooks", "/var/spool/torque/mom_priv"],
        config_files: &["pbs_cgroups.HK"],
        describe: |texts| pbs_binding(&texts.join("\n")),
    },
    Scheduler {
        name: "Grid Engine",
        daemons: &["sge_execd"],
        config_variable: "SGE_ROOT",
        config_directories: &["/var/lib/gridengine", "/usr/share/gridengine", "/opt/sge"],
        config_files: &["default/common/bootstrap", "default/common/configuration"],
        describe: |texts| grid_engine_binding(&texts.join("\n")),
    },
    Scheduler {
        name: "HTCondor",
        daemons: &["condor_startd", "condor_master"],
        config_variable: "CONDOR_CONFIG",
        config_directories: &["/etc/condor", "/usr/local/etc/condor"],
        config_files: &["condor_config", "condor_config.local", "config.d/"],
        describe: |texts| condor_binding(&texts.join("\n")),
    },
    Scheduler {
        name: "Flux",
        daemons: &["flux-broker", "flux-broker-0"],
        config_variable: "",
        config_directories: &["/etc/flux/system/conf.d"],
        config_files: &["./"],
        describe: |texts| flux_binding(&texts.join("\n")),
    },
    Scheduler {
        name: "OAR",
        daemons: &["oarexec"],
        config_variable: "",
        config_directories: &[],
        config_files: &[],
        describe: oar_binding,
    },
    Scheduler {
        name: "Kubernetes",
        daemons: &["kubelet"],
        config_variable: "",
        config_directories: &["/var/lib/kubelet"],
        config_files: &["cpu_manager_state"],
        describe: |texts| kubernetes_binding(&texts.join("\n")),
    },
    Scheduler {
        name: "Nomad",
        daemons: &["nomad"],
        config_variable: "",
        config_directories: &[],
        config_files: &[],
        describe: nomad_binding,
    },
];

impl Scheduler {
    /// Returns whether a process is a daemon of this scheduler (a batch system or container orchestrator).
    /// `comm` is the program name of the process, and `uid` is its user id. `uid_min` is the lowest user id of
    /// people (`UID_MIN` in login.defs(5)). Always false if `uid` is `uid_min` or higher, because people can
    /// give their processes any name.
    #[must_use]
    pub fn is_daemon(&self, comm: &Comm, uid: Uid, uid_min: u32) -> bool {
        uid.0 < uid_min && self.daemons.iter().any(|name| name.as_bytes() == comm.as_bytes())
    }

    /// Describes how this scheduler (a batch system or container orchestrator) binds jobs to cores, and what this means
    /// for pjwd. `pjwctl doctor` shows the result. `config_texts` has the texts of `config_files`, in the same order.
    /// The text of a missing file is empty. `config_texts` is `None` in two cases:
    ///
    /// - The first of the files can't be read. The result then says that the binding is unknown.
    /// - The scheduler has no configuration files. The result then describes the binding that pjw assumes for this
    ///   scheduler.
    #[must_use]
    pub fn describe_core_binding(&self, config_texts: Option<&[String]>) -> DetectedBatchSystem {
        let (binding, effect_on_pjw) = match (config_texts, self.config_files.first()) {
            (None, Some(file)) => (JobBinding::Unknown, self.describe_unreadable_file(file)),
            (texts, _) => {
                let (binding, effect) = (self.describe)(texts.unwrap_or_default());
                (binding, effect.to_owned())
            }
        };
        DetectedBatchSystem { name: self.name.to_owned(), binding, effect_on_pjw }
    }

    /// Returns the text for users that says what it means for pjwd if the configuration file `file` can't be read.
    fn describe_unreadable_file(&self, file: &str) -> String {
        let hint = if self.config_variable.is_empty() {
            "look as root".to_owned()
        } else {
            format!("set {} or look as root", self.config_variable)
        };
        format!(
            "how it binds jobs is not known ({file} was not found or can't be read: {hint}); if it sets a \
             cpuset, that is the grant; else pjwd grants cores"
        )
    }
}

/// Returns how Slurm binds jobs to cores, and what this means for pjwd, as text for users. `texts` has the texts of
/// `slurm.conf` and `cgroup.conf`, see slurm.conf(5) and cgroup.conf(5). Without settings, nothing is bound.
fn slurm_binding(texts: &[String]) -> (JobBinding, &'static str) {
    let conf = SlurmConf::parse(texts.first().map(String::as_str), texts.get(1).map_or("", String::as_str));
    match (conf.gives_cpusets(), conf.has_task_affinity) {
        (Some(true), _) => (
            JobBinding::Cpusets,
            "it constrains cores (ConstrainCores=yes): its cpuset is the grant, pjwd only balances inside",
        ),
        (None, _) => (
            JobBinding::Unknown,
            "slurm.conf or cgroup.conf includes other files, which were not read: if it sets a cpuset, that is the \
             grant; else pjwd grants cores",
        ),
        (Some(false), Some(true)) => (
            JobBinding::Masks,
            "it binds tasks by a mask at their start (task/affinity) and never checks again: pjwd grants cores and \
             confines the jobs to them",
        ),
        (Some(false), None) => (
            JobBinding::Unknown,
            "slurm.conf includes other files, which were not read: it sets no cpuset, so pjwd grants cores, and if it \
             binds tasks by a mask, confines the jobs to these cores",
        ),
        _ if conf.constrains_cores == Some(true) => (
            JobBinding::Unbound,
            "ConstrainCores=yes does nothing without TaskPlugin=task/cgroup: pjwd grants cores",
        ),
        _ => (JobBinding::Unbound, "it binds nothing here: pjwd grants cores"),
    }
}

/// Returns how LSF binds jobs to cores, and what this means for pjwd, as text for users. `text` is the content of
/// `lsf.conf`, see lsf.conf(5).
fn lsf_binding(text: &str) -> (JobBinding, &'static str) {
    let makes_cpusets = find_value(text, "LSB_RESOURCE_ENFORCE").is_some_and(|what| what.contains("cpu"));
    let binding = find_value(text, "LSF_BIND_JOB").or_else(|| find_value(text, "LSB_BIND_JOB"));
    let sets_masks = binding.is_some_and(|how| !how.eq_ignore_ascii_case("none") && !how.is_empty());
    match (makes_cpusets, sets_masks) {
        (true, _) => (
            JobBinding::Cpusets,
            "jobs with affinity[] get a cpuset (LSB_RESOURCE_ENFORCE), which is the grant; for other jobs pjwd grants cores",
        ),
        (false, true) => (
            JobBinding::Masks,
            "it binds jobs by a mask at their start (LSF_BIND_JOB): pjwd grants cores and confines the jobs to them",
        ),
        (false, false) => (JobBinding::Unbound, "it binds nothing here: pjwd grants cores"),
    }
}

/// Returns how PBS binds jobs to cores, and what this means for pjwd, as text for users. `text` has the settings of the
/// cgroups hook. Only whether the hook is enabled matters here.
fn pbs_binding(text: &str) -> (JobBinding, &'static str) {
    let is_enabled = text.split_ascii_whitespace().any(|word| word == "enabled=true")
        || text.replace(' ', "").contains("enabled=true");
    if is_enabled {
        (JobBinding::Cpusets, "its cgroups hook is on: its cpuset is the grant, pjwd only balances inside")
    } else {
        (JobBinding::Unbound, "its cgroups hook is off: pjwd grants cores")
    }
}

/// Returns how Grid Engine binds jobs to cores, and what this means for pjwd, as text for users. `text` is its
/// configuration, see sge_conf(5). Every configuration has the parameter `execd_params`. If `text` does not have it,
/// the binding is unknown: where the configuration is not a file (bootstrap(5), `spooling_method`), as in Debian, only
/// Grid Engine itself knows it.
fn grid_engine_binding(text: &str) -> (JobBinding, &'static str) {
    let Some(parameters) = find_value(text, "execd_params").map(str::to_ascii_lowercase) else {
        return (
            JobBinding::Unknown,
            "how it binds jobs is not known (its configuration is in no file that can be read; qconf -sconf shows it): \
             if it sets a cpuset, that is the grant; else pjwd grants cores",
        );
    };
    let uses_cgroups = parameters.split([',', ' ']).any(|parameter| {
        parameter
            .strip_prefix("use_cgroups=")
            .is_some_and(|how| ["yes", "true", "1", "systemd"].contains(&how))
    });
    if uses_cgroups {
        (
            JobBinding::Cpusets,
            "jobs with -binding get a cpuset (USE_CGROUPS), which is the grant; for other jobs pjwd grants cores",
        )
    } else {
        (
            JobBinding::Unbound,
            "it binds only jobs that request it (-binding), by masks: pjwd grants cores and confines the jobs to them",
        )
    }
}

/// Returns how HTCondor binds jobs to cores, and what this means for pjwd, as text for users. `text` is its
/// configuration: the setting `ASSIGN_CPU_AFFINITY` matters.
fn condor_binding(text: &str) -> (JobBinding, &'static str) {
    let is_true =
        |value: &str| ["yes", "true", "1", "y", "t"].iter().any(|yes| value.eq_ignore_ascii_case(yes));
    if find_value(text, "ASSIGN_CPU_AFFINITY").is_some_and(is_true) {
        (
            JobBinding::Masks,
            "it binds each slot by a mask (ASSIGN_CPU_AFFINITY), without regard to caches and NUMA nodes: pjwd grants cores and \
             confines the jobs to them",
        )
    } else {
        (JobBinding::Unbound, "it binds nothing here (ASSIGN_CPU_AFFINITY): pjwd grants cores")
    }
}

/// Returns how Flux binds jobs to cores, and what this means for pjwd, as text for users. `text` is its configuration,
/// which says whether jobs are units of systemd (`service = "sdexec"`).
fn flux_binding(text: &str) -> (JobBinding, &'static str) {
    let has_unit_per_job = text.lines().any(|line| {
        let line: String = line.split('#').next().unwrap_or_default().split_whitespace().collect();
        line == "service=\"sdexec\""
    });
    if has_unit_per_job {
        (
            JobBinding::Masks,
            "jobs have units of their own (sdexec) and masks from its shell: pjwd grants cores and confines the jobs to them",
        )
    } else {
        (
            JobBinding::Masks,
            "all jobs share one cgroup (no sdexec) and get masks from its shell: pjwd finds them as root by \
             their environment, and confines them",
        )
    }
}

fn oar_binding(_: &[String]) -> (JobBinding, &'static str) {
    (JobBinding::Cpusets, "it gives each job a cpuset, which is the grant: pjwd only balances inside")
}

/// Returns how the kubelet binds containers to cores, and what this means for pjwd, as text for users. `text` is the
/// checkpoint file of the kubelet, which has the name of the policy of the CPU manager.
fn kubernetes_binding(text: &str) -> (JobBinding, &'static str) {
    if text.replace(' ', "").contains("\"policyName\":\"static\"") {
        (
            JobBinding::Cpusets,
            "the kubelet hands out CPUs itself (static CPU manager): reserve its CPUs with housekeeping, so \
             that pjwd grants none of them, or remove one of the two",
        )
    } else {
        (
            JobBinding::Unbound,
            "the kubelet binds nothing, and pjwd does not recognise pods as jobs: both may use the same CPUs",
        )
    }
}

fn nomad_binding(_: &[String]) -> (JobBinding, &'static str) {
    (
        JobBinding::Cpusets,
        "it makes cpusets of its own, and pjwd does not recognise its tasks as jobs: reserve their CPUs with housekeeping",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scheduler(name: &str) -> Scheduler {
        SCHEDULERS.into_iter().find(|scheduler| scheduler.name == name).unwrap()
    }

    /// Returns the binding of the scheduler `name` if its first configuration file has the text `text`, and the others
    /// are missing.
    fn binding(name: &str, text: &str) -> JobBinding {
        scheduler(name).describe_core_binding(Some(&[text.to_owned()])).binding
    }

    fn slurm(slurm_conf: &str, cgroup_conf: &str) -> DetectedBatchSystem {
        scheduler("Slurm").describe_core_binding(Some(&[slurm_conf.to_owned(), cgroup_conf.to_owned()]))
    }

    #[test]
    fn slurm_binds_only_as_configured() {
        let cores = "ConstrainCores=yes\n";
        for (slurm_conf, cgroup_conf, expected) in [
            ("", "", JobBinding::Unbound),
            ("ClusterName=c\nTaskPlugin=task/none\n", "", JobBinding::Unbound),
            ("TaskPlugin=task/cgroup\n", "ConstrainRAMSpace=yes\n", JobBinding::Unbound),
            ("taskplugin = task/affinity,task/cgroup\n", "CONSTRAINCORES = YES # why\n", JobBinding::Cpusets),
            ("TaskPlugin=affinity\n", "", JobBinding::Masks),
            ("TaskPlugin=task/affinity\n", cores, JobBinding::Masks),
            ("", cores, JobBinding::Unbound),
            ("#TaskPlugin=task/cgroup\n", "#ConstrainCores=yes\n", JobBinding::Unbound),
            ("TaskPlugin=task/cgroup\n", "ConstrainCores=yes\nConstrainCores=no\n", JobBinding::Unbound),
            ("TaskPlugin=task/cgroup\n", "ConstrainCores=true\n", JobBinding::Cpusets),
            ("TaskPlugin=task/cgroup\n", "ConstrainCores=y\n", JobBinding::Unbound),
            ("Include more.conf\n", "", JobBinding::Unknown),
            ("Include more.conf\n", cores, JobBinding::Unknown),
            ("Include more.conf\nTaskPlugin=task/affinity\n", cores, JobBinding::Masks),
            ("Include more.conf\nTaskPlugin=task/none\n", cores, JobBinding::Unbound),
        ] {
            assert_eq!(slurm(slurm_conf, cgroup_conf).binding, expected, "{slurm_conf:?} {cgroup_conf:?}");
        }
        assert_eq!(slurm("", "").effect_on_pjw, "it binds nothing here: pjwd grants cores");
    }

    #[test]
    fn an_unread_file_of_slurm_counts_only_for_the_file_that_includes_it() {
        let include = "Include site.conf\n";
        for (slurm_conf, cgroup_conf, expected) in [
            ("TaskPlugin=task/cgroup\nInclude nodes.conf\n", "", JobBinding::Unbound),
            ("TaskPlugin=task/cgroup\nInclude nodes.conf\n", "ConstrainCores=no\n", JobBinding::Unbound),
            ("", include, JobBinding::Unbound),
            ("TaskPlugin=task/affinity\n", include, JobBinding::Masks),
            ("TaskPlugin=task/cgroup\n", include, JobBinding::Unknown),
            ("TaskPlugin=task/cgroup,task/affinity\n", include, JobBinding::Unknown),
        ] {
            let described = slurm(slurm_conf, cgroup_conf);
            assert_eq!(described.binding, expected, "{slurm_conf:?} {cgroup_conf:?}");
            // The prolog takes cores only in this case.
            let gives_cpusets = SlurmConf::parse(Some(slurm_conf), cgroup_conf).gives_cpusets();
            assert_eq!(gives_cpusets == Some(false), expected != JobBinding::Unknown, "{described:?}");
        }
        let without_cpusets = slurm(include, "").effect_on_pjw;
        assert!(without_cpusets.contains("it sets no cpuset, so pjwd grants cores"), "{without_cpusets}");
    }

    #[test]
    fn the_configurations_of_other_systems_are_read_too() {
        for (name, text, expected) in [
            ("LSF", "LSF_BIND_JOB=BALANCE\n", JobBinding::Masks),
            ("LSF", "LSB_RESOURCE_ENFORCE=\"memory cpu\"\n", JobBinding::Cpusets),
            ("LSF", "LSF_BIND_JOB=NONE\n", JobBinding::Unbound),
            ("PBS", "{\n enabled=true\n}\n", JobBinding::Cpusets),
            ("PBS", "enabled=false\n", JobBinding::Unbound),
            ("Grid Engine", "execd_params  USE_CGROUPS=yes,KEEP_ACTIVE=true\n", JobBinding::Cpusets),
            ("Grid Engine", "spooling_method classic\nexecd_params none\n", JobBinding::Unbound),
            ("Grid Engine", "spooling_method berkeleydb\n", JobBinding::Unknown),
            ("HTCondor", "ASSIGN_CPU_AFFINITY = True\n", JobBinding::Masks),
            ("HTCondor", "ASSIGN_CPU_AFFINITY = True\nassign_cpu_affinity=false\n", JobBinding::Unbound),
            ("Flux", "[exec]\nservice = \"sdexec\"\n", JobBinding::Masks),
            ("Kubernetes", "{\"policyName\": \"static\",\"defaultCpuSet\":\"0-1\"}", JobBinding::Cpusets),
            ("Kubernetes", "{\"policyName\":\"none\"}", JobBinding::Unbound),
        ] {
            assert_eq!(binding(name, text), expected, "{name}: {text:?}");
        }
    }

    #[test]
    fn a_configuration_that_cannot_be_read_is_not_guessed() {
        let description = scheduler("Slurm").describe_core_binding(None);
        assert_eq!(description.binding, JobBinding::Unknown);
        assert!(description.effect_on_pjw.contains("slurm.conf"), "{description:?}");
        assert!(description.effect_on_pjw.contains("SLURM_CONF"), "{description:?}");
        assert!(scheduler("PBS").describe_core_binding(None).effect_on_pjw.contains("look as root"));
        assert_eq!(scheduler("OAR").describe_core_binding(None).binding, JobBinding::Cpusets);
    }

    #[test]
    fn a_persons_program_with_the_name_of_a_daemon_is_no_daemon() {
        let slurm = scheduler("Slurm");
        assert!(slurm.is_daemon(&Comm::from("slurmd"), Uid(0), 1000));
        assert!(!slurm.is_daemon(&Comm::from("slurmd"), Uid(1000), 1000));
        assert!(!slurm.is_daemon(&Comm::from("slurmdx"), Uid(0), 1000));
    }

    #[test]
    fn hostile_texts_are_only_texts() {
        for scheduler in SCHEDULERS {
            for text in
                ["=\n==\n#\n = \n", "\u{0}\u{ffff}", "TaskPlugin", "execd_params", &"x=".repeat(10_000)]
            {
                let texts = [text.to_owned(), text.to_owned()];
                assert!(!scheduler.describe_core_binding(Some(&texts)).effect_on_pjw.is_empty());
            }
        }
    }
}
