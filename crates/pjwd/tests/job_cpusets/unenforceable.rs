//! Jobs whose affinity masks the kernel refuses.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use pjw_core::cpuset_group::{CpusetAction, CpusetOutcome, LeftoverCpuset};
use pjw_core::own_cgroups::OwnCgroupNames;
use pjw_core::plan::{MaskAction, MaskOutcome};
use pjw_core::ports::{Journal, MachineInterface};
use pjw_core::record::Record;
use pjw_core::refusal::Refusal;
use pjw_core::snapshot::{ExpectedMask, MaskProbeResult, ProcessEventBatch, Snapshot};
use pjw_core::usage::JobReport;
use pjw_sim::journal::DiskFull;

use super::*;

const REFUSAL_REASON: &str = "no permission";

/// The faults that are in force now.
#[derive(Default)]
pub(crate) struct CurrentFaults {
    refuses_masks: Cell<bool>,
    /// Whether the disk becomes full when the next mask is refused.
    fills_disk: Cell<bool>,
    pub(crate) is_disk_full: Cell<bool>,
}

/// A node that refuses masks while [`CurrentFaults::refuses_masks`] is set.
pub(crate) struct RefusingNode {
    node: SimMachineInterface,
    faults: Rc<CurrentFaults>,
}

impl MachineInterface for RefusingNode {
    fn scan(&mut self, request: &ScanRequest) -> Snapshot {
        self.node.scan(request)
    }

    fn probe_masks(&mut self, expected: &BTreeMap<Pid, ExpectedMask>) -> MaskProbeResult {
        self.node.probe_masks(expected)
    }

    fn read_cpuset_paths(&mut self, pids: &BTreeSet<Pid>) -> BTreeMap<Pid, String> {
        self.node.read_cpuset_paths(pids)
    }

    fn read_process_events(&mut self) -> ProcessEventBatch {
        self.node.read_process_events()
    }

    fn list_job_cpusets(&mut self, own_cgroups: &OwnCgroupNames) -> Vec<LeftoverCpuset> {
        self.node.list_job_cpusets(own_cgroups)
    }

    fn change_mask(&mut self, action: &MaskAction) -> MaskOutcome {
        if self.faults.refuses_masks.get() {
            self.faults.is_disk_full.set(self.faults.fills_disk.get());
            return MaskOutcome::Refused { errno: 1, reason: REFUSAL_REASON.to_owned() };
        }
        self.node.change_mask(action)
    }

    fn change_cpusets(&mut self, actions: &[CpusetAction], max_wait: Duration) -> Vec<CpusetOutcome> {
        self.node.change_cpusets(actions, max_wait)
    }
}

/// A journal that cannot be written while [`CurrentFaults::is_disk_full`] is set.
pub(crate) struct FaultyJournal {
    journal: SimJournal,
    faults: Rc<CurrentFaults>,
}

impl FaultyJournal {
    fn check_disk(&self) -> Result<(), DiskFull> {
        if self.faults.is_disk_full.get() { Err(DiskFull) } else { Ok(()) }
    }
}

impl Journal for FaultyJournal {
    type Fault = DiskFull;

    fn append(&mut self, records: &[Record]) -> Result<(), DiskFull> {
        self.check_disk()?;
        self.journal.append(records)
    }

    fn store_reports(&mut self, reports: &[JobReport]) {
        self.journal.store_reports(reports);
    }

    fn withdraw_reports(&mut self, reports: &[JobReport]) {
        self.journal.withdraw_reports(reports);
    }

    fn reserve(&mut self, _: u64) -> bool {
        false
    }

    fn rewrite(&mut self, records: &[Record]) -> Result<(), DiskFull> {
        self.check_disk()?;
        self.journal.rewrite(records)
    }
}

/// A machine on which the processes 10 and 20 run, and its daemon.
pub(crate) struct Machine {
    pub(crate) kernel: ScriptedMachine,
    journal: SimJournal,
    pub(crate) faults: Rc<CurrentFaults>,
    pub(crate) warden: Warden<RefusingNode, FaultyJournal>,
}

impl Machine {
    pub(crate) fn new() -> Self {
        Self::with_policy(Policy::default())
    }

    pub(crate) fn with_policy(policy: Policy) -> Self {
        let topology = regular_topology(2, 1, 1, 4, 1);
        let kernel = ScriptedMachine::new(topology.cpus(), policy.cpuset_support.clone());
        for pid in [10, 20] {
            drop(kernel.spawn(pid, 1, ALICE.0));
        }
        let faults = Rc::new(CurrentFaults::default());
        let journal = SimJournal::new(Faults::none());
        let node = RefusingNode { node: kernel.simulated_machine(), faults: Rc::clone(&faults) };
        let faulty_journal = FaultyJournal { journal: journal.clone(), faults: Rc::clone(&faults) };
        let host = pjw_sources::LocalHost { name: "n1".to_owned(), flux_user: None };
        let warden = Warden::new(node, faulty_journal, new_state(), Vec::new(), policy, host);
        Self { kernel, journal, faults, warden }
    }

