//! Which processes share an address space (clone(2), `CLONE_VM`).
//!
//! All users of an address space have the same start address of the stack, because the kernel keeps the address in the
//! `mm_struct`. Processes that executed a program have different addresses (address space randomisation). So the only
//! candidates are processes with the same address: processes that share an address space, and forked processes that
//! have not executed a program.
//!
//! The task scan gives each address space a number. Where a scan has read candidates in `/proc`, a run of the task scan
//! over these candidates follows. Without the task scan, kcmp(2) compares the candidates. kcmp orders address spaces,
//! so a new candidate is found by bisection. A known result stays valid while the process has the same start time and
//! the same address of the stack, and has not executed a program. So processes that sleep cause no call.
//!
//! A result may be wrong because another process executed a program in the meantime. So a second check confirms each
//! result. A process that shares an address space is checked until it is certain that it is no child of vfork(2).

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use nix::errno::Errno;
use pjw_core::ids::{Pid, ProcessId};
use pjw_core::snapshot::{AddressSpaceCheck, AddressSpaceList, AddressSpaceUser, SharedAddressSpace};
use pjw_core::time::Nanos;

use super::task_scan_result::{ScannedSpace, TaskScanResult};
use crate::proc::procfs::Stat;

mod by_kcmp;

/// The minimum time between two task scans (runs of a BPF program) that are made only for processes which possibly
/// share an address space. Each run iterates over all tasks of the machine.
const TASK_SCAN_INTERVAL: Nanos = Nanos(400_000_000);
/// After two checks this far apart in which a process was not in vfork(2), it is no child of vfork. Between the
/// moment when a process is created and the moment when the kernel marks it as a child of vfork, only microseconds
/// pass.
const SETTLED_AFTER: Nanos = Nanos(100_000_000);

/// A function that compares the address spaces of two processes, as kcmp(2) does. `Equal` means that the processes
/// share one address space.
pub(super) type Compare = fn(Pid, Pid) -> Result<Ordering, Errno>;

/// Finds the processes that share an address space with another process (clone(2), `CLONE_VM`). Contains the processes
/// that earlier scans have read. Compares only candidates: processes whose stacks have the same start address.
#[derive(Debug)]
pub(super) struct AddressSpaces {
    processes: BTreeMap<Pid, Process>,
    /// The candidates, by the start address of their stacks.
    candidates: BTreeMap<u64, Candidates>,
    /// The processes of each address space, by the number of the address space.
    users: BTreeMap<u64, BTreeSet<Pid>>,
    /// The processes that the next scans must check.
    to_check: BTreeSet<Pid>,
    /// The numbers of the address spaces with several users.
    shared: BTreeSet<u64>,
    /// The list for the snapshot. `None` if it has changed.
    list: Option<Arc<AddressSpaceList>>,
    /// The highest number that an address space has got, if kcmp(2) is the source of the numbers.
    last_number: u64,
    /// The time of the last check by kcmp(2), or of the last task scan for the candidates.
    last_check_at: Nanos,
    /// The number of the present scan.
    scan: u64,
    /// Whether the numbers come from the task scan (a BPF program) and not from kcmp(2).
    by_task_scan: bool,
    /// Why kcmp(2) was refused.
    refusal: Option<Errno>,
    /// The number of calls of kcmp(2) until now.
    calls: u64,
    compare: Compare,
}

/// The processes with one start address of the stack.
#[derive(Debug, Default)]
struct Candidates {
    pids: BTreeSet<Pid>,
    /// Those whose address spaces are unknown, except those that may not be compared.
    unknown: BTreeSet<Pid>,
    /// The known address spaces in the order of kcmp(2). Empty with the task scan.
    ordered: Vec<u64>,
}

#[derive(Debug, Clone, Copy)]
struct Process {
    id: ProcessId,
    parent: Pid,
    stack: u64,
    /// The number of the address space. `None` if it is unknown.
    space: Option<u64>,
    last_check: Check,
    /// The time of the first check in which the process shared this space and was not in vfork(2).
    shared_since: Option<Nanos>,
    /// Whether no further check is necessary while the process shares this space.
    is_settled: bool,
    /// Whether kcmp(2) found once that the process shares its space with no other candidate.
    was_alone: bool,
}

/// The check of one process in one scan.
#[derive(Debug, Clone, Copy)]
struct Check {
    /// The number of the scan.
    scan: u64,
    result: AddressSpaceCheck,
}

impl AddressSpaces {
    /// Makes a value without processes. `compare` compares the address spaces of two processes. It is called only if
    /// the task scan (the BPF program that reports the state of threads) is not available.
    pub(super) fn new(compare: Compare) -> Self {
        Self {
            processes: BTreeMap::new(),
            candidates: BTreeMap::new(),
            users: BTreeMap::new(),
            to_check: BTreeSet::new(),
            shared: BTreeSet::new(),
            list: None,
            last_number: 0,
            last_check_at: Nanos(0),
            scan: 1,
            by_task_scan: false,
            refusal: None,
            calls: 0,
            compare,
        }
    }

