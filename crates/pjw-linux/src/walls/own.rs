//! The warden's own directories: below `/pjw`, and `/pjw-…` at the top for what is isolated.
//!
//! In v2 the controller must be switched on from the top down, which nobody may have done before. Whether the warden
//! did is written on its own directory, in an extended attribute, so that the last wall's end switches it off again.

use nix::errno::Errno;
use pjw_core::wall::{OWN_DIRECTORY, WallOutcome};
use rustix::fs::XattrFlags;

use super::bounds::cant;
use super::refused;
use super::tree::{Group, Tree};

const SWITCHES: &str = "cgroup.subtree_control";
/// `user.` attributes of cgroups are there since Linux 5.7, `trusted.` ones before; those need `CAP_SYS_ADMIN`.
const MARKS: [&str; 2] = ["user.pjw.switched-on", "trusted.pjw.switched-on"];

/// Makes the cgroups above a wall and the wall's own.
pub(super) fn make(tree: &Tree, wall: &Group) -> Result<(), WallOutcome> {
    let base = tree.group(OWN_DIRECTORY).ok_or_else(|| refused(format!("{OWN_DIRECTORY} is no path")))?;
    let at_the_top = wall.parent().path == "/";
    if !is_own(wall) {
        return Err(refused(format!("{} is not the warden's own: it is not made", wall.path)));
    }
    let made = |group: &Group| group.make().map_err(|errno| cant(group, "be made", errno));
    if tree.unified {
        // Also for a wall at the top: it bears the mark.
        made(&base)?;
        switch_on(&tree.top(), Some(&base))?;
        if !at_the_top {
            switch_on(&base, None)?;
        }
    } else if !at_the_top {
        made(&base)?;
        widen(tree, &base)?;
    }
    made(wall)
}

/// Whether a path is one that the warden makes itself.
pub(super) fn is_own(wall: &Group) -> bool {
    let name = wall.path.strip_prefix(OWN_DIRECTORY).and_then(|rest| rest.strip_prefix(['/', '-']));
    name.is_some_and(|name| !name.is_empty() && !name.contains('/'))
}

/// Gives the directory above the walls everything, again after every hotplug: v1 takes a CPU that was off away for good.
fn widen(tree: &Tree, base: &Group) -> Result<(), WallOutcome> {
    let top = tree.top().files().map_err(|errno| cant(&tree.top(), "be read", errno))?;
    let now = base.files().map_err(|errno| cant(base, "be read", errno))?;
    for (file, now, all) in [("cpuset.mems", now.mems, top.mems), ("cpuset.cpus", now.cpus, top.cpus)] {
        if now != all {
            base.write(file, &all.to_string())
                .map_err(|errno| cant(base, &format!("get {file} {all}"), errno))?;
        }
    }
    Ok(())
}

/// Repairs what hotplug did to the directory above a wall of one's own.
pub(super) fn repair_above(tree: &Tree, wall: &Group) {
    let above = wall.parent();
    if !tree.unified && above.path == OWN_DIRECTORY {
        // Whoever needs it is refused by the kernel with a reason of its own.
        let _ = widen(tree, &above);
    }
}

/// Whether a controller is switched on for what is right below a group.
pub(super) fn switches(group: &Group, controller: &str) -> bool {
    group.read(SWITCHES).is_ok_and(|text| text.split_ascii_whitespace().any(|word| word == controller))
}

pub(super) fn switch_on(group: &Group, mark_on: Option<&Group>) -> Result<(), WallOutcome> {
    if switches(group, "cpuset") {
        return Ok(());
    }
    // The mark first: what is marked and not switched on is put right by the end of the last wall.
    if let Some(base) = mark_on
        && !MARKS.iter().any(|name| rustix::fs::setxattr(&base.dir, *name, b"1", XattrFlags::empty()).is_ok())
    {
        tracing::warn!(
            cgroup = base.path,
            "no mark can be left: the controller cpuset will stay switched on"
        );
    }
    group.write(SWITCHES, "+cpuset").map_err(|errno| {
        let why = match errno {
            Errno::ENOENT if group.path != "/" => return WallOutcome::Gone,
            Errno::ENOENT | Errno::EINVAL => "this kernel has no cpusets in v2, or v1 has them",
            Errno::EBUSY => "processes are right in it",
            other => other.desc(),
        };
        refused(format!("cpusets can't be switched on below {}: {why} ({errno:?})", group.path))
    })
}

/// After a wall's end: the directory above goes with the last one, and what it needed is switched off again, unless
/// somebody else came to use it.
pub(super) fn tidy_up(tree: &Tree) {
    let Some(base) = tree.group(OWN_DIRECTORY) else { return };
    let prefix = format!("{OWN_DIRECTORY}-");
    let others = tree.top().children();
    let is_last = base.children().is_empty() && !others.iter().any(|group| group.path.starts_with(&prefix));
    if !base.exists() || !is_last || base.read("cgroup.procs").is_ok_and(|procs| !procs.is_empty()) {
        return;
    }
    let mut buffer = [0u8; 8];
    let marked = MARKS.iter().any(|name| rustix::fs::getxattr(&base.dir, *name, &mut buffer[..]).is_ok());
    let used = |group: &Group| {
        let files = group.files().unwrap_or_default();
        let is_member = matches!(files.partition.as_str(), "" | "member");
        switches(group, "cpuset") || !files.cpus.is_empty() || !files.mems.is_empty() || !is_member
    };
    if tree.unified && marked && !others.iter().filter(|group| group.path != base.path).any(used) {
        let off = base.write(SWITCHES, "-cpuset").and_then(|()| tree.top().write(SWITCHES, "-cpuset"));
        if let Err(errno) = off {
            tracing::warn!(%errno, "the controller cpuset could not be switched off again");
        }
    }
    // Not with what is below it: another warden may have made a wall there just now.
    let _ = std::fs::remove_dir(&base.dir);
}
