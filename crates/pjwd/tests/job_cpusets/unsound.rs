//! A plan that fails the audit is not carried out. The journal of these tests is damaged: it gives the same cores to two
//! jobs, which no decision of pjwd does.

use super::unenforceable::Machine;
use super::*;

fn records_of_a_job_on_the_first_cores(id: &str, pid: u32) -> Vec<pjw_core::record::Record> {
    let mut machine = Machine::new();
    machine.cycle(&[Command::Assign(assign_command(id, 2, &[Pid(pid)]))]);
    assert_eq!(machine.kernel.effective_mask(pid, pid), "0-1");
    machine.journal.records()
}

#[test]
fn no_mask_is_set_for_jobs_that_hold_the_same_cores_and_the_failures_name_them() {
    let both = [("a", 10), ("b", 20)].map(|(id, pid)| records_of_a_job_on_the_first_cores(id, pid));
    let mut machine = Machine::after(both.concat());
    machine.cycle(&[]);
    let violations = &machine.warden.ongoing_failures().audit_violations;
    assert!(!violations.is_empty(), "the audit sees it");
    assert_eq!([10, 20].map(|pid| machine.kernel.effective_mask(pid, pid)), ["0-7", "0-7"], "{violations:?}");
}

#[test]
fn the_same_masks_are_set_for_one_of_these_jobs_alone() {
    let mut machine = Machine::after(records_of_a_job_on_the_first_cores("a", 10));
    machine.cycle(&[]);
    assert_eq!([10, 20].map(|pid| machine.kernel.effective_mask(pid, pid)), ["0-1", "0-7"]);
}
