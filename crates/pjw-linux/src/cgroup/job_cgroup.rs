//! Reads the state of a job's cgroup, and writes nothing.
//!
//! The path in `/proc/PID/cgroup` identifies the cgroup. The path is the same in every hierarchy that the
//! scheduler uses. The cpuset may be in another hierarchy than the processes. The mounted hierarchies can be v1
//! (cgroups(7)), v2 (Documentation/admin-guide/cgroup-v2.rst), or both. In v2, `cpuset.cpus` has the configured
//! PUs, and `cpuset.cpus.effective` the granted PUs.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use pjw_core::snapshot::{Cgroup, CgroupUsage, Cpuset, Observed};
use pjw_core::{cpuset::CpuSet, ids::CgroupId};

use super::{
    hierarchy::{CgroupDir, CpusetMount},
    memory::MemoryControllerMount,
    mounts::CgroupMounts,
    peak::read_memory_peak,
    populated_cache::PopulatedCgroupCache,
};
use crate::sys::errno::{from_io, is_gone};

/// Returns the state that pjw assumes for the cgroup at `path` if the cgroup can't be read: the cgroup exists,
/// contains processes, and has no limits.
pub(crate) fn assumed_cgroup(path: &str) -> Observed<Cgroup> {
    let id = CgroupId { inode: 0, path: path.to_owned() };
    Observed::Present(Cgroup {
        id,
        restricted_cpus: None,
        populated: true,
        cpuset: None,
        usage: CgroupUsage::default(),
    })
}

impl CgroupMounts {
    /// Reads the state of the cgroup at `cgroup_path`: whether it exists, whether it contains processes, its cpuset,
    /// its CPU time, its largest memory use and its memory limit. `cgroup_path` is as in `/proc/PID/cgroup`: relative
    /// to the root of each hierarchy. `populated_cache` keeps the pid of one process in each v1 cgroup, so that the
    /// next check for processes is faster.
    ///
    /// Combines the states in all mounted hierarchies, v1 and v2:
    ///
    /// - The cgroup exists if there is a cgroup at `cgroup_path` in at least one hierarchy.
    /// - The cgroup contains processes if, in at least one hierarchy, a process is in the cgroup at `cgroup_path` or in
    ///   a cgroup below it.
    /// - The cpuset is read in the hierarchy with the cpuset controller, the CPU time in the v2 hierarchy, and the
    ///   memory values in the hierarchy with the memory controller.
    ///
    /// Returns [`Observed::Present`] with the state if the cgroup exists, and [`Observed::Gone`] if the cgroup does not
    /// exist in any hierarchy. Returns `None` if the state is unknown, for one of these reasons:
    ///
    /// - No hierarchy is mounted.
    /// - `cgroup_path` is the root, or lies outside this process's cgroup namespace.
    /// - The cpuset can't be read.
    /// - The cgroup was found in no hierarchy, and its directory can't be read in one of them.
    #[must_use]
    pub fn read_cgroup(
        &self,
        cgroup_path: &str,
        populated_cache: &mut PopulatedCgroupCache,
    ) -> Option<Observed<Cgroup>> {
        let relative = cgroup_path.trim_start_matches('/');
        // A path with `..` belongs to another cgroup namespace.
        if relative.is_empty() || Path::new(relative).components().any(|part| part.as_os_str() == "..") {
            return None;
        }
        let group_in = |mount: &Path, unified: bool| CgroupDir {
            path: cgroup_path.to_owned(),
            dir: mount.join(relative),
            unified,
        };
        let unified = self.v2_mount_point.iter().map(|mount| group_in(mount, true));
        let legacy = self.v1_mounts.iter().map(|(_, mount)| group_in(mount, false));
        let hierarchy = CpusetMount::from_mounts(self);
        let (mut state, mut cpuset) = (None::<Cgroup>, None);
        // Whether each hierarchy was read, so that a cgroup that is in none of them does not exist.
        let mut is_certain = self.v2_mount_point.is_some() || !self.v1_mounts.is_empty();
        for group in unified.chain(legacy) {
            let meta = match fs::metadata(&group.dir) {
                Ok(meta) if meta.is_dir() => meta,
                // The path names a file of the cgroup above.
                Ok(_) => continue,
                Err(fault) => {
                    is_certain &= is_gone(from_io(fault));
                    continue;
                }
            };
            let id = CgroupId { inode: meta.ino(), path: cgroup_path.to_owned() };
            let cgroup = state.get_or_insert_with(|| Cgroup {
                id,
                restricted_cpus: None,
                populated: false,
                cpuset: None,
                usage: CgroupUsage::default(),
            });
            if group.unified {
                cgroup.usage.cpu_ns = read_cpu_time(&group.dir);
            }
            if !cgroup.populated {
                cgroup.populated = if group.unified {
                    group.is_populated()
                } else {
                    populated_cache.is_populated(&group.dir, cgroup_path)
                };
            }
            let cpuset = cpuset.get_or_insert_with(|| read_cpuset(hierarchy.as_ref(), cgroup_path));
            let known_cpuset = cpuset.as_ref().ok().and_then(Option::as_ref);
            if cgroup.restricted_cpus.is_none() {
                cgroup.restricted_cpus = restricted_cpus(hierarchy.as_ref(), &group, known_cpuset);
            }
            if cgroup.populated && cgroup.restricted_cpus.is_some() {
                break;
            }
        }
        if let Some(cgroup) = &mut state {
            if let Some(memory) = self.memory_cgroup(cgroup_path) {
                cgroup.usage.memory_peak = read_memory_peak(&memory);
                cgroup.usage.memory_limit = memory.memory_limit();
            }
            // If the cpuset can't be read, the state is unknown.
            cgroup.cpuset = cpuset?.ok()?;
        }
        state.map(Observed::Present).or_else(|| is_certain.then_some(Observed::Gone))
    }

