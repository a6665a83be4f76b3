//! Flux: the prolog and epilog of the plugin `perilog.so`, run as root on each node.

use pjw_sources::announcement;

use super::{Scene, Variables};

pub(super) fn prolog(scene: &Scene) -> anyhow::Result<Variables> {
    let told = announcement::flux(&scene.marks)?;
    scene.desk.register(&told.job.clone(), told, scene.cores)?;
    Ok(Vec::new())
}

pub(super) fn epilog(scene: &Scene) -> anyhow::Result<Variables> {
    scene.desk.release(&announcement::flux(&scene.marks)?)?;
    Ok(Vec::new())
}
