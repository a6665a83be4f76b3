//! The services of batch systems on a node, and how their configuration says that jobs are bound.
//!
//! For `pjwctl doctor`: which daemons are here, which files to read, and what these mean for a warden. Texts in,
//! sentences out; the files are read elsewhere. A setting that can't be found out is told as such, never guessed.

use pjw_core::diagnosis::{Binding, SchedulerSeen};
use pjw_core::process::{Comm, Uid};

/// A batch system's service on a node.
#[derive(Debug, Clone, Copy)]
pub struct Service {
    /// What it is called.
    pub name: &'static str,
    /// Names of its daemons.
    daemons: &'static [&'static str],
    /// A variable that names its configuration's directory, or a file in it; empty if there is none.
    pub variable: &'static str,
    /// Directories where its configuration usually is.
    pub directories: &'static [&'static str],
    /// Its files there, the first of which must be there; one that ends in `/` is a directory of files.
    pub files: &'static [&'static str],
    judge: fn(&str) -> (Binding, &'static str),
}

/// All of them.
pub const SERVICES: [Service; 9] = [
    Service {
        name: "Slurm",
        daemons: &["slurmd", "slurmctld", "slurmstepd"],
        variable: "SLURM_CONF",
        directories: &[
            "/etc/slurm",
            "/etc/slurm-llnl",
            "/usr/local/etc",
            "/run/slurm/conf",
            "/var/spool/slurmd/conf-cache",
        ],
        files: &["slurm.conf", "cgroup.conf"],
        judge: slurm,
    },
    Service {
        name: "LSF",
        daemons: &["sbatchd", "lim"],
        variable: "LSF_ENVDIR",
        directories: &["/etc", "/usr/share/lsf/conf", "/opt/lsf/conf"],
        files: &["lsf.conf"],
        judge: lsf,
    },
    Service {
        name: "PBS",
        daemons: &["pbs_mom"],
        variable: "",
        directories: &["/var/spool/pbs/mom_priv/hooks", "/var/spool/torque/mom_priv"],
        files: &["pbs_cgroups.HK"],
        judge: pbs,
    },
    Service {
        name: "Grid Engine",
        daemons: &["sge_execd"],
        variable: "SGE_ROOT",
        directories: &["/var/lib/gridengine", "/usr/share/gridengine", "/opt/sge"],
        files: &["default/common/bootstrap", "default/common/configuration"],
        judge: grid_engine,
    },
    Service {
        name: "HTCondor",
        daemons: &["condor_startd", "condor_master"],
        variable: "CONDOR_CONFIG",
        directories: &["/etc/condor", "/usr/local/etc/condor"],
        files: &["condor_config", "condor_config.local", "config.d/"],
        judge: condor,
    },
    Service {
        name: "Flux",
        daemons: &["flux-broker", "flux-broker-0"],
        variable: "",
        directories: &["/etc/flux/system/conf.d"],
        files: &["./"],
        judge: flux,
    },
    Service { name: "OAR", daemons: &["oarexec"], variable: "", directories: &[], files: &[], judge: oar },
    Service {
        name: "Kubernetes",
        daemons: &["kubelet"],
        variable: "",
        directories: &["/var/lib/kubelet"],
        files: &["cpu_manager_state"],
        judge: kubernetes,
    },
    Service { name: "Nomad", daemons: &["nomad"], variable: "", directories: &[], files: &[], judge: nomad },
];

impl Service {
    /// Whether a process is one of its daemons. Names are free: another person's process is not believed.
    #[must_use]
    pub fn runs_as(&self, comm: &Comm, uid: Uid, first_person_uid: u32) -> bool {
        uid.0 < first_person_uid && self.daemons.iter().any(|name| name.as_bytes() == comm.as_bytes())
    }

    /// What its configuration, all files one after the other, means for a warden; `None` if it could not be read.
    #[must_use]
    pub fn seen(&self, configuration: Option<&str>) -> SchedulerSeen {
        let needs_none = self.files.is_empty();
        let (binding, meaning) = match configuration {
            Some(text) => (self.judge)(text),
            None if needs_none => (self.judge)(""),
            None => (Binding::Unknown, ""),
        };
        let meaning = match (binding, meaning) {
            (Binding::Unknown, "") => {
                let hint = if self.variable.is_empty() {
                    "look as root".to_owned()
                } else {
                    format!("set {} or look as root", self.variable)
                };
                let file = self.files.first().copied().unwrap_or_default();
                format!(
                    "how it binds jobs is not known ({file} was not found or can't be read: {hint}); a cpuset of its \
                     is law, else the warden allocates"
                )
            }
            (_, meaning) => meaning.to_owned(),
        };
        SchedulerSeen { name: self.name.to_owned(), binding, meaning }
    }
}

/// The last value of a key in lines `KEY=VALUE` or `KEY VALUE`, whatever their case; comments begin with `#`.
fn value<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    let of_line = |line: &'a str| {
        let line = line.split('#').next()?.trim();
        let end = line.find(|c: char| c == '=' || c.is_whitespace())?;
        let (name, rest) = line.split_at(end);
        let rest = rest.trim_start().trim_start_matches('=').trim().trim_matches('"');
        name.eq_ignore_ascii_case(key).then_some(rest)
    };
    text.lines().filter_map(of_line).next_back()
}

