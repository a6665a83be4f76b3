//! The start of a group of tasks in an address space of their own.

use std::collections::VecDeque;
use std::sync::Arc;

use super::own_memory::is_thread_in_heap;
use super::request::MAX_PENDING_REQUESTS;
use super::room::AddressSpaceError;
use super::space::{AddressSpace, SpaceParameters};
use crate::child::Child;
use crate::failure::SpawnError;
use crate::instance::Instance;
use crate::layout::ExecArrays;
use crate::results::{InstanceResult, ResultsInOrder};
use crate::setup::Setup;

/// Receives reports while the tasks of a group are started.
pub(crate) trait GroupProgress {
    /// Called once, after the fork of the host. The host is the process that owns the address space.
    fn host_is_forked(&mut self) {}

    /// Called once, when the host is ready to start tasks.
    fn host_is_ready(&mut self) {}

    /// Returns whether no more tasks are to be started.
    fn is_cancelled(&self) -> bool {
        false
    }

    /// Called with the result of each task.
    fn has_result(&mut self, result: InstanceResult);
}

/// Makes an address space, and starts tasks (processes that share this address space) from the calling thread. Returns
/// the address space. The tasks are those of `instances` with the indexes `indexes`. `setup` contains the parameters
/// that the tasks have in common. `progress` receives a result for each task. Exception: tasks that were not started
/// because [`GroupProgress::is_cancelled`] returned true have no result.
///
/// # Errors
/// If the host can't be made ready. No task was started then, and `progress` has received no result.
pub(crate) fn start_group(
    setup: &Arc<Setup>,
    instances: &[Instance],
    indexes: &[usize],
    progress: &mut impl GroupProgress,
) -> Result<AddressSpace, AddressSpaceError> {
    let size = instances.iter().map(|instance| instance.size).max().unwrap_or(0);
    let parameters = SpaceParameters { capacity: indexes.len(), size, is_lasting: false };
    let mut space = AddressSpace::from_setup(Arc::clone(setup), &parameters)?;
    progress.host_is_forked();
    let mut layout = ExecArrays::new(&setup.environment, setup.has_rank_variables);
    let mut pending = VecDeque::new();
    // These requests are written while the host is made ready on another CPU.
    for &index in indexes.iter().take(MAX_PENDING_REQUESTS) {
        let Some(instance) = instances.get(index) else { break };
        if space.send_request(instance, &mut layout).is_err() {
            break;
        }
        pending.push_back(index);
    }
    space.wait_until_ready()?;
    progress.host_is_ready();
    let sent_count = pending.len();
    for &index in indexes.iter().skip(sent_count) {
        if progress.is_cancelled() {
            break;
        }
        let Some(instance) = instances.get(index) else { break };
        if pending.len() == MAX_PENDING_REQUESTS
            && let Some(oldest) = pending.pop_front()
        {
            progress.has_result((oldest, space.wait_for_oldest_request()));
        }
        let mut result = space.send_request(instance, &mut layout);
        if result.is_err() {
            // There may be room for the request when the pending requests are done.
            finish_all(&mut space, &mut pending, progress);
            result = space.send_request(instance, &mut layout);
        }
        match result {
            Ok(()) => pending.push_back(index),
            Err(error) => progress.has_result((index, Err(error))),
        }
    }
    finish_all(&mut space, &mut pending, progress);
    Ok(space)
}

/// Returns whether the calling thread can start the instances of the context with the parameters `setup` by
/// [`start_whole_group`]. False if they are no tasks, and in these cases:
///
/// - The tasks must end with their launcher. They need a thread that lives as long as the context.
/// - The stack or the thread-local variables of the calling thread are in the heap. The host, which is a fork of the
///   thread, frees its heap.
pub(crate) fn can_start_whole_group(setup: &Setup) -> bool {
    setup.task_program.is_some() && !setup.ends_with_launcher && !is_thread_in_heap()
}

/// Makes an address space, and starts all of `instances` as tasks from the calling thread. Waits until each task has
/// begun its program or has failed to start. Returns one result for each instance, in the same order. `setup` contains
/// the parameters that the instances have in common.
///
/// # Errors
/// If the host can't be made ready. No task was started then.
pub(crate) fn start_whole_group(
    setup: &Arc<Setup>,
    instances: &[Instance],
) -> Result<Vec<Result<Child, SpawnError>>, AddressSpaceError> {
    let mut results = ResultsInOrder::new(instances.len());
    let indexes: Vec<usize> = (0..instances.len()).collect();
    start_group(setup, instances, &indexes, &mut results)?;
    Ok(results.into_vec())
}

impl GroupProgress for ResultsInOrder {
    fn has_result(&mut self, result: InstanceResult) {
        self.store(result);
    }
}

/// Waits for the results of all requests with the indexes `pending`, and passes them to `progress`.
fn finish_all(space: &mut AddressSpace, pending: &mut VecDeque<usize>, progress: &mut impl GroupProgress) {
    for index in pending.drain(..) {
        progress.has_result((index, space.wait_for_oldest_request()));
    }
}
