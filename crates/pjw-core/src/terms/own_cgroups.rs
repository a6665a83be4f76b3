//! The names of the cgroups that a daemon creates for jobs, and the way back from a cgroup's path to its job.

use crate::basics::prelude::*;
use crate::terms::cpuset_group::CgroupCreator;
use crate::terms::job::{JobId, JobSource};

/// The name of the cgroups of a daemon (`pjwd`) that runs alone. If a daemon runs beside another one, the
/// name is followed by `_` and [`HASH_DIGITS`] digits.
const NAME: &str = "pjw";

/// The end of the name of the cgroup that contains the cgroups of jobs of the class besteffort. It has no `-`, so that
/// systemd makes the slice directly below the root: idle priority counts only among cgroups with the same parent.
const BESTEFFORT: &str = "_besteffort";

/// The number of hexadecimal digits after `pjw_` in the name of a daemon that runs beside another one.
const HASH_DIGITS: usize = 16;

/// The names of the cgroups that one daemon (`pjwd`) creates for jobs. Two daemons on one machine use
/// different names, so that neither writes into a cgroup of the other daemon.
///
/// All names of a daemon begin with the same text, such as `pjw`. This text contains no `-`, because a `-` in
/// the name of a systemd slice separates the names of nested slices (systemd.slice(5)).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OwnCgroupNames {
    /// The text with which all names begin.
    name: String,
}

impl Default for OwnCgroupNames {
    /// Returns the names for a daemon that runs alone. They begin with `pjw`, as in `/pjw` and `pjw.slice`.
    fn default() -> Self {
        Self { name: NAME.to_owned() }
    }
}

impl OwnCgroupNames {
    /// Returns the names of the cgroups of a daemon that runs on the same machine as another daemon. `state_directory`
    /// is the absolute path of the daemon's state directory, without symbolic links. Each name starts with `pjw_` and
    /// the 64-bit FNV-1a hash of this path.
    #[must_use]
    pub fn for_additional_daemon(state_directory: &[u8]) -> Self {
        let add = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        let hash = state_directory.iter().fold(0xcbf2_9ce4_8422_2325, add);
        Self { name: format!("{NAME}_{hash:0HASH_DIGITS$x}") }
    }

    /// Returns the cgroup names of the daemon to which the cgroup at `path` belongs. The first component of the
    /// path identifies the daemon, such as `pjw.slice` in `/pjw.slice/pjw-7.scope`. Returns `None` if no daemon of
    /// pjw has a cgroup with the name in the first component. The function uses only the text of the path: the
    /// cgroup and the daemon need not exist.
    #[must_use]
    pub fn from_cgroup_path(path: &str) -> Option<Self> {
        let top = path.strip_prefix('/')?.split('/').next()?;
        let name = match top.split_once('-') {
            Some((name, _)) => name,
            None => top.strip_suffix(".slice").unwrap_or(top),
        };
        let name = name.strip_suffix(BESTEFFORT).unwrap_or(name);
        let hash = name.strip_prefix(NAME)?;
        let is_hash = |digits: &str| {
            digits.len() == HASH_DIGITS
                && digits.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
        };
        (hash.is_empty() || hash.strip_prefix('_').is_some_and(is_hash))
            .then(|| Self { name: name.to_owned() })
    }

    /// Returns the text with which the names of all cgroups of the daemon begin, such as `pjw`. If the daemon writes
    /// the cpuset of a batch system's cgroup, an extended attribute of this cgroup has the same text. The text says
    /// which daemon wrote the cpuset.
    #[must_use]
    pub fn name_prefix(&self) -> &str {
        &self.name
    }

    /// Returns the path of the parent of the job cgroups, such as `/pjw`, for machines on which systemd does not manage
    /// the cgroup hierarchy. Cgroups of another [`CgroupPlace`] than [`CgroupPlace::Usual`] have another parent. As in
    /// `/proc/PID/cgroup`, `/` is the root of the hierarchy.
    #[must_use]
    pub fn default_parent_path(&self) -> String {
        format!("/{}", self.name)
    }

    /// Returns the name of the systemd slice (systemd.slice(5)) in which systemd creates the cgroups of most
    /// jobs ([`CgroupPlace::Usual`]), such as `pjw.slice`. Each of these jobs is a scope unit in this slice.
    #[must_use]
    pub fn slice_name(&self) -> String {
        format!("{}.slice", self.name)
    }