fn is_yes(value: Option<&str>) -> bool {
    value
        .is_some_and(|value| ["yes", "true", "1", "y", "t"].iter().any(|yes| value.eq_ignore_ascii_case(yes)))
}

/// slurm.conf(5), cgroup.conf(5): both default to no binding at all.
fn slurm(text: &str) -> (Binding, &'static str) {
    let plugins = value(text, "TaskPlugin").unwrap_or_default().to_ascii_lowercase();
    let has = |plugin: &str| plugins.split(',').any(|part| part.trim().trim_start_matches("task/") == plugin);
    let includes = value(text, "Include").is_some();
    match (is_yes(value(text, "ConstrainCores")), has("cgroup"), has("affinity")) {
        (true, true, _) => (
            Binding::Cpusets,
            "it constrains cores (ConstrainCores=yes): its cpuset is law, the warden balances inside",
        ),
        (_, _, true) => (
            Binding::Masks,
            "it binds tasks by a mask at their start (task/affinity) and never looks again: the warden allocates and \
             keeps them",
        ),
        (true, false, false) if !includes => (
            Binding::Nothing,
            "ConstrainCores=yes does nothing without TaskPlugin=task/cgroup: the warden allocates",
        ),
        _ if includes => (
            Binding::Unknown,
            "slurm.conf includes other files, which were not read: a cpuset of its is law, else the warden allocates",
        ),
        _ => (Binding::Nothing, "it binds nothing here: the warden allocates"),
    }
}

/// lsf.conf(5).
fn lsf(text: &str) -> (Binding, &'static str) {
    let enforces = value(text, "LSB_RESOURCE_ENFORCE").is_some_and(|what| what.contains("cpu"));
    let binds = value(text, "LSF_BIND_JOB").or_else(|| value(text, "LSB_BIND_JOB"));
    match (enforces, binds.is_some_and(|how| !how.eq_ignore_ascii_case("none") && !how.is_empty())) {
        (true, _) => (
            Binding::Cpusets,
            "jobs with affinity[] get a cpuset (LSB_RESOURCE_ENFORCE), which is law; for the others the warden allocates",
        ),
        (false, true) => (
            Binding::Masks,
            "it binds jobs by a mask at their start (LSF_BIND_JOB): the warden allocates and keeps them",
        ),
        (false, false) => (Binding::Nothing, "it binds nothing here: the warden allocates"),
    }
}

/// The hook's own settings, JSON of a known form; only whether it is on matters here.
fn pbs(text: &str) -> (Binding, &'static str) {
    let is_on = text.split_ascii_whitespace().any(|word| word == "enabled=true")
        || text.replace(' ', "").contains("enabled=true");
    if is_on {
        (Binding::Cpusets, "its cgroups hook is on: its cpuset is law, the warden balances inside")
    } else {
        (Binding::Nothing, "its cgroups hook is off: the warden allocates")
    }
}

/// sge_conf(5), `execd_params`, which every configuration has. Where it is no file (bootstrap(5), `spooling_method`), as
/// in Debian, Grid Engine would have to be asked.
fn grid_engine(text: &str) -> (Binding, &'static str) {
    let Some(parameters) = value(text, "execd_params").map(str::to_ascii_lowercase) else {
        return (
            Binding::Unknown,
            "how it binds jobs is not known (its configuration is in no file that can be read; qconf -sconf shows it): \
             a cpuset of its is law, else the warden allocates",
        );
    };
    let uses = parameters.split([',', ' ']).any(|parameter| {
        parameter
            .strip_prefix("use_cgroups=")
            .is_some_and(|how| ["yes", "true", "1", "systemd"].contains(&how))
    });
    if uses {
        (
            Binding::Cpusets,
            "jobs with -binding get a cpuset (USE_CGROUPS), which is law; for the others the warden allocates",
        )
    } else {
        (
            Binding::Nothing,
            "it binds only jobs that ask for it (-binding), by masks: the warden allocates and keeps them",
        )
    }
}

fn condor(text: &str) -> (Binding, &'static str) {
    if is_yes(value(text, "ASSIGN_CPU_AFFINITY")) {
        (
            Binding::Masks,
            "it binds each slot by a mask (ASSIGN_CPU_AFFINITY), blind to caches and nodes: the warden allocates and \
             keeps them",
        )
    } else {
        (Binding::Nothing, "it binds nothing here (ASSIGN_CPU_AFFINITY): the warden allocates")
    }
}

fn flux(text: &str) -> (Binding, &'static str) {
    let own_units = text.lines().any(|line| {
        let line: String = line.split('#').next().unwrap_or_default().split_whitespace().collect();
        line == "service=\"sdexec\""
    });
    if own_units {
        (
            Binding::Masks,
            "jobs have units of their own (sdexec) and masks from its shell: the warden allocates and keeps them",
        )
    } else {
        (
            Binding::Masks,
            "all jobs share one cgroup (no sdexec) and get masks from its shell: the warden finds them as root by \
             their environment, and keeps them",
        )
    }
}

