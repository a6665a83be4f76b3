//! Releases and loans while the journal can't be written.

use pjw_core::command::{ProvisionCommand, Reply};
use pjw_core::cpuset_group::IdlePrioritySupport;
use pjw_core::job::{Ownership, PriorityClass, Provision};
use pjw_core::policy::LendingPolicy;
use pjw_core::refusal::Refusal;
use pjw_core::state::lending::UsedCores;

use super::unenforceable::Machine;
use super::*;

const ROOT: Caller = Caller { uid: Uid::ROOT, is_admin: true };

fn assign(id: &str, cores: u32, pid: u32) -> Command {
    Command::Assign(assign_command(id, cores, &[Pid(pid)]))
}

fn release(id: &str) -> Command {
    Command::Release { job: job(id), caller: ROOT }
}

fn want(id: &str, cores: u32) -> Command {
    Command::Want { job: job(id), cores: Some(cores), caller: ROOT }
}

/// A machine with the job `a` of the process 10. The provision `web` waits for a core that `a` holds.
fn machine_with_a_waiting_provision() -> Machine {
    let mut machine = Machine::new();
    assert!(machine.cycle(&[assign("a", 8, 10)]).replies[0].is_ok());
    let provision = Provision { rule: None, from_config: true };
    let web = ProvisionCommand { job: job("web"), cores: 1, provision, caller: ROOT };
    assert!(machine.cycle(&[Command::Provision(web)]).replies[0].is_ok());
    assert!(!holds_cores(&machine, "web"));
    machine
}

fn holds_cores(machine: &Machine, id: &str) -> bool {
    machine.warden.state().jobs[&job(id)].grant.is_some()
}

#[test]
fn a_release_is_carried_out_although_other_commands_of_the_cycle_are_refused() {
    for is_known_as_full in [false, true] {
        let mut machine = Machine::new();
        assert!(machine.cycle(&[assign("a", 2, 10)]).replies[0].is_ok());
        machine.faults.is_disk_full.set(true);
        if is_known_as_full {
            assert!(matches!(
                machine.cycle(&[want("a", 1)]).replies[..],
                [Err(Refusal::JournalFailed { .. })]
            ));
        }
        let report = machine.cycle(&[want("a", 1), release("none"), release("a"), assign("b", 1, 20)]);
        assert!(
            matches!(
                &report.replies[..],
                [
                    Err(Refusal::JournalFailed { .. }),
                    Err(Refusal::NoSuchJob { .. }),
                    Ok(Reply::Released(released)),
                    Err(Refusal::JournalFailed { .. }),
                ] if *released == [job("a")]
            ),
            "each command has its own reply: {:?}",
            report.replies
        );
        assert_eq!(machine.kernel.effective_mask(10, 10), "0-7");
        assert!(machine.has_no_job() && events(&report).contains(&EventKind::Released));
        assert!(
            machine.state_after_restart().jobs.contains_key(&job("a")),
            "the release is not recorded yet"
        );
        machine.faults.is_disk_full.set(false);
        machine.cycle(&[]);
        assert!(machine.state_after_restart().jobs.is_empty());
    }
}

#[test]
fn no_job_gets_the_freed_cores_before_the_journal_can_be_written() {
    let mut machine = machine_with_a_waiting_provision();
    machine.faults.is_disk_full.set(true);
    for commands in [&[release("a")][..], &[], &[]] {
        let report = machine.cycle(commands);
        assert!(report.replies.iter().all(Result::is_ok), "{:?}", report.replies);
        assert!(!holds_cores(&machine, "web") && !events(&report).contains(&EventKind::Assigned));
        assert!(report.plan_warnings.iter().any(|warning| warning.text.contains("can't be recorded")));
    }
    machine.faults.is_disk_full.set(false);
    let report = machine.cycle(&[]);
    assert!(holds_cores(&machine, "web") && events(&report).contains(&EventKind::Assigned));
    assert!(machine.state_after_restart().jobs[&job("web")].grant.is_some());
}

#[test]
fn no_job_gets_the_cores_of_a_job_that_ends_while_the_journal_is_known_to_fail() {
    let mut machine = machine_with_a_waiting_provision();
    machine.faults.is_disk_full.set(true);
    assert!(machine.cycle(&[want("a", 1)]).replies[0].is_err());
    machine.kernel.exit(10);
    for _ in 0..3 {
        let report = machine.cycle(&[]);
        assert!(!holds_cores(&machine, "web") && !events(&report).contains(&EventKind::Assigned));
    }
    machine.faults.is_disk_full.set(false);
    machine.cycle(&[]);
    assert!(holds_cores(&machine, "web"));
}