    /// Returns the path of the cgroup in which the daemon itself creates the cgroups of jobs of the class
    /// besteffort ([`CgroupPlace::Besteffort`]), such as `/pjw_besteffort`. All processes in these cgroups run at idle
    /// priority. The path is relative to the mount point of the cgroup hierarchy.
    #[must_use]
    pub fn besteffort_parent_path(&self) -> String {
        format!("/{}{BESTEFFORT}", self.name)
    }

    /// Returns the name of the systemd slice in which systemd creates the cgroups of jobs of the class
    /// besteffort, such as `pjw_besteffort.slice`. All processes in this slice run at idle priority.
    #[must_use]
    pub fn besteffort_slice_name(&self) -> String {
        format!("{}{BESTEFFORT}.slice", self.name)
    }

    /// Returns the paths of the two cgroups in which the cgroups of jobs of the class besteffort can be: the cgroup in
    /// which the daemon itself creates them ([`OwnCgroupNames::besteffort_parent_path`]), and the cgroup of the slice
    /// in which systemd creates them ([`OwnCgroupNames::besteffort_slice_name`]).
    #[must_use]
    pub fn besteffort_parent_paths(&self) -> [String; 2] {
        [self.besteffort_parent_path(), format!("/{}", self.besteffort_slice_name())]
    }

    /// Whether the cgroup at `path` belongs to the daemon that uses these cgroup names. True for the cgroups that the
    /// daemon creates (the cgroups of jobs and the parents of these cgroups) and for all cgroups below them. Checks
    /// only the text of the path: the cgroup need not exist.
    #[must_use]
    pub fn is_own_path(&self, path: &str) -> bool {
        Self::from_cgroup_path(path).as_ref() == Some(self)
    }

    /// Returns the path of the cgroup of the job, relative to the mount point of the cgroup hierarchy.
    /// `cgroup_creator` is the creator of the cgroup: the daemon itself or systemd. `place` determines the
    /// parent of the cgroup.
    #[must_use]
    pub fn job_path(&self, job: &JobId, cgroup_creator: CgroupCreator, place: CgroupPlace) -> String {
        self.path_for_unescaped_name(&directory_name(job), cgroup_creator, place)
    }

    /// Returns the path of a cgroup of the daemon, relative to the mount point of the cgroup hierarchy. The
    /// name of the cgroup contains `unescaped_name` without any change. `cgroup_creator` (the daemon itself or
    /// systemd) and `place` determine the parent of the cgroup, as in [`OwnCgroupNames::job_path`].
    ///
    /// The daemon creates a cgroup at this path to test whether the machine supports cpusets. The
    /// `unescaped_name` of the test contains a `-`. In the name of a job's cgroup, a `-` is escaped. So the
    /// path of the test cgroup is never the path of a job's cgroup.
    #[must_use]
    pub fn path_for_unescaped_name(
        &self,
        unescaped_name: &str,
        cgroup_creator: CgroupCreator,
        place: CgroupPlace,
    ) -> String {
        let name = &self.name;
        match (cgroup_creator, place) {
            (CgroupCreator::Systemd, CgroupPlace::Usual) => {
                format!("/{name}.slice/{name}-{unescaped_name}.scope")
            }
            (CgroupCreator::Systemd, CgroupPlace::Partition) => format!("/{name}-{unescaped_name}.scope"),
            (CgroupCreator::Systemd, CgroupPlace::Besteffort) => {
                format!("/{name}{BESTEFFORT}.slice/{name}{BESTEFFORT}-{unescaped_name}.scope")
            }
            (CgroupCreator::Warden | CgroupCreator::Scheduler, CgroupPlace::Usual) => {
                format!("/{name}/{unescaped_name}")
            }
            (CgroupCreator::Warden | CgroupCreator::Scheduler, CgroupPlace::Partition) => {
                format!("/{name}-{unescaped_name}")
            }
            (CgroupCreator::Warden | CgroupCreator::Scheduler, CgroupPlace::Besteffort) => {
                format!("/{name}{BESTEFFORT}/{unescaped_name}")
            }
        }
    }

