//! The extended attribute of a scheduler's cgroup: the cpuset that pjw wrote there, and the daemon that wrote it.

use pjw_core::cpuset::Pu;
use pjw_core::own_cgroups::OwnCgroupNames;

use super::fixture::*;
use crate::cpuset::*;

/// A cgroup that a scheduler made directly below the root.
struct SchedulerCgroup {
    fixture: Fixture,
    /// A cpuset of the warden that enables the controller below the root, as a scheduler does in v2.
    holder: JobCpuset,
    /// The cpuset that pjw writes in the cgroup: the first CPU.
    job_cpuset: JobCpuset,
}

impl SchedulerCgroup {
    fn create(name: &str) -> Option<Self> {
        let mut fixture = fixture()?;
        let (first, all) = (fixture.first(), fixture.all.clone());
        let holder = job_cpuset("holder", &all);
        fixture.create(&holder);
        let path = format!("/test-{}-{name}", std::process::id());
        let job_cpuset = JobCpuset { creator: CgroupCreator::Scheduler, path, ..job_cpuset(name, &first) };
        let group = fixture.group(&job_cpuset);
        group.create().unwrap();
        if !fixture.hierarchy.is_unified {
            let mems = fixture.hierarchy.root().effective_mems().unwrap();
            group.write_file("cpuset.mems", &mems.to_string()).unwrap();
            group.write_file("cpuset.cpus", &all.to_string()).unwrap();
        }
        Some(Self { fixture, holder, job_cpuset })
    }

    fn write(&mut self, cpus: &CpuSet) -> CpusetOutcome {
        let spec = CpusetSpec::from_cpus(cpus.clone());
        self.fixture.create(&JobCpuset { spec, ..self.job_cpuset.clone() })
    }

    fn attribute(&self) -> Option<String> {
        self.fixture.group(&self.job_cpuset).read_attribute(marks::CPUSET_ATTRIBUTE)
    }

    /// What a daemon with these names finds in the cgroup: the cpuset, and the other daemon that wrote it.
    fn leftover(&self, own: &OwnCgroupNames) -> Option<(JobCpuset, Option<String>)> {
        let all = list_job_cpusets(&self.fixture.hierarchy, own);
        let here = all.into_iter().find(|found| found.path == self.job_cpuset.path)?;
        Some((here.scheduler_cpuset?, here.other_writer))
    }

    fn remove(mut self) {
        assert_eq!(self.fixture.widen(&self.job_cpuset), done_outcome(self.fixture.all.clone()));
        self.fixture.group(&self.job_cpuset).remove().unwrap();
        assert_eq!(self.fixture.remove(&self.holder), DONE);
    }
}

#[test]
fn after_a_refused_write_the_attribute_still_names_the_cpuset_that_was_written() {
    let Some(mut cgroup) = SchedulerCgroup::create("refused") else { return };
    let first = cgroup.fixture.first();
    let absent = CpuSet::from(Pu(cgroup.fixture.all.last().unwrap().0 + 1));
    reason(cgroup.write(&absent));
    assert_eq!(cgroup.attribute(), None, "no cpuset was written");
    assert_eq!(cgroup.write(&first), done_outcome(first));
    if cgroup.attribute().is_none() {
        skip("cgroups have no attributes here");
    } else {
        let written = Some((cgroup.job_cpuset.clone(), None));
        assert_eq!(cgroup.leftover(&OwnCgroupNames::default()), written);
        reason(cgroup.write(&absent));
        assert_eq!(cgroup.leftover(&OwnCgroupNames::default()), written);
    }
    cgroup.remove();
}

#[test]
fn the_attribute_names_the_daemon_that_wrote_the_cpuset() {
    let Some(mut cgroup) = SchedulerCgroup::create("writer") else { return };
    let (usual, beside) = (OwnCgroupNames::default(), OwnCgroupNames::for_additional_daemon(b"/of-test"));
    let (first, written) = (cgroup.fixture.first(), cgroup.job_cpuset.clone());
    for (writer, other) in [(&usual, &beside), (&beside, &usual)] {
        cgroup.fixture.own_cgroups = writer.clone();
        assert_eq!(cgroup.write(&first), done_outcome(first.clone()));
        if cgroup.attribute().is_none() {
            skip("cgroups have no attributes here");
            cgroup.remove();
            return;
        }
        assert_eq!(cgroup.leftover(writer), Some((written.clone(), None)));
        assert_eq!(cgroup.leftover(other), Some((written.clone(), Some(writer.name_prefix().to_owned()))));
    }

    let without_name = format!("{first} {}", written.job);
    cgroup.fixture.group(&written).write_attribute(marks::CPUSET_ATTRIBUTE, &without_name);
    assert_eq!(cgroup.leftover(&usual), Some((written.clone(), None)), "an earlier version wrote no name");
    assert_eq!(cgroup.leftover(&beside), Some((written, Some("pjw".to_owned()))));
    cgroup.remove();
}
