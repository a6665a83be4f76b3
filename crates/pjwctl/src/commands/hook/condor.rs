//! HTCondor: the hook that prepares a job, and `USER_JOB_WRAPPER`.
//!
//! HTCondor runs both as the job's user, who may not register jobs. Where a site has the first run as root all the same,
//! the job is registered.

use std::io::Read;

use pjw_sources::announcement::{self, Announcement};

use super::{LONGEST_FILE, Scene, Variables, is_root, variables};

pub(super) fn prepare(scene: &Scene) -> anyhow::Result<Variables> {
    // The starter writes the job's ad, and must not find a closed pipe.
    let mut ad = Vec::new();
    let _ = std::io::stdin().lock().take(LONGEST_FILE).read_to_end(&mut ad);
    if is_root() {
        let told = told(scene, &String::from_utf8_lossy(&ad))?;
        scene.desk.register(&told.job.clone(), told, scene.cores)?;
    }
    Ok(Vec::new())
}

pub(super) fn wrapper(scene: &Scene) -> anyhow::Result<Variables> {
    variables::of_starter(scene, &told(scene, "")?)
}

fn told(scene: &Scene, job_ad: &str) -> anyhow::Result<Announcement> {
    let machine_ad = scene.file_of("_CONDOR_MACHINE_AD").unwrap_or_default();
    Ok(announcement::condor(&scene.marks, &machine_ad, job_ad)?)
}
