//! Job cpusets: cgroups whose cpuset keeps a job on its cores, whatever masks its threads request.
//!
//! This file defines what a node supports ([`CpusetSupport`]), a job's cpuset ([`JobCpuset`]), and the
//! changes that a plan can make ([`CpusetAction`]). The phase `cpusets` decides which job gets which cpuset.
//! Jobs without a cpuset are kept by affinity masks (phase `masks`).

use serde::{Deserialize, Serialize};

use crate::basics::{CpuSet, ProcessId, Uid, prelude::*};
use crate::terms::job::{JobId, Source};

/// The config key `enforcement`: whether pjw keeps jobs on their cores by cpusets or by affinity masks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Enforcement {
    /// By a cpuset if the job can have one, else by affinity masks.
    #[default]
    Auto,
    /// Like `Auto`, with a warning for each job that can't have a cpuset.
    Cpuset,
    /// By affinity masks only.
    Affinity,
}

/// What the node supports: whether pjw can make cpusets, and in which cgroup hierarchy. Found out once, when the
/// daemon starts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CpusetSupport {
    /// The cgroup hierarchy in which pjw can make cpusets, or the reason why it can't.
    pub hierarchy: CpusetHierarchy,
    /// Whether a mask set by sched_setaffinity(2) survives a change of the cpuset (Linux 6.2 and later).
    /// Older kernels give every thread the whole cpuset when the cpuset is written or the thread enters
    /// another one.
    pub affinity_persists: bool,
}

/// The cgroup hierarchy in which pjw makes cpusets, and whether systemd or pjw itself creates the cgroups there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CpusetHierarchy {
    /// pjw can't write any cpuset.
    Unavailable {
        /// The reason and the remedy, in one sentence.
        why: String,
    },
    /// The v2 hierarchy, managed by systemd. Job cpusets are transient scopes that systemd creates.
    Systemd,
    /// The v2 hierarchy without a manager. Job cpusets are directories that pjw creates.
    Unified,
    /// A v1 cpuset hierarchy, which systemd does not manage. Job cpusets are directories that pjw
    /// creates.
    Legacy,
}

impl Default for CpusetSupport {
    /// No cpuset support: the value before the probe.
    fn default() -> Self {
        Self {
            hierarchy: CpusetHierarchy::Unavailable {
                why: "the cpusets of this node were not probed".to_owned(),
            },
            affinity_persists: true,
        }
    }
}

/// The owner of a job's cgroup, which created it: the scheduler, systemd or pjw. pjw changes and removes the cgroup
/// by the interface that the owner used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CgroupOwner {
    /// The scheduler of the job. pjw writes only the cpuset of this cgroup.
    Scheduler,
    /// systemd, which created a scope at pjw's request.
    Systemd,
    /// pjw.
    Warden,
}

/// The settings that a cpuset should have: its PUs, its NUMA nodes, and whether it is an isolated partition.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CpusetSpec {
    /// `cpuset.cpus`: the PUs on which the processes in the cpuset may run.
    pub cpus: CpuSet,
    /// `cpuset.mems`: the numbers of the NUMA nodes from which memory may be allocated; `None` for all nodes.
    pub mems: Option<CpuSet>,
    /// Whether the cpuset is an isolated partition: no other cgroup uses its PUs, and the kernel does not
    /// balance load on them (Documentation/admin-guide/cgroup-v2.rst, `cpuset.cpus.partition`).
    pub isolated: bool,
}

impl CpusetSpec {
    /// Makes the settings of a cpuset with these PUs, the memory of all NUMA nodes, and without an isolated
    /// partition.
    #[must_use]
    pub fn from_cpus(cpus: CpuSet) -> Self {
        Self { cpus, mems: None, isolated: false }
    }
}

/// The cpuset of a job: the cgroup to which it belongs, the owner that created this cgroup, and the settings of the
/// cpuset.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobCpuset {
    /// The job whose processes the cpuset limits.
    pub job: JobId,
    /// Who created the cgroup: the scheduler, systemd or pjw.
    #[serde(rename = "mason")]
    pub cgroup_owner: CgroupOwner,
    /// The path of the cgroup below the mount point of the cpuset hierarchy, as in `/proc/PID/cgroup`.
    pub path: String,
    /// The settings of the cpuset that pjw wrote last, or is about to write.
    #[serde(rename = "bounds")]
    pub spec: CpusetSpec,
}

