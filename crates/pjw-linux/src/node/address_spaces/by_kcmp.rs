//! Compares the address spaces of processes by kcmp(2). Replaces the task scan (a BPF program) where the task scan is
//! not available.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};

use nix::errno::Errno;
use pjw_core::ids::Pid;
use pjw_core::snapshot::AddressSpaceCheck;
use pjw_core::time::Nanos;

use super::{AddressSpaces, Check, check_by_vfork};
use crate::proc::vfork::VforkWait;
use crate::sys::errno::is_gone;

/// The minimum time between two checks by kcmp(2).
const CHECK_INTERVAL: Nanos = Nanos(50_000_000);
/// The maximum number of calls of kcmp(2) in one scan: about 1.3 ms. The processes that are not compared then follow
/// in the next scan.
pub(super) const MAX_CALLS: u64 = 1000;
/// The maximum number of other users of an address space with which two processes are compared, to find out which of
/// the two has left the address space.
const MAX_WITNESSES: usize = 4;

impl AddressSpaces {
    /// Compares by kcmp(2) the processes that possibly share an address space: processes whose stacks have the same
    /// start address. Makes about 1000 comparisons per call at most. Does nothing in each of these cases:
    ///
    /// - The task scan (a BPF program) reports the address spaces.
    /// - No process is marked for a check.
    /// - The last check was less than 50 ms before `at`, the present time.
    /// - The kernel does not have kcmp(2).
    ///
    /// `vfork_wait` must return for which children the threads of a process may be waiting in vfork(2).
    pub(in crate::node) fn compare_candidates(
        &mut self,
        at: Nanos,
        mut vfork_wait: impl FnMut(Pid) -> VforkWait,
    ) {
        let is_due = at.0.saturating_sub(self.last_check_at.0) >= CHECK_INTERVAL.0;
        if self.by_task_scan || !is_due || self.to_check.is_empty() || self.refusal == Some(Errno::ENOSYS) {
            return;
        }
        self.last_check_at = at;
        let last_call = self.calls + MAX_CALLS;
        let mut searched = BTreeSet::new();
        for pid in self.to_check.clone() {
            if self.calls >= last_call {
                return;
            }
            if self.is_unknown(pid) {
                self.find_space(pid);
                searched.insert(pid);
            }
        }
        let mut waits: BTreeMap<Pid, VforkWait> = BTreeMap::new();
        for pid in self.to_check.clone() {
            if self.calls >= last_call {
                return;
            }
            if self.is_shared(pid) {
                // The state of the parent is read before kcmp(2) is called. If a child of vfork still shares the
                // address space at that call, its parent was waiting at this reading.
                let is_in_vfork = self.possible_vfork_parent(pid).is_some_and(|parent| {
                    let wait = waits.entry(parent).or_insert_with(|| vfork_wait(parent));
                    self.may_be_in_vfork(pid, wait)
                });
                self.recheck_sharing(pid, is_in_vfork);
            } else if !searched.contains(&pid) {
                self.search_for_others(pid);
            }
        }
    }

    fn is_unknown(&self, pid: Pid) -> bool {
        self.processes.get(&pid).is_some_and(|process| process.space.is_none())
    }

    fn is_shared(&self, pid: Pid) -> bool {
        let space = self.processes.get(&pid).and_then(|process| process.space);
        space.is_some_and(|space| self.shared.contains(&space))
    }

    /// Finds the address space of the process `pid` by kcmp(2), and records its number. Compares the process only
    /// with processes whose stacks have the same start address. The known address spaces are stored in the order of
    /// kcmp(2), so a bisection finds the right one. If there is none, the address space gets a new number. If kcmp(2)
    /// fails, records no number.
    fn find_space(&mut self, pid: Pid) {
        let Some(stack) = self.processes.get(&pid).map(|process| process.stack) else { return };
        let (mut low, mut high) = (0, usize::MAX);
        let number = loop {
            let ordered = self.candidates.get(&stack).map(|candidates| candidates.ordered.as_slice());
            let ordered = ordered.unwrap_or_default();
            high = high.min(ordered.len());
            if low >= high {
                break None;
            }
            let middle = low + (high - low) / 2;
            let space = ordered[middle];
            let Some(&other) = self.users.get(&space).and_then(BTreeSet::first) else { return };
            match self.call_kcmp(other, pid) {
                Ok(Ordering::Equal) => break Some(space),
                Ok(Ordering::Less) => low = middle + 1,
                Ok(Ordering::Greater) => high = middle,
                Err(errno) => return self.handle_kcmp_error(&[pid, other], errno),
            }
        };
        let number = number.unwrap_or_else(|| {
            self.last_number += 1;
            let candidates = self.candidates.entry(stack).or_default();
            candidates.ordered.insert(low, self.last_number);
            self.last_number
        });
        self.set_address_space(pid, number);
    }

    /// Returns the parent of the process `pid`, if `pid` may be its child by vfork(2): the parent shares the address
    /// space, and earlier checks have not excluded it.
    fn possible_vfork_parent(&self, pid: Pid) -> Option<Pid> {
        let process = self.processes.get(&pid).filter(|process| !process.is_settled)?;
        let users = self.users.get(&process.space?)?;
        users.contains(&process.parent).then_some(process.parent)
    }

