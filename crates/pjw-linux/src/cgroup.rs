//! Cgroup directories of jobs: are they there, does anyone live in them, what do their cpusets allow.
//!
//! A job's directory is known by its path in `/proc/PID/cgroup`, which is the same in every hierarchy that the
//! scheduler uses; the cpuset may be in another one. v2 (`cpuset.cpus` set, `cpuset.cpus.effective` read:
//! Documentation/admin-guide/cgroup-v2.rst) and v1 (cgroups(7)), alone or mixed. Nothing is written here.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::{fs, io};

use nix::errno::Errno;
use pjw_core::cpuset::CpuSet;
use pjw_core::process::CgroupId;
use pjw_core::snapshot::{Cgroup, Cpuset, Seen};
use pjw_core::wall::lies_in;

use crate::procfs::parse_cgroups;
use crate::walls::Tree;

/// A v1 directory tree larger than this counts as populated without being searched to its end.
const MOST_DIRECTORIES: usize = 256;

/// Where the hierarchies are mounted.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Mounts {
    /// The v2 hierarchy.
    pub unified: Option<PathBuf>,
    /// The v1 hierarchies, with their controllers or `name=…`.
    pub legacy: Vec<(String, PathBuf)>,
}

impl Mounts {
    /// Finds them.
    #[must_use]
    pub fn find() -> Self {
        fs::read_to_string("/proc/self/mounts").map(|text| Self::parse(&text)).unwrap_or_default()
    }

    /// Reads the lines of `/proc/self/mounts`, fstab(5).
    #[must_use]
    pub fn parse(text: &str) -> Self {
        let mut mounts = Self::default();
        for line in text.lines() {
            let mut words = line.split_ascii_whitespace().skip(1);
            let (Some(target), Some(kind), Some(options)) = (words.next(), words.next(), words.next()) else {
                continue;
            };
            match kind {
                "cgroup2" => {
                    mounts.unified.get_or_insert_with(|| PathBuf::from(target));
                }
                "cgroup" => mounts.legacy.push((options.to_owned(), PathBuf::from(target))),
                _ => {}
            }
        }
        mounts
    }

    /// What kind of layout this is, in a word.
    #[must_use]
    pub fn layout(&self) -> &'static str {
        match (&self.unified, self.legacy.is_empty()) {
            (Some(_), true) => "v2",
            (Some(_), false) => "hybrid",
            (None, false) => "v1",
            (None, true) => "none",
        }
    }

    /// Where the v1 hierarchy with the cpusets is mounted.
    #[must_use]
    pub fn legacy_cpuset(&self) -> Option<&Path> {
        let has = |options: &str| options.split(',').any(|option| option == "cpuset");
        self.legacy.iter().find(|(options, _)| has(options)).map(|(_, root)| root.as_path())
    }

    /// Looks at a job's directory; `None` if nobody can tell: no hierarchy is mounted here, the path is of another
    /// cgroup namespace, or the directory can't be looked at.
    #[must_use]
    pub fn look(&self, path: &str, residents: &mut Residents) -> Option<Seen<Cgroup>> {
        let relative = path.trim_start_matches('/');
        // A path that climbs out of the hierarchy is of another cgroup namespace.
        if relative.is_empty() || Path::new(relative).components().any(|part| part.as_os_str() == "..") {
            return None;
        }
        let unified = self.unified.iter().map(|mount| (mount.join(relative), true));
        let legacy = self.legacy.iter().map(|(_, mount)| (mount.join(relative), false));
        let mut found: Option<Cgroup> = None;
        let mut sure = self.unified.is_some() || !self.legacy.is_empty();
        for (dir, is_unified) in unified.chain(legacy) {
            let meta = match fs::metadata(&dir) {
                Ok(meta) => meta,
                Err(fault) => {
                    sure &= fault.kind() == io::ErrorKind::NotFound;
                    continue;
                }
            };
            let id = CgroupId { inode: meta.ino(), path: path.to_owned() };
            let cgroup = found.get_or_insert(Cgroup { id, cpus: None, populated: false, cpuset: None });
            cgroup.populated =
                cgroup.populated || if is_unified { populated(&dir) } else { residents.are_in(&dir, path) };
            if cgroup.cpus.is_none() {
                cgroup.cpus = if is_unified { narrowed(&dir) } else { self.narrowed_v1(&dir) };
            }
            if cgroup.populated && cgroup.cpus.is_some() {
                break;
            }
        }
        if let Some(cgroup) = &mut found {
            cgroup.cpuset = self.cpuset(path).ok()?;
        }
        found.map(Seen::Here).or_else(|| sure.then_some(Seen::Gone))
    }

    fn narrowed_v1(&self, dir: &Path) -> Option<CpuSet> {
        let cpus = list(&dir.join("cpuset.cpus"))?;
        let all = list(&self.legacy_cpuset()?.join("cpuset.cpus"))?;
        (cpus != all && !cpus.is_empty()).then_some(cpus)
    }

    /// The cpuset's files, where the directory is in the hierarchy that has them and the controller is on; an error
    /// if they are there and can't be read.
    fn cpuset(&self, path: &str) -> Result<Option<Cpuset>, Errno> {
        let Some(group) = Tree::find(self).and_then(|tree| tree.group(path)) else { return Ok(None) };
        let both = group.files().and_then(|files| Ok((files, group.effective_cpus()?)));
        match both {
            Ok((files, effective)) => Ok(Some(Cpuset {
                cpus: files.cpus,
                effective,
                mems: files.mems,
                isolated: files.partition == "isolated",
            })),
            Err(Errno::ENOENT | Errno::ENODEV | Errno::ENOTDIR) => Ok(None),
            Err(errno) => Err(errno),
        }
    }
}