    /// Reads the largest amount of memory, in bytes, that the kernel has ever charged to the cgroup at
    /// `cgroup_path` and to the cgroups below it. `cgroup_path` is as in `/proc/PID/cgroup`. `None` if the
    /// kernel does not record this value for the cgroup, or if the cgroup does not exist in the hierarchy with
    /// the memory controller.
    #[must_use]
    pub fn read_memory_peak(&self, cgroup_path: &str) -> Option<u64> {
        read_memory_peak(&self.memory_cgroup(cgroup_path)?)
    }

    /// The cgroup at this path in the hierarchy with the memory controller.
    fn memory_cgroup(&self, cgroup_path: &str) -> Option<CgroupDir> {
        MemoryControllerMount::from_mounts(self)?.cgroup(cgroup_path)
    }

    /// Returns the existing directories that pjwd must watch to detect changes of the cgroup at `cgroup_path`,
    /// a path as in `/proc/PID/cgroup`. These are the directories of the cgroup in the v2 hierarchy and in the
    /// v1 hierarchy with the cpuset controller. If neither exists, these are the directories of the cgroup in
    /// all other v1 hierarchies. The list is empty if the cgroup has no directory.
    #[must_use]
    pub fn dirs_to_watch(&self, cgroup_path: &str) -> Vec<PathBuf> {
        let relative = cgroup_path.trim_start_matches('/');
        let preferred = self.v2_mount_point.iter().map(PathBuf::as_path).chain(self.v1_cpuset_mount());
        let dirs: Vec<PathBuf> =
            preferred.map(|mount| mount.join(relative)).filter(|dir| dir.is_dir()).collect();
        if !dirs.is_empty() {
            return dirs;
        }
        self.v1_mounts.iter().map(|(_, mount)| mount.join(relative)).filter(|dir| dir.is_dir()).collect()
    }
}

/// Returns the PUs (logical CPUs) of the cgroup `group`, if its own cpuset restricts its processes to some PUs. In
/// cgroup v2, these are the PUs that the kernel grants. In cgroup v1, these are the configured PUs. `None` in each of
/// these cases:
///
/// - The cgroup has no cpuset, or the cpuset can't be read.
/// - No PUs are configured for the cgroup.
/// - In cgroup v1, the configured PUs are those of the root cgroup.
///
/// `hierarchy` is the hierarchy with the cpuset controller. `known` is the cpuset at the path of the cgroup in this
/// hierarchy. If `known` is `None`, or if `group` is in another hierarchy, the files of `group` are read.
fn restricted_cpus(
    hierarchy: Option<&CpusetMount>,
    group: &CgroupDir,
    known: Option<&Cpuset>,
) -> Option<CpuSet> {
    let known = known.filter(|_| hierarchy.is_some_and(|hierarchy| hierarchy.contains(group)));
    let configured = match known {
        Some(cpuset) => cpuset.cpus.clone(),
        None => group.read_number_list("cpuset.cpus").ok()?,
    };
    if configured.is_empty() {
        return None;
    }
    if group.unified {
        return match known {
            Some(cpuset) => Some(cpuset.effective_cpus.clone()),
            None => group.effective_cpus().ok(),
        };
    }
    let all = hierarchy?.root().read_number_list("cpuset.cpus").ok()?;
    (configured != all).then_some(configured)
}