    pub(crate) fn cycle(&mut self, commands: &[Command]) -> CycleReport {
        self.kernel.world().advance(1_000_000_000);
        let scan = self.warden.state().scan_request(true);
        self.warden.run_cycle(scan, commands)
    }

    pub(crate) fn has_no_job(&self) -> bool {
        let state = self.warden.state();
        state.jobs.is_empty() && state.pool.free_cpus() == cpu_set("0-7")
    }

    /// The state of a daemon that starts now and reads the journal.
    pub(crate) fn state_after_restart(&self) -> WardenState {
        let mut state = new_state();
        self.journal.records().into_iter().for_each(|record| state.apply_record(record));
        state
    }
}

fn new_state() -> WardenState {
    WardenState::new(regular_topology(2, 1, 1, 4, 1), &cpu_set(""))
}

fn assign(cores: u32, pids: &[Pid]) -> Command {
    Command::Assign(assign_command("a", cores, pids))
}

fn texts_of_kind(report: &CycleReport, kind: EventKind) -> Vec<&str> {
    report.events.iter().filter(|event| event.kind == kind).map(|event| event.text.as_str()).collect()
}

fn unenforceable() -> Refusal {
    Refusal::Unenforceable { job: job("a"), why: REFUSAL_REASON.to_owned() }
}

#[test]
fn a_new_job_is_refused_if_the_kernel_refuses_all_its_masks_and_the_events_say_why() {
    let mut machine = Machine::new();
    machine.faults.refuses_masks.set(true);
    let report = machine.cycle(&[assign(2, &[Pid(10)])]);
    assert_eq!(report.replies, [Err(unenforceable())]);
    assert!(machine.has_no_job() && machine.state_after_restart().jobs.is_empty());
    assert_eq!(
        texts_of_kind(&report, EventKind::Released),
        ["the kernel refused to keep it on its cores: no permission; CPUs 0-1 free again"]
    );
    machine.faults.refuses_masks.set(false);
    machine.cycle(&[]);
    assert_eq!(machine.kernel.effective_mask(10, 10), "0-7");
    assert_eq!(machine.warden.state().journaled_masks().count(), 0);
}

#[test]
fn if_the_kernel_refuses_all_masks_of_a_new_job_both_commands_of_a_cycle_are_refused_and_it_is_released_once()
{
    for second in [assign(2, &[Pid(20)]), assign(1, &[])] {
        let mut machine = Machine::new();
        machine.faults.refuses_masks.set(true);
        let report = machine.cycle(&[assign(2, &[Pid(10)]), second]);
        assert_eq!(report.replies, [Err(unenforceable()), Err(unenforceable())]);
        assert!(machine.has_no_job());
        assert_eq!(texts_of_kind(&report, EventKind::Released).len(), 1, "{:?}", report.events);
        assert!(texts_of_kind(&report, EventKind::Refused).is_empty(), "{:?}", report.events);
    }
}

#[test]
fn each_assignment_of_a_new_job_of_a_batch_system_is_refused_if_the_kernel_refuses_all_its_masks() {
    let mut machine = Machine::new();
    machine.faults.refuses_masks.set(true);
    let job = job("slurm:7");
    for _ in 0..2 {
        let command = AssignCommand { job: job.clone(), ..assign_command("a", 2, &[Pid(10)]) };
        let report = machine.cycle(&[Command::Assign(command)]);
        assert_eq!(
            report.replies,
            [Err(Refusal::Unenforceable { job: job.clone(), why: REFUSAL_REASON.to_owned() })]
        );
        assert_eq!(machine.warden.state().pool.free_cpus(), cpu_set("0-7"));
    }
}

#[test]
fn a_refused_new_job_is_released_also_if_the_journal_can_be_written_only_later() {
    let mut machine = Machine::new();
    machine.faults.refuses_masks.set(true);
    machine.faults.fills_disk.set(true);
    let report = machine.cycle(&[assign(2, &[Pid(10)])]);
    assert_eq!(report.replies, [Err(unenforceable())]);
    assert!(machine.warden.ongoing_failures().journal_error.is_some());
    assert!(machine.has_no_job(), "there is no job, as the reply to the client says");

    machine.faults.refuses_masks.set(false);
    machine.faults.is_disk_full.set(false);
    machine.cycle(&[]);
    assert!(machine.warden.ongoing_failures().journal_error.is_none());
    assert!(machine.has_no_job() && machine.state_after_restart().jobs.is_empty());
}

#[test]
fn an_existing_job_stays_if_the_kernel_refuses_all_masks() {
    let mut machine = Machine::new();
    let report = machine.cycle(&[assign(2, &[Pid(10)])]);
    assert!(report.replies[0].is_ok());
    machine.faults.refuses_masks.set(true);
    let report = machine.cycle(&[assign(1, &[Pid(20)])]);
    assert!(report.replies[0].is_ok() && machine.warden.state().jobs.contains_key(&job("a")));
    assert!(
        !machine.warden.ongoing_failures().refused_masks.is_empty(),
        "the status has a warning about the refused masks"
    );
}