    /// Sets where the numbers of the address spaces come from. If `has_task_scan` is true, the task scan (a BPF
    /// program) reports them. If not, kcmp(2) compares the address spaces. If the source changes, all processes are
    /// removed, because the numbers of the two sources can't be compared.
    pub(super) fn set_source(&mut self, has_task_scan: bool) {
        if self.by_task_scan != has_task_scan {
            *self = Self { by_task_scan: has_task_scan, calls: self.calls, ..Self::new(self.compare) };
        }
    }

    /// Records the process `pid` as a scan has read it. `stat` has the values of the first thread of the process.
    /// `scanned` is what the task scan (a BPF program) reported about the address space of the process. `scanned` is
    /// `None` if the process was read in `/proc`.
    pub(super) fn record_process(&mut self, pid: Pid, stat: &Stat, scanned: Option<ScannedSpace>) {
        let id = ProcessId { pid, start: stat.start };
        let recorded = self.processes.get(&pid).copied();
        if stat.is_kernel_thread || stat.readable_stack_start().is_none() {
            // The first thread may have exited before the others.
            if recorded.is_some_and(|recorded| recorded.id != id) {
                self.remove_process(pid);
            }
            return;
        }
        let is_recorded =
            recorded.is_some_and(|recorded| recorded.id == id && recorded.stack == stat.stack_start);
        if !is_recorded {
            self.remove_process(pid);
            self.add_process(id, stat);
        }
        if let Some(process) = self.processes.get_mut(&pid) {
            process.parent = stat.parent;
        }
        if let Some(scanned) = scanned {
            self.record_scanned_space(pid, scanned);
        } else if is_recorded && recorded.is_some_and(|recorded| recorded.space.is_none()) {
            self.mark_candidates(stat.stack_start);
        }
    }

    /// Adds the process `id`, whose address space is unknown. `stat` has the values of its first thread. Processes
    /// possibly share an address space if their stacks have the same start address. If there is another process with
    /// the start address of this process, marks this process for a check. Also marks each other process with this
    /// start address whose address space is unknown.
    fn add_process(&mut self, id: ProcessId, stat: &Stat) {
        let process = Process {
            id,
            parent: stat.parent,
            stack: stat.stack_start,
            space: None,
            last_check: Check { scan: 0, result: AddressSpaceCheck::NotChecked },
            shared_since: None,
            is_settled: false,
            was_alone: false,
        };
        self.processes.insert(id.pid, process);
        let candidates = self.candidates.entry(stat.stack_start).or_default();
        candidates.pids.insert(id.pid);
        candidates.unknown.insert(id.pid);
        self.mark_candidates(stat.stack_start);
    }

    /// Marks for a check the processes whose stacks start at the address `stack`, and whose address spaces are unknown.
    /// Does nothing if there is only one process with this address.
    fn mark_candidates(&mut self, stack: u64) {
        if let Some(candidates) = self.candidates.get(&stack).filter(|candidates| candidates.pids.len() > 1) {
            self.to_check.extend(&candidates.unknown);
        }
    }

    /// Records what the task scan (a BPF program) reported about the address space of the process `pid`.
    fn record_scanned_space(&mut self, pid: Pid, scanned: ScannedSpace) {
        let number = scanned.number.get();
        let Some(process) = self.processes.get_mut(&pid) else { return };
        process.last_check = Check { scan: self.scan, result: check_by_vfork(scanned.is_in_vfork) };
        if process.space != Some(number) {
            self.clear_address_space(pid);
            self.set_address_space(pid, number);
        }
        if !self.shared.contains(&number) {
            self.to_check.remove(&pid);
        }
    }

    /// Records that the process `pid` uses the address space with the number `number`. If other processes use it too,
    /// all its users are marked for a check.
    fn set_address_space(&mut self, pid: Pid, number: u64) {
        let Some(process) = self.processes.get_mut(&pid) else { return };
        (process.space, process.shared_since, process.is_settled) = (Some(number), None, false);
        if let Some(candidates) = self.candidates.get_mut(&process.stack) {
            candidates.unknown.remove(&pid);
        }
        let users = self.users.entry(number).or_default();
        users.insert(pid);
        if users.len() > 1 {
            // One of the others may have executed a program since the last check.
            self.to_check.extend(users.iter().copied());
            self.shared.insert(number);
            self.list = None;
        }
    }

    /// Records that the address space of the process `pid` is unknown.
    fn clear_address_space(&mut self, pid: Pid) {
        let Some(process) = self.processes.get_mut(&pid) else { return };
        let Some(number) = process.space.take() else { return };
        let candidates = self.candidates.entry(process.stack).or_default();
        candidates.unknown.insert(pid);
        let Some(users) = self.users.get_mut(&number) else { return };
        users.remove(&pid);
        match users.len() {
            0 => {
                self.users.remove(&number);
                candidates.ordered.retain(|&other| other != number);
            }
            1 => {
                self.shared.remove(&number);
                self.list = None;
            }
            _ => self.list = None,
        }
    }

