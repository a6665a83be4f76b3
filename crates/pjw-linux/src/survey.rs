//! What the kernel and its administrator set up, as far as reading tells: nothing is tried out, nothing is changed.
//!
//! For `pjwctl doctor`. Every file may be absent or unreadable, in a container most of them are.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use nix::sys::utsname::uname;
use nix::unistd::{AccessFlags, access};
use pjw_core::cpuset::CpuSet;
use pjw_core::diagnosis::HostFacts;
use pjw_core::wall::{Cpusets, Ground};

use crate::cgroup::Mounts;
use crate::probe;

/// No file that is read here is longer; what is beyond is not read.
const MOST_BYTES: u64 = 1 << 20;
/// systemd's own test for being in charge, sd_booted(3).
const SYSTEMD_RUNS: &str = "/run/systemd/system";

/// A text file as far as it can and may be read.
#[must_use]
pub fn text_of(path: &Path) -> Option<String> {
    // Opening a pipe or a device could wait for ever.
    if !fs::metadata(path).ok()?.is_file() {
        return None;
    }
    let mut bytes = Vec::new();
    File::open(path).ok()?.take(MOST_BYTES).read_to_end(&mut bytes).ok()?;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

fn word(path: &str) -> Option<String> {
    text_of(Path::new(path)).map(|text| text.trim().to_owned())
}

fn set(path: &str) -> CpuSet {
    // nohz_full reads "(null)" where there is none.
    word(path).and_then(|text| text.parse().ok()).unwrap_or_default()
}

fn switch(path: &str) -> Option<bool> {
    word(path).map(|text| text != "0")
}

/// Looks. Whether this is a container, and what could not be looked at, is told by the processes.
#[must_use]
pub fn host_facts(online: &CpuSet) -> HostFacts {
    let mounts = Mounts::find();
    HostFacts {
        kernel: release(),
        layout: mounts.layout().to_owned(),
        cpuset: where_cpusets_are(&mounts),
        psi: fs::read("/proc/pressure/cpu").is_ok(),
        schedstat: Path::new("/proc/self/schedstat").exists(),
        no_events: probe::events_or_why_not().err(),
        btf: Path::new("/sys/kernel/btf/vmlinux").exists(),
        isolated: set("/sys/devices/system/cpu/isolated"),
        nohz_full: set("/sys/devices/system/cpu/nohz_full"),
        numa_balancing: switch("/proc/sys/kernel/numa_balancing"),
        autogroup: switch("/proc/sys/kernel/sched_autogroup_enabled"),
        smt: word("/sys/devices/system/cpu/smt/control").unwrap_or_default(),
        governors: governors(online),
        container: false,
        hides_processes: !Path::new("/proc/1/stat").exists(),
        blind: None,
    }
}

fn release() -> String {
    uname().map(|name| name.release().to_string_lossy().into_owned()).unwrap_or_default()
}

fn governors(online: &CpuSet) -> BTreeMap<String, CpuSet> {
    let mut governors: BTreeMap<String, CpuSet> = BTreeMap::new();
    for pu in online.iter() {
        let governor = word(&format!("/sys/devices/system/cpu/cpu{pu}/cpufreq/scaling_governor"));
        if let Some(governor) = governor.filter(|governor| !governor.is_empty()) {
            governors.entry(governor).or_default().insert(pu);
        }
    }
    governors
}

fn legacy_cpuset(mounts: &Mounts) -> Option<&PathBuf> {
    let has = |options: &str| options.split(',').any(|option| option == "cpuset");
    mounts.legacy.iter().find(|(options, _)| has(options)).map(|(_, mount)| mount)
}

fn controllers(file: &Path) -> Option<bool> {
    text_of(file).map(|text| text.split_ascii_whitespace().any(|controller| controller == "cpuset"))
}

/// Whether a job's cgroup has a cpuset; `None` where nobody can tell.
#[must_use]
pub fn has_cpuset(mounts: &Mounts, path: &str) -> Option<bool> {
    let relative = path.trim_start_matches('/');
    if relative.is_empty() || Path::new(relative).components().any(|part| part.as_os_str() == "..") {
        return None;
    }
    match (legacy_cpuset(mounts), &mounts.unified) {
        // In v1 a batch system has a directory there or has none; that it has none is its own choice.
        (Some(_), _) | (None, None) => None,
        (None, Some(mount)) => controllers(&mount.join(relative).join("cgroup.controllers")),
    }
}

/// In words: the hierarchy, and how far down v2 hands the controller on.
fn where_cpusets_are(mounts: &Mounts) -> String {
    if let Some(mount) = legacy_cpuset(mounts) {
        return format!("cpusets in v1 at {}", mount.display());
    }
    let Some(mount) = &mounts.unified else { return "no hierarchy with cpusets is mounted".to_owned() };
    match controllers(&mount.join("cgroup.controllers")) {
        None => return format!("cpusets of v2 at {} can't be read", mount.display()),
        Some(false) => return format!("v2 at {} has no cpuset controller", mount.display()),
        Some(true) => {}
    }
    let parts = ["", "system.slice", "system.slice/slurmstepd.scope", "user.slice", "pjw.slice", "pjw"];
    let handed = |part: &&str| controllers(&mount.join(part).join("cgroup.subtree_control")) == Some(true);
    let below: Vec<&str> =
        parts.into_iter().filter(handed).map(|part| if part.is_empty() { "/" } else { part }).collect();
    if below.is_empty() {
        format!("cpusets in v2 at {}, handed on to nobody yet", mount.display())
    } else {
        format!("cpusets in v2 at {}, handed on below {}", mount.display(), below.join(", "))
    }
}

/// What the node seems to offer for walls, without trying: what is mounted, who is in charge of it, whether root could
/// write there. Whether masks last is taken from the kernel's version here.
#[must_use]
pub fn ground_by_looking() -> Ground {
    let mounts = Mounts::find();
    let is_root = nix::unistd::Uid::effective().is_root();
    let text = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let cpusets = cpusets(&mounts, is_root, &text, Path::new(SYSTEMD_RUNS).is_dir());
    Ground { cpusets, masks_last: masks_last_by_version() }
}

fn cpusets(mounts: &Mounts, is_root: bool, mount_lines: &str, systemd: bool) -> Cpusets {
    let nowhere = |why: String| Cpusets::Nowhere { why };
    let (place, kind) = match (legacy_cpuset(mounts), &mounts.unified) {
        (Some(mount), _) => (mount, Cpusets::Legacy),
        (None, Some(mount)) => match controllers(&mount.join("cgroup.controllers")) {
            Some(true) if systemd => (mount, Cpusets::Systemd),
            Some(true) => (mount, Cpusets::Unified),
            _ => return nowhere(format!("the hierarchy at {} has no cpuset controller", mount.display())),
        },
        (None, None) => return nowhere("no cgroup hierarchy is mounted".to_owned()),
    };
    if is_read_only(mount_lines, place) {
        return nowhere(format!(
            "{} is mounted read-only, as in a container: run pjwd on the host",
            place.display()
        ));
    }
    // Root may write whatever the mode says; another user only what was delegated.
    if is_root && access(place, AccessFlags::W_OK).is_err() {
        return nowhere(format!("{} can't be written here, not even by root", place.display()));
    }
    kind
}

fn is_read_only(mount_lines: &str, place: &Path) -> bool {
    let mut read_only = false;
    for line in mount_lines.lines() {
        let mut words = line.split_ascii_whitespace().skip(1);
        if let (Some(target), Some(_), Some(options)) = (words.next(), words.next(), words.next())
            && Path::new(target) == place
        {
            // The last mount on a place is the one that is seen.
            read_only = options.split(',').next() == Some("ro");
        }
    }
    read_only
}

/// Whether a mask that somebody asked for outlives a change of the cpuset, going by the kernel's version.
pub(crate) fn masks_last_by_version() -> bool {
    masks_last(&release())
}

/// Linux 6.2 and later remember a mask that somebody asked for (8f9ea86fdf99).
fn masks_last(release: &str) -> bool {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse::<u32>);
    match (numbers.next(), numbers.next()) {
        (Some(Ok(major)), Some(Ok(minor))) => (major, minor) >= (6, 2),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masks_last_from_linux_6_2_on() {
        for (release, expected) in [
            ("6.2.0", true),
            ("6.18.44-fc-v669", true),
            ("10.0", true),
            ("6.1.0-28-amd64", false),
            ("4.18.0-553.el8.x86_64", false),
            ("", false),
            ("nonsense", false),
            ("99999999999.1", false),
        ] {
            assert_eq!(masks_last(release), expected, "{release}");
        }
    }

    fn v2(controllers: &str) -> (tempfile::TempDir, Mounts) {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("cgroup.controllers"), controllers).unwrap();
        let mounts = Mounts { unified: Some(dir.path().to_owned()), legacy: Vec::new() };
        (dir, mounts)
    }

    #[test]
    fn who_is_in_charge_of_v2_decides_who_makes_walls() {
        let (_dir, mounts) = v2("cpuset cpu memory\n");
        assert_eq!(cpusets(&mounts, true, "", true), Cpusets::Systemd);
        assert_eq!(cpusets(&mounts, true, "", false), Cpusets::Unified);
    }

    #[test]
    fn where_nothing_can_be_written_the_reason_is_told() {
        let why = |mounts: &Mounts, lines: &str| match cpusets(mounts, true, lines, true) {
            Cpusets::Nowhere { why } => why,
            other => format!("{other:?}"),
        };
        let (dir, mounts) = v2("cpu memory\n");
        assert!(why(&mounts, "").contains("no cpuset controller"));
        assert!(why(&Mounts::default(), "").contains("no cgroup hierarchy"));
        fs::write(dir.path().join("cgroup.controllers"), "cpuset\n").unwrap();
        let place = dir.path().display();
        let line = format!("cgroup2 {place} cgroup2 ro,nosuid 0 0\n");
        assert!(why(&mounts, &line).contains("read-only"));
        let remounted = format!("{line}cgroup2 {place} cgroup2 rw,nosuid 0 0\n");
        assert_eq!(why(&mounts, &remounted), "Systemd");
    }

    #[test]
    fn how_far_the_controller_is_handed_on_is_told() {
        let (dir, mounts) = v2("cpuset cpu\n");
        assert!(where_cpusets_are(&mounts).ends_with("handed on to nobody yet"));
        fs::create_dir(dir.path().join("system.slice")).unwrap();
        fs::write(dir.path().join("cgroup.subtree_control"), "cpu cpuset\n").unwrap();
        fs::write(dir.path().join("system.slice/cgroup.subtree_control"), "cpu cpuset\n").unwrap();
        assert!(where_cpusets_are(&mounts).ends_with("handed on below /, system.slice"));
    }

    #[test]
    fn this_host_is_looked_at_without_a_fault_whoever_looks() {
        let online = "0-1".parse().unwrap();
        let facts = host_facts(&online);
        assert!(facts.kernel.contains('.'), "{facts:?}");
        assert!(!facts.cpuset.is_empty());
        let _ = ground_by_looking();
        assert_eq!(has_cpuset(&Mounts::find(), "/../etc"), None);
        assert_eq!(text_of(Path::new("/dev/zero")), None, "a device is no text");
    }
}