/// A cgroup with the name of a job's cpuset, found on the node when the daemon starts, and what pjw wrote to its
/// attributes when it made the cgroup. The journal may not know it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FoundCpuset {
    /// The path of the cgroup below the mount point of the cpuset hierarchy.
    pub path: String,
    /// The owner of the job. `None` if the attribute is missing: cgroups have no attributes here, or the cpuset was
    /// about to be removed.
    pub owner: Option<Uid>,
    /// The cgroup from which every process was moved in. `None` if that is unknown, or if the processes came from several
    /// cgroups.
    pub origin: Option<String>,
}

/// The name of the cgroups of a warden that runs alone. The name of a warden beside it starts with this name, `_` and
/// [`HASH_DIGITS`] digits.
const NAME: &str = "pjw";

/// The number of hexadecimal digits after `pjw_` in the name of a warden that runs beside another.
const HASH_DIGITS: usize = 16;

/// The names of the cgroups that one warden creates for jobs. Two wardens on one machine have different names, so that
/// neither writes into a cgroup of the other.
///
/// A name has no `-`: systemd would take the part before it as the name of a parent slice (systemd.slice(5)).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OwnCgroups {
    name: String,
}

impl Default for OwnCgroups {
    /// The cgroups of a warden that runs alone: below `/pjw`, or below `pjw.slice` where systemd creates them.
    fn default() -> Self {
        Self { name: NAME.to_owned() }
    }
}

impl OwnCgroups {
    /// The cgroups of a warden that runs beside another one. They are named after its state directory (the absolute
    /// path, without symbolic links): `/pjw_` and a 64-bit FNV-1a hash of the path.
    #[must_use]
    pub fn beside(state_directory: &[u8]) -> Self {
        let add = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        let hash = state_directory.iter().fold(0xcbf2_9ce4_8422_2325, add);
        Self { name: format!("{NAME}_{hash:0HASH_DIGITS$x}") }
    }

    /// The cgroups of the warden that created the cgroup at `path`, by its name. `None` if no warden gives a cgroup
    /// such a name.
    #[must_use]
    pub fn of_path(path: &str) -> Option<Self> {
        let top = path.strip_prefix('/')?.split('/').next()?;
        let name = match top.split_once('-') {
            Some((name, _)) => name,
            None => top.strip_suffix(".slice").unwrap_or(top),
        };
        let hash = name.strip_prefix(NAME)?;
        let is_hash = |digits: &str| {
            digits.len() == HASH_DIGITS
                && digits.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
        };
        (hash.is_empty() || hash.strip_prefix('_').is_some_and(is_hash))
            .then(|| Self { name: name.to_owned() })
    }

    /// The cgroup directory below which the warden itself creates the cgroups of jobs, if systemd does not manage the
    /// hierarchy: `/pjw`.
    #[must_use]
    pub fn directory(&self) -> String {
        format!("/{}", self.name)
    }

    /// The systemd slice (a group of units) below which systemd creates the cgroups of jobs, one scope unit for each
    /// job: `pjw.slice`.
    #[must_use]
    pub fn slice(&self) -> String {
        format!("{}.slice", self.name)
    }

    /// Whether the cgroup at `path` is one of these, or lies in one of these. The directory and the slice count.
    #[must_use]
    pub fn contains(&self, path: &str) -> bool {
        Self::of_path(path).as_ref() == Some(self)
    }

    /// Returns the path of the cgroup that the warden or systemd (`cgroup_owner`) creates for a job, relative to the
    /// mount point of the cgroup hierarchy. If `isolated`, the cgroup is directly below the root, because an isolated
    /// partition needs a partition as its parent.
    #[must_use]
    pub fn job_path(&self, job: &JobId, cgroup_owner: CgroupOwner, isolated: bool) -> String {
        self.path_of(&directory_name(job), cgroup_owner, isolated)
    }

    /// As [`OwnCgroups::job_path`], by the name that stands for the job. No job has a name with a `-`.
    #[must_use]
    pub fn path_of(&self, job: &str, cgroup_owner: CgroupOwner, isolated: bool) -> String {
        let name = &self.name;
        match (cgroup_owner, isolated) {
            (CgroupOwner::Systemd, false) => format!("/{name}.slice/{name}-{job}.scope"),
            (CgroupOwner::Systemd, true) => format!("/{name}-{job}.scope"),
            (CgroupOwner::Warden | CgroupOwner::Scheduler, false) => format!("/{name}/{job}"),
            (CgroupOwner::Warden | CgroupOwner::Scheduler, true) => format!("/{name}-{job}"),
        }
    }