    /// Removes the process `pid` from this table. Must be called when the process has executed a program or exited, or
    /// when another process has got its pid.
    pub(super) fn remove_process(&mut self, pid: Pid) {
        self.clear_address_space(pid);
        self.to_check.remove(&pid);
        let Some(process) = self.processes.remove(&pid) else { return };
        if let Some(candidates) = self.candidates.get_mut(&process.stack) {
            candidates.pids.remove(&pid);
            candidates.unknown.remove(&pid);
            if candidates.pids.is_empty() {
                self.candidates.remove(&process.stack);
            }
        }
    }

    /// Removes all processes for which `is_there` returns false. Called after a full scan, which has found all
    /// existing processes.
    pub(super) fn retain(&mut self, is_there: impl Fn(Pid) -> bool) {
        let gone: Vec<Pid> = self.processes.keys().copied().filter(|&pid| !is_there(pid)).collect();
        gone.into_iter().for_each(|pid| self.remove_process(pid));
    }

    /// Returns the processes that possibly share an address space, and about which the task scan (a BPF program) must
    /// report. `at` is the present time. Empty if the task scan is not available, or if it ran less than 0.4 s ago.
    pub(super) fn pids_to_scan(&self, at: Nanos) -> BTreeSet<Pid> {
        let is_due = self.by_task_scan && at.0.saturating_sub(self.last_check_at.0) >= TASK_SCAN_INTERVAL.0;
        let is_unread =
            |pid: &&Pid| self.processes.get(pid).is_some_and(|process| process.last_check.scan != self.scan);
        if is_due { self.to_check.iter().filter(is_unread).copied().collect() } else { BTreeSet::new() }
    }

    /// Records `scan_result`, what a task scan (a run of a BPF program) reported about the processes of
    /// [`AddressSpaces::pids_to_scan`]. `at` is the time of the task scan.
    pub(super) fn record_task_scan(&mut self, scan_result: &TaskScanResult, at: Nanos) {
        self.last_check_at = at;
        for (&pid, scanned) in &scan_result.processes {
            self.record_process(pid, &scanned.stat, scanned.address_space);
        }
        // A process that is not reported has exited, or is hidden from BPF programs.
        self.to_check.retain(|pid| scan_result.processes.contains_key(pid));
    }

    /// Returns the address spaces that several processes share, each with its processes. `at` is the time at which
    /// the present scan began. Must be called exactly once at the end of each scan.
    pub(super) fn shared_address_spaces(&mut self, at: Nanos) -> Arc<AddressSpaceList> {
        if let Some(list) = self.list.as_ref().filter(|_| self.to_check.is_empty()) {
            self.scan += 1;
            return Arc::clone(list);
        }
        let mut shared = Vec::with_capacity(self.shared.len());
        let mut has_unsettled = false;
        for &number in &self.shared {
            let mut users = Vec::new();
            for pid in self.users.get(&number).into_iter().flatten() {
                let Some(process) = self.processes.get_mut(pid) else { continue };
                users.push(AddressSpaceUser { id: process.id, check: process.record_check(self.scan, at) });
                if process.is_settled && process.last_check.scan == self.scan {
                    self.to_check.remove(pid);
                }
                has_unsettled |= !process.is_settled;
            }
            shared.push(SharedAddressSpace { number, users });
        }
        let unread_reason = self.refusal.map(|errno| {
            format!(
                "it is unknown which processes share an address space: kcmp failed ({}), and the BPF task scan is not available",
                errno.desc()
            )
        });
        let list = Arc::new(AddressSpaceList { shared, unread_reason });
        self.scan += 1;
        self.list = (!has_unsettled).then(|| Arc::clone(&list));
        list
    }
}

impl Process {
    /// Returns the result of this process's check in the scan with the number `scan`, which began at `at`. Also
    /// records whether the process is settled: it shares its address space and is no child of vfork(2), so that no
    /// more checks are necessary. This is so after two checks at least 0.1 s apart have found that, if no check
    /// between them has found the process in vfork(2).
    ///
    /// - For a settled process, the result is [`AddressSpaceCheck::Sharing`] in every scan.
    /// - For another process, it is [`AddressSpaceCheck::NotChecked`] if this scan has not checked the process.
    fn record_check(&mut self, scan: u64, at: Nanos) -> AddressSpaceCheck {
        let Check { scan: checked_scan, result } = self.last_check;
        let check = if checked_scan == scan { result } else { AddressSpaceCheck::NotChecked };
        match check {
            AddressSpaceCheck::InVfork => self.shared_since = None,
            AddressSpaceCheck::Sharing => {
                let since = *self.shared_since.get_or_insert(at);
                self.is_settled |= at.0.saturating_sub(since.0) >= SETTLED_AFTER.0;
            }
            AddressSpaceCheck::NotChecked => {}
        }
        if self.is_settled { AddressSpaceCheck::Sharing } else { check }
    }
}

fn check_by_vfork(is_in_vfork: bool) -> AddressSpaceCheck {
    if is_in_vfork { AddressSpaceCheck::InVfork } else { AddressSpaceCheck::Sharing }
}

#[cfg(test)]
mod tests;
