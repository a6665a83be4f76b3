//! OpenPBS, whose hook in Python calls these with its arguments, and Torque's prologue and epilogue.

use pjw_sources::announcement::{self, Announcement};

use super::{Scene, Variables, variables};

pub(super) fn begin(scene: &Scene) -> anyhow::Result<Variables> {
    register(scene, announcement::openpbs(&scene.words())?)
}

pub(super) fn torque_begin(scene: &Scene) -> anyhow::Result<Variables> {
    register(scene, announcement::torque(&scene.words())?)
}

fn register(scene: &Scene, told: Announcement) -> anyhow::Result<Variables> {
    scene.desk.register(&told.job.clone(), told, scene.cores)?;
    Ok(Vec::new())
}

pub(super) fn end(scene: &Scene) -> anyhow::Result<Variables> {
    scene.desk.release(&announcement::openpbs(&scene.words())?)?;
    Ok(Vec::new())
}

pub(super) fn launch(scene: &Scene) -> anyhow::Result<Variables> {
    variables::of_job(scene, &announcement::pbs_task(&scene.marks)?)
}