fn oar(_: &str) -> (Binding, &'static str) {
    (Binding::Cpusets, "it gives each job a cpuset, which is law: the warden balances inside")
}

/// The kubelet's checkpoint names its policy.
fn kubernetes(text: &str) -> (Binding, &'static str) {
    if text.replace(' ', "").contains("\"policyName\":\"static\"") {
        (
            Binding::Cpusets,
            "the kubelet hands out CPUs itself (static CPU manager): keep the warden off them with housekeeping, or \
             let one of the two go",
        )
    } else {
        (
            Binding::Nothing,
            "the kubelet binds nothing, and pods are no jobs to the warden: both may use the same CPUs",
        )
    }
}

fn nomad(_: &str) -> (Binding, &'static str) {
    (
        Binding::Cpusets,
        "it makes cpusets of its own, and its tasks are no jobs to the warden: keep the warden off them with housekeeping",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn service(name: &str) -> Service {
        SERVICES.into_iter().find(|service| service.name == name).unwrap()
    }

    fn binding(name: &str, text: &str) -> Binding {
        service(name).seen(Some(text)).binding
    }

    #[test]
    fn slurm_binds_only_what_it_was_told_to() {
        for (text, expected) in [
            ("", Binding::Nothing),
            ("ClusterName=c\nTaskPlugin=task/none\n", Binding::Nothing),
            ("TaskPlugin=task/cgroup\nConstrainRAMSpace=yes\n", Binding::Nothing),
            ("taskplugin = task/affinity,task/cgroup\nCONSTRAINCORES = YES # why\n", Binding::Cpusets),
            ("TaskPlugin=affinity\n", Binding::Masks),
            ("TaskPlugin=task/affinity\nConstrainCores=yes\n", Binding::Masks),
            ("ConstrainCores=yes\n", Binding::Nothing),
            ("#TaskPlugin=task/cgroup\n#ConstrainCores=yes\n", Binding::Nothing),
            ("TaskPlugin=task/cgroup\nConstrainCores=yes\nConstrainCores=no\n", Binding::Nothing),
            ("Include /etc/slurm/more.conf\n", Binding::Unknown),
        ] {
            assert_eq!(binding("Slurm", text), expected, "{text:?}");
        }
        let told = service("Slurm").seen(Some(""));
        assert_eq!(told.meaning, "it binds nothing here: the warden allocates");
    }

    #[test]
    fn the_others_too() {
        for (name, text, expected) in [
            ("LSF", "LSF_BIND_JOB=BALANCE\n", Binding::Masks),
            ("LSF", "LSB_RESOURCE_ENFORCE=\"memory cpu\"\n", Binding::Cpusets),
            ("LSF", "LSF_BIND_JOB=NONE\n", Binding::Nothing),
            ("PBS", "{\n enabled=true\n}\n", Binding::Cpusets),
            ("PBS", "enabled=false\n", Binding::Nothing),
            ("Grid Engine", "execd_params  USE_CGROUPS=yes,KEEP_ACTIVE=true\n", Binding::Cpusets),
            ("Grid Engine", "spooling_method classic\nexecd_params none\n", Binding::Nothing),
            ("Grid Engine", "spooling_method berkeleydb\n", Binding::Unknown),
            ("HTCondor", "ASSIGN_CPU_AFFINITY = True\n", Binding::Masks),
            ("HTCondor", "ASSIGN_CPU_AFFINITY = True\nassign_cpu_affinity=false\n", Binding::Nothing),
            ("Flux", "[exec]\nservice = \"sdexec\"\n", Binding::Masks),
            ("Kubernetes", "{\"policyName\": \"static\",\"defaultCpuSet\":\"0-1\"}", Binding::Cpusets),
            ("Kubernetes", "{\"policyName\":\"none\"}", Binding::Nothing),
        ] {
            assert_eq!(binding(name, text), expected, "{name}: {text:?}");
        }
    }

    #[test]
    fn what_can_not_be_read_is_not_guessed() {
        let told = service("Slurm").seen(None);
        assert_eq!(told.binding, Binding::Unknown);
        assert!(told.meaning.contains("slurm.conf") && told.meaning.contains("SLURM_CONF"), "{told:?}");
        assert!(service("PBS").seen(None).meaning.contains("look as root"));
        assert_eq!(service("OAR").seen(None).binding, Binding::Cpusets);
    }

    #[test]
    fn a_persons_program_of_that_name_is_no_service() {
        let slurm = service("Slurm");
        assert!(slurm.runs_as(&Comm::from("slurmd"), Uid(0), 1000));
        assert!(!slurm.runs_as(&Comm::from("slurmd"), Uid(1000), 1000));
        assert!(!slurm.runs_as(&Comm::from("slurmdx"), Uid(0), 1000));
    }

    #[test]
    fn hostile_texts_are_only_texts() {
        for service in SERVICES {
            for text in
                ["=\n==\n#\n = \n", "\u{0}\u{ffff}", "TaskPlugin", "execd_params", &"x=".repeat(10_000)]
            {
                assert!(!service.seen(Some(text)).meaning.is_empty());
            }
        }
    }
}