    /// Returns the job to which the cgroup at `path` belongs, and the [`CgroupPlace`] of this cgroup: the kind of
    /// parent that the cgroup has. `cgroup_creator` is the creator of the cgroup: the daemon itself or systemd. Returns
    /// `None` if `path` is not the path of a job's cgroup. This function is the inverse of
    /// [`OwnCgroupNames::job_path`].
    #[must_use]
    pub fn job_at_path(&self, path: &str, cgroup_creator: CgroupCreator) -> Option<(JobId, CgroupPlace)> {
        CgroupPlace::ALL.into_iter().find_map(|place| {
            let pattern = self.path_for_unescaped_name("", cgroup_creator, place);
            let end = if cgroup_creator == CgroupCreator::Systemd { ".scope" } else { "" };
            let job = path.strip_prefix(pattern.strip_suffix(end)?)?.strip_suffix(end)?;
            Some((job_of_directory_name(job)?, place))
        })
    }
}

/// The place of a job's cgroup in the cgroup hierarchy. For most jobs, the parent of the cgroup is a cgroup such as
/// `/pjw` (`Usual`). For jobs of the class besteffort, the parent is a cgroup such as `/pjw_besteffort`, in which all
/// processes run at idle priority (`Besteffort`). For jobs with an isolated partition, the parent is the root of the
/// hierarchy (`Partition`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CgroupPlace {
    /// Below the cgroup of the daemon that contains the cgroups of jobs, such as `/pjw`. For all jobs without
    /// one of the other places.
    Usual,
    /// Directly below the root of the hierarchy. For jobs with an isolated partition: the kernel requires
    /// that the parent of a partition is a partition too.
    Partition,
    /// Below the cgroup of the daemon whose processes run at idle priority, such as `/pjw_besteffort`. For
    /// jobs of the class besteffort.
    Besteffort,
}

impl CgroupPlace {
    const ALL: [Self; 3] = [Self::Usual, Self::Partition, Self::Besteffort];
}