    /// Returns whether the process `pid` may be a child of vfork(2). `wait` says for which children the threads of its
    /// parent may be waiting.
    fn may_be_in_vfork(&self, pid: Pid, wait: &VforkWait) -> bool {
        match wait {
            VforkWait::NotWaiting => false,
            VforkWait::ForUnknownChild => true,
            // The waiting thread may get the children of another thread that exits, so that its child by vfork is no
            // longer the last one. So a child of vfork stays one while its parent waits.
            VforkWait::ForChildren(children) => {
                let last = self.processes.get(&pid).map(|process| process.last_check.result);
                children.contains(&pid) || last == Some(AddressSpaceCheck::InVfork)
            }
        }
    }

    /// Checks by kcmp(2) whether the process `pid` still shares its address space with another process, and records
    /// the result. `is_in_vfork` says whether the process may be a child of vfork(2). If the two processes no longer
    /// share, marks each process that has left the address space for a new search. Does nothing if no other process
    /// uses the address space.
    fn recheck_sharing(&mut self, pid: Pid, is_in_vfork: bool) {
        let Some(process) = self.processes.get(&pid).copied() else { return };
        let users = process.space.and_then(|space| self.users.get(&space));
        let Some(&other) = users.and_then(|users| users.iter().find(|&&user| user != pid)) else { return };
        match self.call_kcmp(other, pid) {
            Ok(Ordering::Equal) => {
                if let Some(process) = self.processes.get_mut(&pid) {
                    process.last_check = Check { scan: self.scan, result: check_by_vfork(is_in_vfork) };
                }
            }
            Ok(_) => {
                for departed in self.users_that_left(pid, other) {
                    self.clear_address_space(departed);
                    self.to_check.insert(departed);
                }
            }
            Err(errno) => self.handle_kcmp_error(&[pid, other], errno),
        }
    }

    /// Returns which of the processes `pid` and `other` have left the address space that both used. kcmp(2) says that
    /// they no longer share one, so at least one of them has executed a program or is ending. If one of them still
    /// shares with a third user of the address space, only the other one is returned. If no third user shows that,
    /// both are returned. Compares with at most [`MAX_WITNESSES`] third users.
    fn users_that_left(&mut self, pid: Pid, other: Pid) -> Vec<Pid> {
        let space = self.processes.get(&pid).and_then(|process| process.space);
        let users = space.and_then(|space| self.users.get(&space)).cloned().unwrap_or_default();
        let witnesses = users.into_iter().filter(|user| ![pid, other].contains(user));
        for witness in witnesses.take(MAX_WITNESSES) {
            for (stayed, left) in [(other, pid), (pid, other)] {
                if self.call_kcmp(witness, stayed) == Ok(Ordering::Equal) {
                    return vec![left];
                }
            }
        }
        vec![pid, other]
    }

    /// Searches once more for processes that share the address space of the process `pid`. An earlier search has
    /// found none. If this search finds none either, the process is not checked any more.
    fn search_for_others(&mut self, pid: Pid) {
        let Some(process) = self.processes.get_mut(&pid) else { return };
        if !std::mem::replace(&mut process.was_alone, true) {
            self.clear_address_space(pid);
            self.find_space(pid);
        }
        if !self.is_shared(pid) && !self.is_unknown(pid) {
            self.to_check.remove(&pid);
        }
    }

    /// Compares the address spaces of two processes, and counts the call.
    fn call_kcmp(&mut self, one: Pid, other: Pid) -> Result<Ordering, Errno> {
        self.calls += 1;
        (self.compare)(one, other)
    }

    /// Handles `errno`, the error of a comparison of the processes `pids` by kcmp(2). Compares each of them with
    /// itself to find out which one caused the error. Removes a process that has ended. A process that this user may
    /// not compare is not compared again. If the kernel does not have kcmp(2) (`ENOSYS`), no process is compared
    /// again.
    fn handle_kcmp_error(&mut self, pids: &[Pid], errno: Errno) {
        if errno == Errno::ENOSYS {
            self.record_refusal(pids.first().copied(), errno);
        }
        for &pid in pids {
            match self.call_kcmp(pid, pid) {
                Ok(_) => {}
                Err(errno) if is_gone(errno) => self.remove_process(pid),
                Err(errno) => self.record_refusal(Some(pid), errno),
            }
        }
    }

    /// Records that kcmp(2) was refused with `errno`. The process `pid` is not compared again. With `None`, only the
    /// error is recorded.
    fn record_refusal(&mut self, pid: Option<Pid>, errno: Errno) {
        self.refusal = Some(errno);
        self.list = None;
        let Some(pid) = pid else { return };
        self.clear_address_space(pid);
        self.to_check.remove(&pid);
        if let Some(candidates) =
            self.processes.get(&pid).and_then(|process| self.candidates.get_mut(&process.stack))
        {
            candidates.unknown.remove(&pid);
        }
    }
}
