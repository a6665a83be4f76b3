//! Findings that depend on what pjwd does and reports, for invented nodes.

use super::*;

#[test]
fn a_frozen_job_has_no_findings() {
    let mut input = node();
    // The masks of its threads have CPUs that other jobs hold.
    let frozen = ObservedJob {
        grant: Some((CpuSet::new(), GrantedBy::Warden)),
        enforcement: "cpuset".to_owned(),
        ..job("be", "0-1", 2, 0)
    };
    input.jobs = vec![frozen, held("own", "0-1", GrantedBy::Warden)];
    assert_eq!(diagnose(&input), []);
}
