//! Configuration of the kernel and the machine, by reading files only. Nothing is changed.
//!
//! For `pjwctl doctor`. Every file may be missing or unreadable; in a container most of them are.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Read;
use std::path::Path;

use nix::unistd::{AccessFlags, access};
use pjw_core::cpuset_group::{CpusetHierarchy, CpusetSupport, IdlePrioritySupport};
use pjw_core::{cpuset::CpuSet, diagnosis::HostFacts};

use crate::cgroup::{CgroupMounts, CpusetMount, mount_fields, read_mount_list};
use crate::{probe, sys::version, systemd};

/// The largest part of a file that is read, in bytes.
const MAX_BYTES: u64 = 1 << 20;

/// Reads the regular file at `path`, and returns its text. Reads at most the first MiB. Each invalid UTF-8
/// sequence is replaced by U+FFFD. Returns `None` if the file can't be read, or if it is a device, a pipe or a
/// directory.
#[must_use]
pub fn read_regular_file(path: &Path) -> Option<String> {
    // Opening a pipe or a device could block.
    if !fs::metadata(path).ok()?.is_file() {
        return None;
    }
    let mut bytes = Vec::new();
    File::open(path).ok()?.take(MAX_BYTES).read_to_end(&mut bytes).ok()?;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

fn trimmed_text(path: &str) -> Option<String> {
    read_regular_file(Path::new(path)).map(|text| text.trim().to_owned())
}

fn cpu_list(path: &str) -> CpuSet {
    // nohz_full contains "(null)" if it is not set.
    trimmed_text(path).and_then(|text| text.parse().ok()).unwrap_or_default()
}

fn is_enabled(path: &str) -> Option<bool> {
    trimmed_text(path).map(|text| text != "0")
}

/// Reads the settings of the kernel and of this host that `pjwctl doctor` checks, such as the kernel release and the
/// isolated CPUs. `online` is the set of online PUs (logical CPUs). The function reads the frequency governor of each
/// of these PUs. The function also tests whether the kernel reports process events ([`probe::open_process_events`]),
/// which can take 200 ms.
///
/// The caller must set two fields of the result that this function does not determine: `in_container` (here false) and
/// `incomplete_scan_reason` (here `None`).
#[must_use]
pub fn read_host_facts(online: &CpuSet) -> HostFacts {
    let mounts = CgroupMounts::read();
    HostFacts {
        kernel_release: version::kernel_release(),
        cgroup_layout: mounts.layout_name().to_owned(),
        cpuset_hierarchy: describe_cpusets(&mounts),
        has_psi: fs::read("/proc/pressure/cpu").is_ok(),
        has_schedstat: Path::new("/proc/self/schedstat").exists(),
        no_fork_events_reason: probe::open_process_events().err(),
        has_btf: Path::new("/sys/kernel/btf/vmlinux").exists(),
        isolated_cpus: cpu_list("/sys/devices/system/cpu/isolated"),
        nohz_full_cpus: cpu_list("/sys/devices/system/cpu/nohz_full"),
        numa_balancing_enabled: is_enabled("/proc/sys/kernel/numa_balancing"),
        autogroup_enabled: is_enabled("/proc/sys/kernel/sched_autogroup_enabled"),
        preemption_model: trimmed_text("/sys/kernel/debug/sched/preempt")
            .and_then(|text| parse_preemption_model(&text)),
        smt_state: trimmed_text("/sys/devices/system/cpu/smt/control").unwrap_or_default(),
        cpufreq_governors: read_governors(online),
        has_systemd: systemd::is_running(),
        in_container: false,
        hides_processes: !Path::new("/proc/1/stat").exists(),
        incomplete_scan_reason: None,
    }
}

/// Returns the preemption model of the kernel that is in force: the word in parentheses in `text`, such as
/// `none voluntary (full) lazy`. `None` if there is no such word.
fn parse_preemption_model(text: &str) -> Option<String> {
    let words = text.split_whitespace();
    let mut in_parentheses = words.filter_map(|word| word.strip_prefix('(')?.strip_suffix(')'));
    in_parentheses.find(|model| !model.is_empty()).map(str::to_owned)
}

/// Returns the PUs (logical CPUs) in `online` by the name of their CPU frequency governor. Leaves out PUs without a
/// governor.
fn read_governors(online: &CpuSet) -> BTreeMap<String, CpuSet> {
    let mut governors: BTreeMap<String, CpuSet> = BTreeMap::new();
    for pu in online.iter() {
        let governor = trimmed_text(&format!("/sys/devices/system/cpu/cpu{pu}/cpufreq/scaling_governor"));
        if let Some(governor) = governor.filter(|governor| !governor.is_empty()) {
            governors.entry(governor).or_default().insert(pu);
        }
    }
    governors
}

/// Returns whether the v2 cgroup at `cgroup_path` has the cpuset controller: whether its file
/// `cgroup.controllers` lists `cpuset`. `mounts` has the mounted cgroup hierarchies. `cgroup_path` is a path as
/// in `/proc/PID/cgroup`. Returns `None` in these cases:
///
/// - A v1 hierarchy with the cpuset controller is mounted. No v2 cgroup can have the controller then.
/// - No v2 hierarchy is mounted.
/// - `cgroup_path` is `/`, or lies outside this process's cgroup namespace.
/// - The file `cgroup.controllers` can't be read.
#[must_use]
pub fn has_cpuset_controller(mounts: &CgroupMounts, cgroup_path: &str) -> Option<bool> {
    // In v1 a batch system chooses whether to create a cpuset directory.
    let mount = CpusetMount::from_mounts(mounts).filter(|mount| mount.is_unified)?;
    let group = mount.cgroup(cgroup_path).filter(|group| group.path != "/")?;
    group.has_controller("cpuset").ok()
}

/// Returns a sentence for `pjwctl doctor` about the mounted hierarchy with the cpuset controller. In cgroup v2, the
/// sentence also names some cgroups for whose children the controller is enabled.
fn describe_cpusets(mounts: &CgroupMounts) -> String {
    let Some(mount) = CpusetMount::from_mounts(mounts) else {
        return "no hierarchy with cpusets is mounted".to_owned();
    };
    let at = mount.mount_point.display();
    if !mount.is_unified {
        return format!("cpusets in v1 at {at}");
    }
    match mount.root().has_controller("cpuset") {
        Err(_) => return format!("cpusets of v2 at {at} can't be read"),
        Ok(false) => return format!("v2 at {at} has no cpuset controller"),
        Ok(true) => {}
    }
    let paths = ["", "system.slice", "system.slice/slurmstepd.scope", "user.slice", "pjw.slice", "pjw"];
    let is_enabled_below = |path: &&str| {
        mount.cgroup(&format!("/{path}")).is_some_and(|group| group.enables_controller("cpuset"))
    };
    let below: Vec<&str> = paths
        .into_iter()
        .filter(is_enabled_below)
        .map(|path| if path.is_empty() { "/" } else { path })
        .collect();
    if below.is_empty() {
        format!("cpusets in v2 at {at}, not enabled for any cgroup yet")
    } else {
        format!("cpusets in v2 at {at}, enabled below {}", below.join(", "))
    }
}

/// Determines in which cgroup hierarchy pjw can create cpusets, or why pjw can create none. Only reads files:
/// unlike [`probe::probe_cpuset_support`], this function does not create a cpuset as a test. So these fields of
/// the result are derived, and not tested:
///
/// - [`CpusetSupport::affinity_persists`] is derived from the kernel version.
/// - [`CpusetSupport::idle_priority`] and [`CpusetSupport::can_freeze`] are derived from the kernel version and
///   the mounted controllers.
#[must_use]
pub fn read_cpuset_support() -> CpusetSupport {
    let text = read_mount_list().unwrap_or_default();
    let mounts = CgroupMounts::parse(&text);
    let is_root = nix::unistd::Uid::effective().is_root();
    let hierarchy = find_hierarchy(&mounts, is_root, &text, systemd::is_running());
    let mount = CpusetMount::from_mounts(&mounts);
    let obstacle = match &hierarchy {
        CpusetHierarchy::Unavailable { why } => Some(why.clone()),
        _ => mount.as_ref().and_then(probe::idle_obstacle),
    };
    let is_available = !matches!(hierarchy, CpusetHierarchy::Unavailable { .. });
    CpusetSupport {
        hierarchy,
        affinity_persists: version::affinity_survives_by_version(),
        idle_priority: match obstacle {
            None => IdlePrioritySupport::Available,
            Some(why) => IdlePrioritySupport::Unavailable { why },
        },
        can_freeze: is_available && mount.as_ref().is_some_and(probe::has_freezer),
    }
}

/// Determines from the mounted hierarchies `mounts` how pjwd can use cpusets, or why it can't use them. Writes nothing.
/// `is_root` says whether this process runs as root, `mount_lines` is the list of mounts that the kernel shows, and
/// `systemd` says whether systemd manages this machine.
fn find_hierarchy(mounts: &CgroupMounts, is_root: bool, mount_lines: &str, systemd: bool) -> CpusetHierarchy {
    let unavailable = |why: String| CpusetHierarchy::Unavailable { why };
    let Some(mount) = CpusetMount::from_mounts(mounts) else {
        return unavailable("no cgroup hierarchy is mounted".to_owned());
    };
    let mount_point = mount.mount_point.as_path();
    let at = mount_point.display();
    let Some(kind) = mount.hierarchy_kind(systemd) else {
        return unavailable(format!("the hierarchy at {at} has no cpuset controller"));
    };
    if is_read_only(mount_lines, mount_point) {
        return unavailable(format!("{at} is mounted read-only, as in a container: run pjwd on the host"));
    }
    // Root may write whatever the file mode is. Another user may write only in delegated cgroups.
    if is_root && access(mount_point, AccessFlags::W_OK).is_err() {
        return unavailable(format!("{at} can't be written, even as root"));
    }
    kind
}

/// Returns whether the last mount at `mount_point` in `mount_lines`, the kernel's list of mounts, is read-only. False
/// if nothing is mounted there.
fn is_read_only(mount_lines: &str, mount_point: &Path) -> bool {
    let mut read_only = false;
    for (target, _, options) in mount_fields(mount_lines) {
        if Path::new(target) == mount_point {
            // The last mount at a path hides the earlier ones.
            read_only = options.split(',').next() == Some("ro");
        }
    }
    read_only
}

#[cfg(test)]
mod tests {
    use super::*;

    fn v2(controllers: &str) -> (tempfile::TempDir, CgroupMounts) {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("cgroup.controllers"), controllers).unwrap();
        let mounts = CgroupMounts { v2_mount_point: Some(dir.path().to_owned()), v1_mounts: Vec::new() };
        (dir, mounts)
    }

    #[test]
    fn the_manager_of_v2_owns_new_cgroups() {
        let (_dir, mounts) = v2("cpuset cpu memory\n");
        assert_eq!(find_hierarchy(&mounts, true, "", true), CpusetHierarchy::Systemd);
        assert_eq!(find_hierarchy(&mounts, true, "", false), CpusetHierarchy::Unified);
    }

    #[test]
    fn a_hierarchy_that_is_not_writable_has_a_reason() {
        let why = |mounts: &CgroupMounts, lines: &str| match find_hierarchy(mounts, true, lines, true) {
            CpusetHierarchy::Unavailable { why } => why,
            other => format!("{other:?}"),
        };
        let (dir, mounts) = v2("cpu memory\n");
        assert!(why(&mounts, "").contains("no cpuset controller"));
        assert!(why(&CgroupMounts::default(), "").contains("no cgroup hierarchy"));
        fs::write(dir.path().join("cgroup.controllers"), "cpuset\n").unwrap();
        let mount_point = dir.path().display();
        let line = format!("cgroup2 {mount_point} cgroup2 ro,nosuid 0 0\n");
        assert!(why(&mounts, &line).contains("read-only"));
        let remounted = format!("{line}cgroup2 {mount_point} cgroup2 rw,nosuid 0 0\n");
        assert_eq!(why(&mounts, &remounted), "Systemd");
    }

    #[test]
    fn the_preemption_model_is_the_word_in_parentheses() {
        assert_eq!(parse_preemption_model("none voluntary full (lazy)").as_deref(), Some("lazy"));
        assert_eq!(parse_preemption_model("(none) voluntary full\n").as_deref(), Some("none"));
        for garbage in ["", "none voluntary full", "(", ")(", "()", "(full", "full)", "( full )"] {
            assert_eq!(parse_preemption_model(garbage), None, "{garbage:?}");
        }
    }

    #[test]
    fn cgroups_that_enable_the_controller_are_listed() {
        let (dir, mounts) = v2("cpuset cpu\n");
        assert!(describe_cpusets(&mounts).ends_with("not enabled for any cgroup yet"));
        fs::create_dir(dir.path().join("system.slice")).unwrap();
        fs::write(dir.path().join("cgroup.subtree_control"), "cpu cpuset\n").unwrap();
        fs::write(dir.path().join("system.slice/cgroup.subtree_control"), "cpu cpuset\n").unwrap();
        assert!(describe_cpusets(&mounts).ends_with("enabled below /, system.slice"));
    }

    #[test]
    fn facts_of_this_host_are_read_for_any_user() {
        let online = "0-1".parse().unwrap();
        let facts = read_host_facts(&online);
        assert!(facts.kernel_release.contains('.'), "{facts:?}");
        assert!(!facts.cpuset_hierarchy.is_empty());
        let _ = read_cpuset_support();
        assert_eq!(has_cpuset_controller(&CgroupMounts::read(), "/../etc"), None);
        assert_eq!(read_regular_file(Path::new("/dev/zero")), None, "a device is no regular file");
    }
}