const BATCH: &str = "/pjw_besteffort/batch";

/// A machine on which the guaranteed job `web` of the process 10 has the PUs 0-5. The besteffort job `batch` of the
/// process 20 borrows the other two, and those that `web` leaves idle: 2-5 if it uses one core.
fn machine_with_lent_cores() -> Machine {
    let cpuset_support = CpusetSupport {
        hierarchy: CpusetHierarchy::Unified,
        affinity_persists: true,
        idle_priority: IdlePrioritySupport::Available,
        can_freeze: true,
    };
    let lending = LendingPolicy { enabled: true, ..LendingPolicy::default() };
    let mut machine = Machine::with_policy(Policy { cpuset_support, lending, ..Policy::default() });
    for (id, class, cores, pid) in
        [("web", PriorityClass::Guaranteed, 6, 10), ("batch", PriorityClass::Besteffort, 8, 20)]
    {
        let command = AssignCommand { class: Some(class), ..assign_command(id, cores, &[Pid(pid)]) };
        assert!(machine.cycle(&[Command::Assign(command)]).replies[0].is_ok());
    }
    for _ in 0..5 {
        web_uses(&mut machine, 1);
        machine.cycle(&[]);
    }
    assert_eq!(machine.kernel.effective_mask(20, 20), "2-7");
    machine
}

/// Adds a sample: `web` uses so many cores.
fn web_uses(machine: &mut Machine, cores: u32) {
    let now = machine.kernel.world().current_time().since_boot;
    let used = UsedCores { in_use: cores, too_busy_to_lend: cores, lent_cpus: cpu_set("") };
    machine.warden.state_mut().lending.record_use(&job("web"), used, 6, now);
}

fn cpuset_of_batch(machine: &Machine) -> String {
    machine.kernel.world().cpusets[BATCH].to_string()
}

#[test]
fn an_owner_gets_its_lent_cores_back_in_the_first_cycle_that_can_not_write_the_journal() {
    for is_known_as_full in [false, true] {
        let mut machine = machine_with_lent_cores();
        machine.faults.is_disk_full.set(true);
        if is_known_as_full {
            assert!(machine.cycle(&[want("web", 1)]).replies[0].is_err());
        }
        web_uses(&mut machine, 6);
        machine.cycle(&[]);
        assert_eq!(machine.kernel.effective_mask(20, 20), "6-7");
        assert!(machine.warden.state().pool.lent_cpus().is_empty());
        let restarted = machine.state_after_restart();
        assert_eq!(restarted.pool.lent_cpus(), cpu_set("2-5"), "the journal has the older loan");
        machine.faults.is_disk_full.set(false);
        machine.cycle(&[]);
        assert!(machine.state_after_restart().pool.lent_cpus().is_empty());
    }
}

#[test]
fn a_frozen_borrower_gets_the_cores_of_a_job_that_is_released_while_the_journal_can_not_be_written() {
    let mut machine = machine_with_lent_cores();
    drop(machine.kernel.spawn(30, 1, ALICE.0));
    web_uses(&mut machine, 6);
    assert!(machine.cycle(&[assign("normal", 2, 30)]).replies[0].is_ok());
    assert!(machine.kernel.world().frozen_cgroups.contains(BATCH));
    machine.faults.is_disk_full.set(true);
    assert!(machine.cycle(&[release("normal")]).replies[0].is_ok());
    assert!(machine.kernel.world().frozen_cgroups.is_empty());
    assert_eq!(machine.kernel.effective_mask(20, 20), "6-7");
    let restarted = machine.state_after_restart();
    assert_eq!(restarted.jobs[&job("batch")].grant.as_ref().unwrap().ownership, Ownership::Frozen);
    assert_eq!(restarted.pool.pus_of(&job("normal")), cpu_set("6-7"), "the release is not recorded yet");
}

#[test]
fn a_borrower_with_a_mask_that_is_not_recorded_keeps_its_cores_until_the_journal_can_be_written() {
    let mut machine = machine_with_lent_cores();
    machine.faults.is_disk_full.set(true);
    assert!(machine.kernel.request_mask(20, 20, "4"));
    web_uses(&mut machine, 6);
    for _ in 0..2 {
        machine.cycle(&[]);
        assert_eq!(cpuset_of_batch(&machine), "2-7");
    }
    machine.faults.is_disk_full.set(false);
    machine.cycle(&[]);
    assert_eq!(cpuset_of_batch(&machine), "6-7");
}
