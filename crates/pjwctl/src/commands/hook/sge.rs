//! Grid Engine: `prolog`, `epilog` and `starter_method` of queue_conf(5).
//!
//! Prolog and epilog run as the job's owner unless their line begins with `root@`, and only on the job's first host.

use pjw_sources::announcement::{self, Announcement};

use super::{Scene, Variables, is_root, variables};

pub(super) fn prolog(scene: &Scene) -> anyhow::Result<Variables> {
    if is_root() {
        let told = told(scene)?;
        scene.desk.register(&told.job.clone(), told, scene.cores)?;
    }
    Ok(Vec::new())
}

pub(super) fn epilog(scene: &Scene) -> anyhow::Result<Variables> {
    if is_root() {
        scene.desk.release(&told(scene)?)?;
    }
    Ok(Vec::new())
}

pub(super) fn starter(scene: &Scene) -> anyhow::Result<Variables> {
    variables::of_starter(scene, &announcement::sge(&scene.marks, &scene.host, None, None)?)
}

fn told(scene: &Scene) -> anyhow::Result<Announcement> {
    let hostfile = scene.file_of("PE_HOSTFILE");
    let owner = scene.words.first().map(String::as_str);
    Ok(announcement::sge(&scene.marks, &scene.host, owner, hostfile.as_deref())?)
}