    /// Returns the job for which [`OwnCgroups::job_path`] returns `path`, and whether the cgroup is that of an isolated
    /// partition. `None` if the warden or systemd (`cgroup_owner`) creates no such cgroup for a job.
    #[must_use]
    pub fn job_of(&self, path: &str, cgroup_owner: CgroupOwner) -> Option<(JobId, bool)> {
        let name = &self.name;
        let (usual, end) = match cgroup_owner {
            CgroupOwner::Systemd => (format!("/{name}.slice/{name}-"), ".scope"),
            CgroupOwner::Warden | CgroupOwner::Scheduler => (format!("/{name}/"), ""),
        };
        let in_usual = path.strip_prefix(&usual);
        let job = in_usual.or_else(|| path.strip_prefix(&format!("/{name}-")))?.strip_suffix(end)?;
        Some((job_of_directory_name(job)?, in_usual.is_none()))
    }
}

/// Returns the part of a unit name or directory name that stands for a job. A manual job is named by its id
/// alone. Characters that systemd does not allow in a unit name are escaped as systemd-escape(1) does: `\xNN`, with the
/// byte as two hexadecimal digits. The first byte is escaped too if the kernel has, or may have, a file of this name in
/// every cgroup ([`is_cgroup_file`]). Nothing else makes a backslash, so replacing each `\xNN` by its byte gives the id
/// back.
fn directory_name(job: &JobId) -> String {
    let by_hand = job.source() == Source::Manual;
    let text = if by_hand { job.name().to_owned() } else { job.to_string() };
    let is_file = is_cgroup_file(&text);
    let mut name = String::with_capacity(text.len());
    for (at, byte) in text.bytes().enumerate() {
        // Only the colon between source and name becomes a separator: a manual job may be called `slurm:1`
        // too, as `manual:slurm:1`.
        let separates = byte == b':' && !by_hand;
        let plain = byte.is_ascii_alphanumeric() || byte == b'_' || separates || (byte == b'.' && at > 0);
        if plain && !(is_file && at == 0) {
            name.push(char::from(byte));
        } else {
            name.push_str(&format!("\\x{byte:02x}"));
        }
    }
    name
}

/// Returns the job for which [`directory_name`] returns `name`. `None` if there is no such job.
fn job_of_directory_name(name: &str) -> Option<JobId> {
    let mut bytes = Vec::with_capacity(name.len());
    let mut parts = name.split("\\x");
    bytes.extend(parts.next()?.bytes());
    for part in parts {
        let (digits, rest) = part.split_at_checked(2)?;
        bytes.push(u8::from_str_radix(digits, 16).ok()?);
        bytes.extend(rest.bytes());
    }
    let text = String::from_utf8(bytes).ok()?;
    // Only the colon between source and name is not escaped.
    let job = if name.contains(':') { text.parse().ok()? } else { JobId::new(Source::Manual, &text).ok()? };
    // Another text may stand for the same job, such as one with an escaped letter. pjw writes only one of them.
    (directory_name(&job) == name).then_some(job)
}

/// Whether the name is that of a file that the kernel makes in a cgroup directory, where no directory of this name can be
/// made: a v1 core file without a prefix, or a name that begins with a controller and a dot (`cgroup1_base_files` and
/// `cgroup_file_name` in kernel/cgroup, Linux 6.18).
fn is_cgroup_file(name: &str) -> bool {
    const CORE_FILES: [&str; 3] = ["tasks", "notify_on_release", "release_agent"];
    const PREFIXES: [&str; 19] = [
        "blkio",
        "cgroup",
        "cpu",
        "cpuacct",
        "cpuset",
        "debug",
        "devices",
        "dmem",
        "freezer",
        "hugetlb",
        "io",
        "irq",
        "memory",
        "misc",
        "net_cls",
        "net_prio",
        "perf_event",
        "pids",
        "rdma",
    ];
    CORE_FILES.contains(&name) || name.split_once('.').is_some_and(|(prefix, _)| PREFIXES.contains(&prefix))
}

/// One planned change of a job's cpuset: the cpuset is created, widened or removed, or a process is moved into it or
/// out of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CpusetAction {
    /// The job whose cpuset changes.
    pub job: JobId,
    /// What is done: create, widen or remove the cpuset, or move a process.
    pub change: CpusetChange,
    /// Whether the change repeats an earlier one that another program undid.
    pub is_repair: bool,
    /// The reason for the change, in one sentence.
    pub why: String,
}

