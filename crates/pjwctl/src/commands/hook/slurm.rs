//! Slurm: `Prolog`, `Epilog` and `TaskProlog` of slurm.conf(5).
//!
//! The prolog runs as root before the job's cgroup is there, with next to no environment. Where Slurm gives the job a
//! cpuset itself (`ConstrainCores=yes`), cores taken beforehand would only be others than Slurm's: then it takes none.

use std::path::Path;

use pjw_core::job::JobId;
use pjw_sources::announcement::{self, Announcement};
use pjw_sources::slurm_conf::{self, SlurmConf};
use pjw_sources::task;

use super::{Scene, Variables, file, variables};

const CONF: &str = "/etc/slurm/slurm.conf";

pub(super) fn prolog(scene: &Scene) -> anyhow::Result<Variables> {
    let told = announcement::slurm(&scene.marks, &scene.host)?;
    let conf = conf(scene);
    if !conf.constrains_cores {
        let job = name(&told, conf);
        scene.desk.register(&job, told, scene.cores)?;
    }
    Ok(Vec::new())
}

pub(super) fn epilog(scene: &Scene) -> anyhow::Result<Variables> {
    scene.desk.release(&announcement::slurm(&scene.marks, &scene.host)?)?;
    Ok(Vec::new())
}

pub(super) fn task_prolog(scene: &Scene) -> anyhow::Result<Variables> {
    let told = announcement::slurm(&scene.marks, &scene.host)?;
    let Some((status, job)) = scene.desk.seated(&told)? else { return Ok(Vec::new()) };
    let task = task::of_slurm(&scene.marks, &scene.host);
    variables::of_task(scene, &status, &job, task)
}

/// The id by which the job will be found: that of its directory.
fn name(told: &Announcement, conf: SlurmConf) -> JobId {
    told.alias.as_ref().filter(|_| conf.sluid_directories).unwrap_or(&told.job).clone()
}

fn conf(scene: &Scene) -> SlurmConf {
    let slurm = Path::new(scene.variable("SLURM_CONF").unwrap_or(CONF));
    let unified = Path::new("/sys/fs/cgroup/cgroup.controllers").exists();
    let text = |path: &Path| file(path).unwrap_or_default();
    slurm_conf::read(&text(slurm), &text(&slurm.with_file_name("cgroup.conf")), unified)
}
