//! Where cpusets are on this node, and who may write them.

use std::path::Path;

use nix::unistd::Uid;
use pjw_core::wall::{Cpusets, Ground, Mason};

use super::trial;
use crate::cgroup::Mounts;
use crate::walls::Tree;

/// Looks and tries, and says what was found.
pub(super) fn find() -> (Ground, Vec<String>) {
    let found = place().and_then(|(tree, cpusets, mason)| {
        let verdict = trial::run(&tree, mason)?;
        Ok((cpusets, verdict))
    });
    match found {
        Ok((cpusets, verdict)) => {
            let masks_last = verdict.masks_last;
            let sentences = vec![where_walls_are(&cpusets).to_owned(), about_masks(&verdict)];
            (Ground { cpusets, masks_last }, sentences)
        }
        Err(why) => {
            let sentence = format!("jobs are kept on their cores by affinity masks: {why}");
            (Ground { cpusets: Cpusets::Nowhere { why }, masks_last: trial::by_version() }, vec![sentence])
        }
    }
}

/// The hierarchy and its master, or why there is none for the warden.
fn place() -> Result<(Tree, Cpusets, Mason), String> {
    let tree = Tree::find(&Mounts::find());
    let tree = tree.ok_or("no cgroup hierarchy is mounted here, so there are no cpusets")?;
    if !Uid::effective().is_root() {
        return Err("only root may write cpusets: run pjwd as root".to_owned());
    }
    if !is_whole(&tree) {
        return Err(
            "only a part of the node's cgroups is seen here, as in a container: run pjwd on the node \
                    itself"
                .to_owned(),
        );
    }
    if !tree.unified {
        return Ok((tree, Cpusets::Legacy, Mason::Warden));
    }
    let controllers = tree.top().read("cgroup.controllers").unwrap_or_default();
    if !controllers.split_ascii_whitespace().any(|controller| controller == "cpuset") {
        return Err(
            "cgroup v2 has no controller cpuset here: the kernel is without CONFIG_CPUSETS, or was told \
                    cgroup_disable=cpuset"
                .to_owned(),
        );
    }
    // The test of sd_booted(3).
    if Path::new("/run/systemd/system").is_dir() {
        return Ok((tree, Cpusets::Systemd, Mason::Systemd));
    }
    Ok((tree, Cpusets::Unified, Mason::Warden))
}

/// Whether the mount shows the hierarchy from its very top: files of which the top has none, and one that only it has.
fn is_whole(tree: &Tree) -> bool {
    let top = tree.top();
    if tree.unified { top.read("cgroup.events").is_err() } else { top.dir.join("release_agent").exists() }
}

fn where_walls_are(cpusets: &Cpusets) -> &'static str {
    match cpusets {
        Cpusets::Systemd => "jobs are kept on their cores by cpusets: scopes of systemd's below pjw.slice",
        Cpusets::Unified => "jobs are kept on their cores by cpusets: directories below /pjw of cgroup v2",
        Cpusets::Legacy => {
            "jobs are kept on their cores by cpusets: directories below /pjw of the v1 hierarchy"
        }
        Cpusets::Nowhere { .. } => "jobs are kept on their cores by affinity masks",
    }
}

fn about_masks(verdict: &trial::Verdict) -> String {
    let how = if verdict.tried { "tried" } else { "by the kernel's version, for there is one CPU only" };
    if verdict.masks_last {
        format!("a mask that a program set outlives a change of its cpuset ({how})")
    } else {
        format!("a change of a cpuset wipes the masks inside, which pjwd puts back ({how})")
    }
}