/// Returns the cpuset of the cgroup at `path` in the hierarchy with the cpuset controller, `hierarchy`: its settings,
/// and the PUs that the kernel grants. Returns `None` if no such hierarchy is mounted, or if the cgroup does not exist
/// or has no cpuset files.
///
/// # Errors
/// If the cpuset files exist and can't be read.
fn read_cpuset(hierarchy: Option<&CpusetMount>, path: &str) -> Result<Option<Cpuset>, Errno> {
    let Some(group) = hierarchy.and_then(|hierarchy| hierarchy.cgroup(path)) else { return Ok(None) };
    let both = group.read_cpuset().and_then(|files| Ok((files, group.effective_cpus()?)));
    match both {
        Ok((files, effective)) => Ok(Some(Cpuset {
            cpus: files.cpus,
            effective_cpus: effective,
            mems: files.mems,
            isolated: files.partition == "isolated",
        })),
        Err(errno) if is_gone(errno) => Ok(None),
        Err(errno) => Err(errno),
    }
}

/// Reads the CPU time that the processes of a v2 cgroup used, in ns, from the file `cpu.stat`, which every cgroup has.
/// `None` if the file can't be read.
fn read_cpu_time(dir: &Path) -> Option<u64> {
    let text = fs::read_to_string(dir.join("cpu.stat")).ok()?;
    let micros =
        text.lines().find_map(|line| line.strip_prefix("usage_usec ")?.trim().parse::<u64>().ok())?;
    Some(micros.saturating_mul(1000))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hierarchy() -> (tempfile::TempDir, CgroupMounts) {
        let dir = tempfile::tempdir().unwrap();
        let mounts = CgroupMounts {
            v2_mount_point: Some(dir.path().join("unified")),
            v1_mounts: vec![("rw,cpuset".to_owned(), dir.path().join("cpuset"))],
        };
        (dir, mounts)
    }

    fn write(root: &Path, files: &[(&str, &str)]) {
        for (path, text) in files {
            let path = root.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
    }

    #[test]
    fn only_a_configured_cpuset_is_reported() {
        let (dir, mounts) = hierarchy();
        write(
            dir.path(),
            &[
                ("unified/s/job_1/cpuset.cpus", "\n"),
                ("unified/s/job_1/cpuset.cpus.effective", "0-7\n"),
                ("unified/s/job_1/cgroup.events", "populated 1\nfrozen 0\n"),
                ("unified/s/job_2/cpuset.cpus", "2-9\n"),
                ("unified/s/job_2/cpuset.cpus.effective", "2-5\n"),
                ("unified/s/job_2/cgroup.events", "populated 0\nfrozen 0\n"),
                ("cpuset/cpuset.cpus", "0-7\n"),
                ("cpuset/s/job_3/cpuset.cpus", "0-7\n"),
                ("cpuset/s/job_4/cpuset.cpus", "3\n"),
                ("cpuset/s/job_4/cgroup.procs", ""),
                ("cpuset/s/job_4/step_0/cgroup.procs", "17\n"),
            ],
        );
        let states: Vec<_> = (1..=5)
            .map(|n| match mounts.read_cgroup(&format!("/s/job_{n}"), &mut PopulatedCgroupCache::default()) {
                Some(Observed::Present(cgroup)) => {
                    let cpus = cgroup.restricted_cpus.map_or("-".to_owned(), |cpus| cpus.to_string());
                    format!("{cpus} {}", cgroup.populated)
                }
                Some(Observed::Gone) => "gone".to_owned(),
                None => "unknown".to_owned(),
            })
            .collect();
        assert_eq!(states, ["- true", "2-5 false", "- false", "3 true", "gone"]);
    }

    #[test]
    fn the_pus_that_limit_a_cgroup_are_those_of_its_cpuset() {
        let (dir, mounts) = hierarchy();
        let files = [
            ("cpuset.cpus", "2-3\n"),
            ("cpuset.mems", "0\n"),
            ("cpuset.effective_cpus", "2\n"),
            ("cpuset.cpus.effective", "2\n"),
        ];
        for (file, text) in files {
            write(dir.path(), &[(format!("cpuset/s/job_1/{file}").as_str(), text)]);
            write(dir.path(), &[(format!("unified/s/job_2/{file}").as_str(), text)]);
        }
        write(dir.path(), &[("cpuset/cpuset.cpus", "0-7\n"), ("cpuset/s/job_1/cgroup.procs", "17\n")]);
        let only_v2 = CgroupMounts { v1_mounts: Vec::new(), ..mounts.clone() };
        for (mounts, path, limit) in [(mounts, "/s/job_1", "2-3"), (only_v2, "/s/job_2", "2")] {
            let cgroup = mounts.read_cgroup(path, &mut PopulatedCgroupCache::default()).unwrap();
            let Cgroup { restricted_cpus, cpuset, .. } = cgroup.present().unwrap();
            let cpuset = cpuset.as_ref().unwrap();
            assert_eq!(restricted_cpus.as_ref().map(ToString::to_string), Some(limit.to_owned()), "{path}");
            let shown = [&cpuset.cpus, &cpuset.effective_cpus].map(ToString::to_string);
            assert_eq!(shown, ["2-3", "2"], "{path}");
        }
    }

    #[test]
    fn a_v2_cgroup_tells_its_cpu_time_and_its_peak_of_memory_where_it_measures_them() {
        let (dir, mounts) = hierarchy();
        write(
            dir.path(),
            &[
                ("unified/s/job_1/cpu.stat", "usage_usec 1500\nuser_usec 1000\nsystem_usec 500\n"),
                ("unified/s/job_1/memory.peak", "4096\n"),
                ("unified/s/job_1/memory.max", "8192\n"),
                ("unified/s/job_2/cpu.stat", "usage_usec many\n"),
                ("unified/s/job_2/memory.peak", "max\n"),
                ("unified/s/job_2/memory.max", "max\n"),
                ("unified/s/job_3/cgroup.procs", ""),
            ],
        );
        let usage = |n: u32| {
            let cgroup =
                mounts.read_cgroup(&format!("/s/job_{n}"), &mut PopulatedCgroupCache::default()).unwrap();
            let usage = cgroup.present().unwrap().usage;
            (usage.cpu_ns, usage.memory_peak, usage.memory_limit)
        };
        let nothing = (None, None, None);
        assert_eq!([1, 2, 3].map(usage), [(Some(1_500_000), Some(4096), Some(8192)), nothing, nothing]);
    }

    #[test]
    fn the_peak_of_memory_in_v1_is_that_of_the_memory_hierarchy() {
        let (dir, mut mounts) = hierarchy();
        mounts.v1_mounts.push(("rw,memory".to_owned(), dir.path().join("memory")));
        write(
            dir.path(),
            &[
                ("unified/s/job_1/cpu.stat", "usage_usec 1500\n"),
                ("unified/s/job_1/memory.peak", "1\n"),
                ("cpuset/s/job_1/cpuset.cpus", "0\n"),
                ("cpuset/s/job_1/cgroup.procs", "17\n"),
                ("memory/s/job_1/memory.max_usage_in_bytes", "8192\n"),
            ],
        );
        let cgroup = mounts.read_cgroup("/s/job_1", &mut PopulatedCgroupCache::default()).unwrap();
        let usage = cgroup.present().unwrap().usage;
        assert_eq!((usage.cpu_ns, usage.memory_peak), (Some(1_500_000), Some(8192)));
        assert_eq!(mounts.read_memory_peak("/s/job_1"), Some(8192));
        for path in ["/s/job_2", "/", "/../s/job_1"] {
            assert_eq!(mounts.read_memory_peak(path), None, "{path}");
        }
    }

    #[test]
    fn a_path_with_dot_dot_is_not_followed() {
        let (dir, mounts) = hierarchy();
        write(dir.path(), &[("secret/cgroup.procs", "1\n"), ("unified/a", "")]);
        assert_eq!(mounts.read_cgroup("/../secret", &mut PopulatedCgroupCache::default()), None);
        assert_eq!(mounts.read_cgroup("/", &mut PopulatedCgroupCache::default()), None);
    }

    #[test]
    fn an_unreadable_cpuset_makes_the_state_unknown() {
        let (dir, mut mounts) = hierarchy();
        mounts.v1_mounts.clear();
        write(dir.path(), &[("unified/s/job_1/cgroup.events", "populated 1\n")]);
        let read = || mounts.read_cgroup("/s/job_1", &mut PopulatedCgroupCache::default());
        assert_eq!(read().unwrap().present().unwrap().cpuset, None, "the controller is not on");
        write(dir.path(), &[("unified/s/job_1/cpuset.cpus", "no list\n")]);
        assert_eq!(read(), None);
    }

    #[test]
    fn without_a_readable_mount_the_state_is_unknown() {
        assert_eq!(
            CgroupMounts::default().read_cgroup("/s/job_1", &mut PopulatedCgroupCache::default()),
            None
        );
    }

    #[test]
    fn a_cgroup_is_gone_where_there_is_nothing_or_a_file_of_the_cgroup_above() {
        let (dir, mounts) = hierarchy();
        write(dir.path(), &[("unified/pjw/tasks", "17\n"), ("cpuset/pjw/tasks", "17\n")]);
        for path in ["/s/job_1", "/pjw/tasks", "/pjw/tasks/step_0"] {
            assert_eq!(
                mounts.read_cgroup(path, &mut PopulatedCgroupCache::default()),
                Some(Observed::Gone),
                "{path}"
            );
        }
        let hierarchy = CpusetMount::from_mounts(&mounts).unwrap();
        for path in ["/pjw/none", "/pjw/tasks", "/pjw/tasks/step_0"] {
            assert_eq!(hierarchy.cgroup(path).unwrap().remove(), Ok(()), "{path}");
        }
        assert!(dir.path().join("cpuset/pjw/tasks").exists());
        assert_eq!(hierarchy.cgroup("/pjw/tasks").unwrap().create(), Err(Errno::EEXIST));
    }
}
