//! Releases while the journal can't be written.

use pjw_core::command::{ProvisionCommand, Reply};
use pjw_core::job::Provision;
use pjw_core::refusal::Refusal;

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