fn narrowed(dir: &Path) -> Option<CpuSet> {
    let wish = list(&dir.join("cpuset.cpus"))?;
    if wish.is_empty() { None } else { list(&dir.join("cpuset.cpus.effective")) }
}

fn list(path: &Path) -> Option<CpuSet> {
    fs::read_to_string(path).ok()?.parse().ok()
}

/// What can't be read counts as populated: a job must not end because of that.
fn populated(dir: &Path) -> bool {
    match fs::read_to_string(dir.join("cgroup.events")) {
        Ok(text) => text.lines().any(|line| line == "populated 1"),
        Err(fault) => fault.kind() != io::ErrorKind::NotFound,
    }
}

/// Processes that were seen in directories of v1 hierarchies. Such a directory doesn't say whether anybody is in it, and
/// to list everybody costs the kernel time for each; to ask one of them where it is does not.
#[derive(Debug, Default)]
pub struct Residents(BTreeMap<PathBuf, u32>);

impl Residents {
    /// Whether any process is in a directory, or below it; `path` is the directory's in its hierarchy.
    fn are_in(&mut self, top: &Path, path: &str) -> bool {
        if self.0.get(top).is_some_and(|&pid| is_at(pid, path)) {
            return true;
        }
        match resident(top) {
            Resident::Here(pid) => drop(self.0.insert(top.to_owned(), pid)),
            Resident::Perhaps => {}
            Resident::Nobody => {
                self.0.remove(top);
                return false;
            }
        }
        true
    }

    /// Forgets those of directories that are gone.
    pub fn retain_existing(&mut self) {
        self.0.retain(|dir, _| dir.exists());
    }
}

/// Whether a process is in a directory of this path in some hierarchy. The kernel shows those that have ended at the top.
fn is_at(pid: u32, path: &str) -> bool {
    let lines = fs::read(format!("/proc/{pid}/cgroup")).unwrap_or_default();
    parse_cgroups(&lines).iter().any(|(_, place)| lies_in(place, path))
}

enum Resident {
    Here(u32),
    /// There are too many directories to look at all, or one can't be read: a job must not end because of that.
    Perhaps,
    Nobody,
}

fn is_gone(fault: &io::Error) -> bool {
    fault.kind() == io::ErrorKind::NotFound || fault.raw_os_error() == Some(libc::ENODEV)
}