impl CpusetAction {
    /// Returns the name of the change in `pjwctl plan --json` and in logs, such as `raise`.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self.change {
            CpusetChange::Create { .. } => "raise",
            CpusetChange::MoveIn { .. } => "admit",
            CpusetChange::MoveBack { .. } => "return",
            CpusetChange::Widen { .. } => "open",
            CpusetChange::Remove { .. } => "raze",
        }
    }

    /// Returns the path of the cgroup whose cpuset is changed, or into or out of which a process is moved.
    #[must_use]
    pub fn path(&self) -> &str {
        match &self.change {
            CpusetChange::Create { job_cpuset, .. }
            | CpusetChange::Widen { job_cpuset }
            | CpusetChange::Remove { job_cpuset } => &job_cpuset.path,
            CpusetChange::MoveIn { to: path, .. } | CpusetChange::MoveBack { from: path, .. } => path,
        }
    }

    /// Returns the process that the change moves into or out of a cpuset, or `None` if it moves no process.
    #[must_use]
    pub fn process(&self) -> Option<ProcessId> {
        match &self.change {
            CpusetChange::MoveIn { process, .. } | CpusetChange::MoveBack { process, .. } => Some(*process),
            CpusetChange::Create { .. } | CpusetChange::Widen { .. } | CpusetChange::Remove { .. } => None,
        }
    }
}

/// What a planned change does to a job's cpuset: create it, move a process into it, move a process back, widen it to
/// all PUs, or remove it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CpusetChange {
    /// Creates the cgroup if it does not exist, and writes the settings. Repeating the change has no effect.
    Create {
        /// The cpuset.
        job_cpuset: JobCpuset,
        /// The owner of the job. It is written to an attribute of the cgroup, for a daemon that has lost its journal.
        owner: Uid,
        /// Processes that are moved in at creation. Only [`CgroupOwner::Systemd`] uses them, because systemd
        /// creates no scope without a process.
        initial_processes: Vec<ProcessId>,
    },
    /// Moves a process into the cpuset.
    MoveIn {
        /// The process.
        process: ProcessId,
        /// The cgroup in which the process was seen.
        from: String,
        /// The cgroup of the cpuset.
        to: String,
    },
    /// Moves a process back to the cgroup that it came from.
    MoveBack {
        /// The process.
        process: ProcessId,
        /// The cgroup of the cpuset.
        from: String,
        /// The cgroup that the process came from.
        to: String,
    },
    /// Allows all PUs and all memory again. A scheduler's cgroup is then as pjw found it.
    Widen {
        /// The cpuset.
        job_cpuset: JobCpuset,
    },
    /// Removes the cgroup. If processes are still in it, the cgroup stays and allows all PUs.
    Remove {
        /// The cpuset.
        job_cpuset: JobCpuset,
    },
}

