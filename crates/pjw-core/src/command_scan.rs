//! Chooses what pjwd scans before it executes commands: the processes and jobs that the commands concern.

use alloc::sync::Arc;

use crate::basics::{Pid, prelude::*};
use crate::phases::commands::types::{AssignCommand, Command, ProvisionCommand};
use crate::state::{Member, WardenState};
use crate::terms::{JobId, ScanRequest, ScanScope};

/// Returns the request for the scan that pjwd makes before it executes `commands`. The scan reads all processes of the
/// machine in each of these cases:
///
/// - A command assigns all processes of a session (setsid(2)), releases all jobs, or moves jobs to reduce fragmentation
///   ([`Command::Defrag`]).
/// - Fork events may have been lost, or an earlier scan was incomplete.
///
/// Otherwise, the scan reads these processes and all of their descendants:
///
/// - each process whose pid is in an assign command,
/// - all processes of each job to which a command assigns processes or cores,
/// - all processes of each job that a command releases ([`Command::Release`] and [`Command::Undo`]),
/// - all processes of each provision (a job whose cores are promised to a service) that a command makes or changes.
///
/// Some descendants may be in the list of processes for a later scan (`state.lineage.scan_queue`). The function moves
/// these descendants from the list to the request.
pub fn command_scan_request(state: &mut WardenState, commands: &[Command]) -> ScanRequest {
    let mut pids: BTreeSet<Pid> = BTreeSet::new();
    let mut jobs: BTreeSet<&JobId> = BTreeSet::new();
    for command in commands {
        match command {
            Command::Assign(AssignCommand { job, pids: named, session: None, .. }) => {
                pids.extend(named);
                jobs.insert(job);
            }
            Command::Release { job, .. }
            | Command::Undo { job, .. }
            | Command::Provision(ProvisionCommand { job, .. }) => {
                jobs.insert(job);
            }
            Command::Want { .. } => {}
            Command::Assign(_) | Command::ReleaseAll { .. } | Command::Defrag { .. } => {
                return state.scan_request(true);
            }
        }
    }
    if state.fork_events_complete_since.is_none() || state.full_scan_due {
        return state.scan_request(true);
    }
    let members = jobs.iter().flat_map(|job| state.tracked_processes_of(job));
    pids.extend(members.map(|member: &Member| member.id.pid));
    let mut pids = state.processes.pids_with_descendants(pids);
    let forked = state.lineage.scan_queue.take_descendants_of(&pids);
    pids.extend(forked);
    let cgroups = jobs.iter().flat_map(|job| state.cgroups_of(job)).collect();
    let scope = ScanScope::Partial(pids.clone());
    let active_threads = BTreeMap::new();
    ScanRequest { scope, pids_to_read_threads_of: pids, active_threads, cgroups, idle_watch: Arc::default() }
}