fn resident(top: &Path) -> Resident {
    let mut left = vec![top.to_owned()];
    for _ in 0..MOST_DIRECTORIES {
        let Some(dir) = left.pop() else { return Resident::Nobody };
        let both = fs::read_to_string(dir.join("cgroup.procs"))
            .and_then(|listed| fs::read_dir(&dir).map(|below| (listed, below)));
        let (listed, below) = match both {
            Ok(both) => both,
            // A directory that is removed meanwhile had nobody in it.
            Err(fault) if is_gone(&fault) => continue,
            Err(_) => return Resident::Perhaps,
        };
        if let Some(pid) = listed.lines().find_map(|line| line.parse().ok()) {
            return Resident::Here(pid);
        }
        let below = below.flatten().filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
        left.extend(below.map(|entry| entry.path()));
    }
    Resident::Perhaps
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_layout_is_told_from_the_mounts() {
        let v1 = "cgroup /sys/fs/cgroup/cpuset cgroup rw,relatime,cpuset 0 0\n";
        let v2 = "cgroup2 /sys/fs/cgroup cgroup2 rw,nosuid 0 0\n";
        let layout = |text: &str| Mounts::parse(text).layout();
        assert_eq!(
            [layout(""), layout(v1), layout(v2), layout(&format!("{v1}{v2}"))],
            ["none", "v1", "v2", "hybrid"]
        );
    }

    #[test]
    fn a_resident_of_a_v1_directory_is_asked_instead_of_the_directory() {
        let dir = tempfile::tempdir().unwrap();
        let list = |text: &str| fs::write(dir.path().join("cgroup.procs"), text).unwrap();
        let ours = fs::read_to_string("/proc/self/cgroup").unwrap();
        let ours = ours.lines().next().and_then(|line| line.splitn(3, ':').nth(2)).unwrap();
        let mut residents = Residents::default();
        list("");
        assert!(!residents.are_in(dir.path(), ours));
        list(&format!("{}\n", std::process::id()));
        assert!(residents.are_in(dir.path(), ours));
        list("");
        assert!(residents.are_in(dir.path(), ours), "we are asked, and are there");
        assert!(!residents.are_in(dir.path(), "/moved/away"), "we say that we are not, and nobody else is");
        assert!(!residents.are_in(dir.path(), ours), "we are forgotten");
        fs::remove_file(dir.path().join("cgroup.procs")).unwrap();
        fs::create_dir(dir.path().join("cgroup.procs")).unwrap();
        assert!(residents.are_in(dir.path(), ours), "what can't be read counts as populated");
    }

    fn tree() -> (tempfile::TempDir, Mounts) {
        let dir = tempfile::tempdir().unwrap();
        let mounts = Mounts {
            unified: Some(dir.path().join("unified")),
            legacy: vec![("rw,cpuset".to_owned(), dir.path().join("cpuset"))],
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
    fn a_cpuset_counts_where_somebody_set_it() {
        let (dir, mounts) = tree();
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
        let told: Vec<_> = (1..=5)
            .map(|n| match mounts.look(&format!("/s/job_{n}"), &mut Residents::default()) {
                Some(Seen::Here(cgroup)) => {
                    let cpus = cgroup.cpus.map_or("-".to_owned(), |cpus| cpus.to_string());
                    format!("{cpus} {}", cgroup.populated)
                }
                Some(Seen::Gone) => "gone".to_owned(),
                None => "unknown".to_owned(),
            })
            .collect();
        assert_eq!(told, ["- true", "2-5 false", "- false", "3 true", "gone"]);
    }

    #[test]
    fn a_path_that_climbs_out_is_not_followed() {
        let (dir, mounts) = tree();
        write(dir.path(), &[("secret/cgroup.procs", "1\n"), ("unified/a", "")]);
        assert_eq!(mounts.look("/../secret", &mut Residents::default()), None);
        assert_eq!(mounts.look("/", &mut Residents::default()), None);
    }

    #[test]
    fn a_cpuset_that_cannot_be_read_is_not_said_to_be_none() {
        let (dir, mut mounts) = tree();
        mounts.legacy.clear();
        write(dir.path(), &[("unified/s/job_1/cgroup.events", "populated 1\n")]);
        let look = || mounts.look("/s/job_1", &mut Residents::default());
        assert_eq!(look().unwrap().here().unwrap().cpuset, None, "the controller is not on");
        write(dir.path(), &[("unified/s/job_1/cpuset.cpus", "no list\n")]);
        assert_eq!(look(), None);
    }

    #[test]
    fn where_nothing_is_mounted_or_readable_nothing_is_said_to_be_gone() {
        assert_eq!(Mounts::default().look("/s/job_1", &mut Residents::default()), None);
        let (dir, mounts) = tree();
        write(dir.path(), &[("unified/file", "")]);
        assert_eq!(
            mounts.look("/file/job_1", &mut Residents::default()),
            None,
            "ENOTDIR says nothing about the job"
        );
        assert_eq!(mounts.look("/s/job_1", &mut Residents::default()), Some(Seen::Gone));
    }
}