/// The result of carrying out a [`CpusetAction`] (a change of a job's cpuset): done, refused with the reason, or gone
/// because the process or cgroup no longer exists.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CpusetOutcome {
    /// The change was made.
    Done {
        /// The PUs that the kernel allows in the cgroup now (`cpuset.cpus.effective`), after
        /// [`CpusetChange::Create`] and [`CpusetChange::Widen`].
        effective: Option<CpuSet>,
    },
    /// The process or the scheduler's cgroup no longer exists.
    Gone,
    /// The kernel or systemd refused the change.
    Refused {
        /// The error and what to do, one sentence.
        hint: String,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cpuset_path_contains_the_job_name() {
        let own = OwnCgroups::default();
        let path = |job: &str, cgroup_owner| own.job_path(&job.parse().unwrap(), cgroup_owner, false);
        assert_eq!(path("a", CgroupOwner::Systemd), "/pjw.slice/pjw-a.scope");
        assert_eq!(path("slurm:12", CgroupOwner::Warden), "/pjw/slurm:12");
        assert_eq!(path("pbs:124[3].srv", CgroupOwner::Warden), "/pjw/pbs:124\\x5b3\\x5d.srv");
        assert_eq!(path("a-b@c+d", CgroupOwner::Systemd), "/pjw.slice/pjw-a\\x2db\\x40c\\x2bd.scope");
        assert_eq!(
            path("manual:slurm:12", CgroupOwner::Warden),
            "/pjw/slurm\\x3a12",
            "not the path of slurm:12"
        );
        assert_eq!(own.job_path(&"a".parse().unwrap(), CgroupOwner::Systemd, true), "/pjw-a.scope");
        assert_eq!(own.job_path(&"a".parse().unwrap(), CgroupOwner::Warden, true), "/pjw-a");
    }

    #[test]
    fn no_job_name_makes_a_parent_path_or_a_hidden_file() {
        let own = OwnCgroups::default();
        assert_eq!(own.job_path(&"..".parse().unwrap(), CgroupOwner::Warden, false), "/pjw/\\x2e.");
        assert_eq!(own.job_path(&".a".parse().unwrap(), CgroupOwner::Warden, false), "/pjw/\\x2ea");
    }

    #[test]
    fn two_wardens_have_different_cgroups_and_each_is_known_by_the_path() {
        let (alone, one, two) =
            (OwnCgroups::default(), OwnCgroups::beside(b"/tmp/one"), OwnCgroups::beside(b"/tmp/two"));
        assert_eq!(one.directory(), "/pjw_8cf11471b8d8b200", "the same state directory, the same cgroups");
        let job: JobId = "a".parse().unwrap();
        for own in [&alone, &one, &two] {
            let owners = [CgroupOwner::Warden, CgroupOwner::Systemd];
            let jobs = owners.iter().flat_map(|&owner| [true, false].map(|is| own.job_path(&job, owner, is)));
            for path in jobs.chain([own.directory(), format!("/{}", own.slice())]) {
                assert_eq!(OwnCgroups::of_path(&path).as_ref(), Some(own), "{path}");
                let owners: Vec<_> = [&alone, &one, &two].map(|other| other.contains(&path)).into();
                assert_eq!(owners.iter().filter(|contains| **contains).count(), 1, "{path}");
            }
        }
    }

    #[test]
    fn a_cgroup_that_only_looks_like_one_of_a_warden_is_none() {
        for path in ["", "/", "pjw/a", "/pjwx/a", "/pjw_/a", "/pjw_test_12", "/pjw.service/a", "/a/pjw/b"] {
            assert_eq!(OwnCgroups::of_path(path), None, "{path}");
        }
    }

    #[test]
    fn a_name_that_pjw_gives_to_no_cgroup_stands_for_no_job() {
        for name in [
            "", "a-b", "probe-12", "\\x61", "\\x2", "\\xzz", "\\xff", ".a", "manual:a", "slrm:1", "slurm:",
            "a b",
        ] {
            assert_eq!(job_of_directory_name(name), None, "{name}");
        }
        for path in
            ["/", "/pjw", "/pjw/", "/pjw/a/b", "/pjw_test", "/pjw-", "/other/a", "/pjw.slice/pjw-a.scope"]
        {
            assert_eq!(OwnCgroups::default().job_of(path, CgroupOwner::Warden), None, "{path}");
        }
    }

    proptest::proptest! {
        #[test]
        fn the_name_of_a_cgroup_gives_back_its_job(
            source in proptest::sample::select(Source::ALL),
            name in "[A-Za-z0-9._:@+\\[\\]-]{1,128}",
        ) {
            let job = JobId::new(source, &name).unwrap();
            for cgroup_owner in [CgroupOwner::Warden, CgroupOwner::Systemd] {
                for isolated in [false, true] {
                    for own in [OwnCgroups::default(), OwnCgroups::beside(b"/tmp/one")] {
                        let path = own.job_path(&job, cgroup_owner, isolated);
                        proptest::prop_assert_eq!(own.job_of(&path, cgroup_owner), Some((job.clone(), isolated)));
                    }
                }
            }
        }
    }

    #[test]
    fn no_job_name_makes_the_path_of_a_file_of_its_parent_cgroup() {
        let own = OwnCgroups::default();
        let path = |job: &str| own.job_path(&job.parse().unwrap(), CgroupOwner::Warden, false);
        assert_eq!(path("tasks"), "/pjw/\\x74asks");
        assert_eq!(path("notify_on_release"), "/pjw/\\x6eotify_on_release");
        assert_eq!(path("cgroup.procs"), "/pjw/\\x63group.procs");
        assert_eq!(path("cpuset.cpus"), "/pjw/\\x63puset.cpus");
        assert_eq!(path("memory.pressure-x"), "/pjw/\\x6demory.pressure\\x2dx");
        for other in ["tasks2", "cpuset", "cpus", "run.tasks", "cpu_set.cpus", "make.4711"] {
            assert_eq!(path(other), format!("/pjw/{other}"), "running jobs have this path");
        }
    }
}