/// Returns the part of a unit name or directory name that stands for the job `job`. This is the id of the job. A
/// manual job (a job of `pjwctl`) is named without its source.
///
/// - Characters that systemd does not allow in a unit name are escaped as systemd-escape(1) does: `\xNN`, with the
///   byte as two hexadecimal digits.
/// - The first byte is also escaped if the kernel may have a file with this name in a cgroup ([`is_cgroup_file`]).
///
/// A backslash occurs only in such escapes, so the id can be restored from the name.
fn directory_name(job: &JobId) -> String {
    let is_manual = job.source() == JobSource::Manual;
    let text = if is_manual { job.name().to_owned() } else { job.to_string() };
    let is_file = is_cgroup_file(&text);
    let mut name = String::with_capacity(text.len());
    for (index, byte) in text.bytes().enumerate() {
        // Only the colon between source and name becomes a separator: a manual job may be called `slurm:1`
        // too, as `manual:slurm:1`.
        let is_separator = byte == b':' && !is_manual;
        let is_inner_dot = byte == b'.' && index > 0;
        let is_allowed = byte.is_ascii_alphanumeric() || byte == b'_' || is_separator || is_inner_dot;
        if is_allowed && !(is_file && index == 0) {
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
    let job =
        if name.contains(':') { text.parse().ok()? } else { JobId::new(JobSource::Manual, &text).ok()? };
    // Another text may stand for the same job, such as one with an escaped letter. pjw writes only one of them.
    (directory_name(&job) == name).then_some(job)
}

/// Returns whether the kernel may have a file with the name `name` in a cgroup directory. No cgroup can have such a
/// name. The name is one of the v1 core files without a prefix, or begins with a controller and a dot
/// (`cgroup1_base_files` and `cgroup_file_name` in kernel/cgroup, Linux 6.18).
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cpuset_path_contains_the_job_name() {
        let own = OwnCgroupNames::default();
        let path = |job: &str, cgroup_creator| {
            own.job_path(&job.parse().unwrap(), cgroup_creator, CgroupPlace::Usual)
        };
        assert_eq!(path("a", CgroupCreator::Systemd), "/pjw.slice/pjw-a.scope");
        assert_eq!(path("slurm:12", CgroupCreator::Warden), "/pjw/slurm:12");
        assert_eq!(path("pbs:124[3].srv", CgroupCreator::Warden), "/pjw/pbs:124\\x5b3\\x5d.srv");
        assert_eq!(path("a-b@c+d", CgroupCreator::Systemd), "/pjw.slice/pjw-a\\x2db\\x40c\\x2bd.scope");
        assert_eq!(
            path("manual:slurm:12", CgroupCreator::Warden),
            "/pjw/slurm\\x3a12",
            "not the path of slurm:12"
        );
        assert_eq!(
            own.job_path(&"a".parse().unwrap(), CgroupCreator::Systemd, CgroupPlace::Partition),
            "/pjw-a.scope"
        );
        assert_eq!(
            own.job_path(&"a".parse().unwrap(), CgroupCreator::Warden, CgroupPlace::Partition),
            "/pjw-a"
        );
    }

    #[test]
    fn no_job_name_makes_a_parent_path_or_a_hidden_file() {
        let own = OwnCgroupNames::default();
        assert_eq!(
            own.job_path(&"..".parse().unwrap(), CgroupCreator::Warden, CgroupPlace::Usual),
            "/pjw/\\x2e."
        );
        assert_eq!(
            own.job_path(&".a".parse().unwrap(), CgroupCreator::Warden, CgroupPlace::Usual),
            "/pjw/\\x2ea"
        );
    }

    #[test]
    fn two_daemons_have_different_cgroups_and_each_is_known_by_the_path() {
        let (alone, one, two) = (
            OwnCgroupNames::default(),
            OwnCgroupNames::for_additional_daemon(b"/tmp/one"),
            OwnCgroupNames::for_additional_daemon(b"/tmp/two"),
        );
        assert_eq!(
            one.default_parent_path(),
            "/pjw_8cf11471b8d8b200",
            "the same state directory, the same cgroups"
        );
        let job: JobId = "a".parse().unwrap();
        for own in [&alone, &one, &two] {
            let creators = [CgroupCreator::Warden, CgroupCreator::Systemd];
            let job_paths = creators
                .iter()
                .flat_map(|&creator| CgroupPlace::ALL.map(|place| own.job_path(&job, creator, place)));
            let usual_parent_paths = [own.default_parent_path(), format!("/{}", own.slice_name())];
            for path in job_paths.chain(usual_parent_paths).chain(own.besteffort_parent_paths()) {
                assert_eq!(OwnCgroupNames::from_cgroup_path(&path).as_ref(), Some(own), "{path}");
                let owner_count = [&alone, &one, &two].iter().filter(|own| own.is_own_path(&path)).count();
                assert_eq!(owner_count, 1, "{path}");
            }
        }
    }

    #[test]
    fn a_cgroup_that_only_looks_like_one_of_a_daemon_belongs_to_no_daemon() {
        for path in ["", "/", "pjw/a", "/pjwx/a", "/pjw_/a", "/pjw_test_12", "/pjw.service/a", "/a/pjw/b"] {
            assert_eq!(OwnCgroupNames::from_cgroup_path(path), None, "{path}");
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
            assert_eq!(OwnCgroupNames::default().job_at_path(path, CgroupCreator::Warden), None, "{path}");
        }
    }

    proptest::proptest! {
        #[test]
        fn the_name_of_a_cgroup_gives_back_its_job(
            source in proptest::sample::select(JobSource::ALL),
            name in "[A-Za-z0-9._:@+\\[\\]-]{1,128}",
        ) {
            let job = JobId::new(source, &name).unwrap();
            for cgroup_creator in [CgroupCreator::Warden, CgroupCreator::Systemd] {
                for place in CgroupPlace::ALL {
                    for own in [OwnCgroupNames::default(), OwnCgroupNames::for_additional_daemon(b"/tmp/one")] {
                        let path = own.job_path(&job, cgroup_creator, place);
                        proptest::prop_assert_eq!(own.job_at_path(&path, cgroup_creator), Some((job.clone(), place)));
                    }
                }
            }
        }
    }

    #[test]
    fn no_job_name_makes_the_path_of_a_file_of_its_parent_cgroup() {
        let own = OwnCgroupNames::default();
        let path = |job: &str| own.job_path(&job.parse().unwrap(), CgroupCreator::Warden, CgroupPlace::Usual);
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
