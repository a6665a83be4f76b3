//! LSF and OpenLava: `PRE_EXEC`, `POST_EXEC`, their `HOST_` kind, and `JOB_STARTER`.
//!
//! Only where a site has them run as root do the first ones register anything; the starter always runs as the job's
//! owner.

use pjw_sources::announcement;

use super::{Scene, Variables, is_root, variables};

pub(super) fn pre_exec(scene: &Scene) -> anyhow::Result<Variables> {
    if is_root() {
        let told = announcement::lsf(&scene.marks, &scene.host)?;
        scene.desk.register(&told.job.clone(), told, scene.cores)?;
    }
    Ok(Vec::new())
}

pub(super) fn post_exec(scene: &Scene) -> anyhow::Result<Variables> {
    if is_root() {
        scene.desk.release(&announcement::lsf(&scene.marks, &scene.host)?)?;
    }
    Ok(Vec::new())
}

pub(super) fn starter(scene: &Scene) -> anyhow::Result<Variables> {
    variables::of_starter(scene, &announcement::lsf(&scene.marks, &scene.host)?)
}
