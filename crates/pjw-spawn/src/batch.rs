//! Starts a group of instances by spawner threads, and hands over the results.
//!
//! Each part of the machine has a spawner thread, so instances are started on all parts in parallel. A thread that
//! carries the mask of its part needs no system call for the mask. With more parts than threads, neighbours share a
//! thread.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use nix::errno::Errno;

use crate::checks::room::raise_descriptor_limit;
use crate::checks::{CheckError, check_all};
use crate::child::{Child, end_without_pidfd};
use crate::context::SpawnContext;
use crate::failure::{SpawnError, SpawnStep};
use crate::instance::Instance;
use crate::proxy::{ForkError, TemplateError};
use crate::replicate::{NamespaceBarrier, NamespaceEntry};
use crate::results::{self, InstanceResult, ResultPacket, ResultsInOrder};
use crate::signals;
use crate::spawner;
use crate::tasks::descriptors::unshare_descriptor_table;
use crate::tasks::group::{can_start_whole_group, start_whole_group};
use crate::tasks::room::AddressSpaceError;
use crate::work::SpawnerWork;

/// The size of the stack of a spawner thread (a thread that starts instances), in bytes.
const THREAD_STACK_BYTES: usize = 256 * 1024;
/// The number of instances for each template (a process from which instances are forked). Each spawner thread loads a
/// template of its own, so fewer instances get fewer spawner threads. A template costs as much as the start of three
/// instances by exec.
const INSTANCES_OF_A_TEMPLATE: usize = 8;

/// A group of processes (instances) of one program that are being started. [`SpawnContext::start`] returns a batch.
/// Threads of the calling process, called spawner threads, start the instances.
///
/// A batch is an iterator over the results, in the order in which they arrive. Each result is the index of an instance
/// in the list that [`SpawnContext::start`] received, with the process ([`Child`]) or the error. The iterator waits for
/// the next result. To wait with poll(2) instead, use the file descriptor of the batch ([`AsFd`]), which is readable
/// when results have arrived. Then call [`SpawnBatch::next_ready_result`] until it returns `None`.
///
/// If about 10,000 results are unread, the spawner threads wait until the caller reads results. Dropping the batch
/// waits until all instances have been started, discards the unread results, and kills no instance. After
/// [`SpawnBatch::cancel`], the drop waits only for the starts that are in progress.
#[derive(Debug)]
pub struct SpawnBatch {
    /// The end of the socket pair from which the batch reads the results.
    socket: OwnedFd,
    /// The end of the socket pair to which the spawner threads send the results. Open as long as a thread may send.
    sending: OwnedFd,
    /// The instances. Their descriptors stay open as long as a spawner thread may need them.
    instances: Arc<[Instance]>,
    /// The results that were read from the socket and not returned yet.
    results: VecDeque<InstanceResult>,
    /// The number of spawner threads that have not sent their last results.
    busy_spawners: usize,
    /// Whether [`SpawnBatch::cancel`] was called.
    is_cancelled: Arc<AtomicBool>,
    /// The reason why the program can't have a template (a process from which the instances are forked). Empty if no
    /// such reason is known.
    refusal: Arc<OnceLock<TemplateError>>,
    /// The number of instances that were forked from a template.
    forked: Arc<AtomicUsize>,
    /// The reason why an instance could not be forked from its template: of the first such instance, if there are
    /// several. Empty if no such reason is known.
    mismatch: Arc<OnceLock<ForkError>>,
    /// The period in which the instances were started, as [`SpawnBatch::start_period`] returns it.
    start_period: Option<(Duration, Duration)>,
}

impl SpawnContext {
    /// Begins to start one process for each element of `instances`, and returns without waiting for the starts. The
    /// returned [`SpawnBatch`] gives the results. Threads of the calling process, called spawner threads, start the
    /// processes. If the processes are to read the files of the program from copies ([`SpawnContext::set_replicas`]),
    /// the call waits until the copies have been made. If the processes share memory ([`SpawnContext::share_memory`]),
    /// the call waits until their address space exists. The soft limit of open descriptors of the calling process is
    /// raised if it is too low for the new processes.
    ///
    /// # Errors
    /// If [`SpawnContext::check_instances`] fails, or if a resource for the batch can't be created. No process is
    /// started then.
    pub fn start(&self, instances: Vec<Instance>) -> Result<SpawnBatch, CheckError> {
        self.prepare_start(&instances, self.starter_count(&instances))?;
        let (sending, socket) = results::channel().map_err(|error| CheckError::SystemCall {
            what: "a socket can't be made",
            errno: Errno::from_raw(error.raw_os_error().unwrap_or(libc::EIO)),
        })?;
        let mut batch = SpawnBatch {
            socket,
            sending,
            instances: instances.into(),
            results: VecDeque::new(),
            busy_spawners: 0,
            is_cancelled: Arc::default(),
            refusal: Arc::default(),
            forked: Arc::default(),
            mismatch: Arc::default(),
            start_period: None,
        };
        let Some(replicas) = &self.setup.replicas else {
            for indexes in indexes_by_spawner(&batch.instances, self.max_spawners(batch.instances.len())) {
                let report = batch.start_spawner(self, indexes, None);
                if self.setup.task_program.is_some()
                    && let Ok(Err(error)) = report.recv()
                {
                    // The thread ends, and has sent no results.
                    batch.busy_spawners = 0;
                    return Err(error.into());
                }
            }
            return Ok(batch);
        };
        let mut entries = NamespaceBarrier::new();
        for (node, indexes) in indexes_by_node(&batch.instances) {
            let entry = entries.add(replicas, node);
            batch.start_spawner(self, indexes, Some(entry));
        }
        if let Err(error) = entries.wait() {
            // The threads end, and send no results.
            batch.busy_spawners = 0;
            return Err(error.into());
        }
        Ok(batch)
    }

    /// Starts one process for each element of `instances`. Waits until each process has begun its program or has failed
    /// to start. Returns one result for each element, in the same order.
    ///
    /// The calling thread starts the processes itself if `instances` has a single element, or if the processes share
    /// memory ([`SpawnContext::share_memory`]). The calling thread keeps its own affinity mask and memory policy.
    /// Otherwise, other threads start the processes, as in [`SpawnContext::start`]. Other threads always start them in
    /// two cases:
    ///
    /// - With [`SpawnContext::kill_when_launcher_ends`] or [`SpawnContext::set_replicas`].
    /// - If the processes share memory, and the calling thread has its stack or its thread-local variables in the heap
    ///   (brk(2)), such as the first thread of a static program of glibc.
    ///
    /// # Errors
    /// The errors of [`SpawnContext::start`]. No process is started then.
    pub fn spawn_n(&self, instances: Vec<Instance>) -> Result<Vec<Result<Child, SpawnError>>, CheckError> {
        match &instances[..] {
            [instance] if self.needs_no_thread() => {
                self.prepare_start(&instances, 0)?;
                Ok(vec![spawner::start_single_instance(&self.setup, instance)])
            }
            _ if can_start_whole_group(&self.setup) => {
                // Only the host: the process that owns the address space and starts the tasks.
                self.prepare_start(&instances, 1)?;
                Ok(start_whole_group(&self.setup, &instances)?)
            }
            _ => Ok(self.start(instances)?.into_results()),
        }
    }

    /// Starts one process of the program. Waits until the process has begun the program or has failed to start.
    ///
    /// # Errors
    /// - The outer error: a check of [`SpawnContext::check_instances`] has failed, or a resource such as a descriptor
    ///   is missing. No process was created.
    /// - The inner error: the start of the process has failed after these checks. The error contains the failed step.
    pub fn spawn(&self, instance: Instance) -> Result<Result<Child, SpawnError>, CheckError> {
        let result = self.spawn_n(vec![instance])?.pop();
        Ok(result.unwrap_or(Err(SpawnError { step: SpawnStep::Clone, errno: Errno::ECANCELED })))
    }
}

impl SpawnContext {
    /// Makes all checks of `instances` that are possible before a process is started, and raises the limit of open
    /// descriptors if it is too low for them. `starters` is the number of threads and processes that will be created to
    /// start the instances.
    fn prepare_start(&self, instances: &[Instance], starters: usize) -> Result<(), CheckError> {
        check_all(&self.setup, instances, starters)?;
        raise_descriptor_limit(instances.len())
    }

    /// Returns whether the calling thread can start a single instance by exec. An instance that ends with its launcher
    /// needs a thread that lives as long as the context. Replicas need a thread with a mount namespace of its own. A
    /// task is not started by exec.
    fn needs_no_thread(&self) -> bool {
        !self.setup.ends_with_launcher && self.setup.replicas.is_none() && self.setup.task_program.is_none()
    }

    /// Returns the largest number of spawner threads for `instances` instances in the same mount namespace.
    fn max_spawners(&self, instances: usize) -> usize {
        match self.setup.template_stop_point {
            // All instances are tasks in one address space, which has one spawner.
            _ if self.setup.task_program.is_some() => 1,
            Some(_) => self.max_spawner_threads.min(instances / INSTANCES_OF_A_TEMPLATE).max(1),
            None => self.max_spawner_threads,
        }
    }

    /// Returns the number of spawner threads that [`SpawnContext::start`] creates for `instances`. Spawner threads are
    /// the threads of the calling process that start the new processes.
    pub(crate) fn spawner_count(&self, instances: &[Instance]) -> usize {
        if self.setup.replicas.is_some() {
            let nodes: BTreeSet<_> =
                instances.iter().map(|instance| instance.placement.preferred_numa_node).collect();
            return nodes.len();
        }
        let placements: HashSet<_> =
            instances.iter().map(|instance| Arc::as_ptr(&instance.placement)).collect();
        placements.len().min(self.max_spawners(instances.len()))
    }
}

/// Divides the instances among at most `max_spawners` spawner threads. Returns one list of instance indexes for each
/// spawner. Instances with the same placement (the same `Arc`) have the same spawner. If there are more placements than
/// spawners, placements that follow each other share a spawner.
fn indexes_by_spawner(instances: &[Instance], max_spawners: usize) -> Vec<Vec<usize>> {
    let mut placement_numbers = HashMap::new();
    for instance in instances {
        let next_number = placement_numbers.len();
        placement_numbers.entry(Arc::as_ptr(&instance.placement)).or_insert(next_number);
    }
    let spawner_count = placement_numbers.len().min(max_spawners);
    let mut shares = vec![Vec::new(); spawner_count];
    for (index, instance) in instances.iter().enumerate() {
        let number = placement_numbers[&Arc::as_ptr(&instance.placement)];
        shares[number * spawner_count / placement_numbers.len()].push(index);
    }
    shares
}

/// Divides the instances among one spawner thread for each NUMA node, because a thread has the replicas of only one
/// node. Returns the instance indexes for each preferred node. The instances whose placement prefers no node have the
/// key `None` and a spawner of their own.
fn indexes_by_node(instances: &[Instance]) -> BTreeMap<Option<u32>, Vec<usize>> {
    let mut shares: BTreeMap<_, Vec<_>> = BTreeMap::new();
    for (index, instance) in instances.iter().enumerate() {
        shares.entry(instance.placement.preferred_numa_node).or_default().push(index);
    }
    shares
}

impl SpawnBatch {
    /// Waits until each instance (process) of the batch has begun its program or has failed to start. Returns one
    /// result for each instance, in the order of the list that [`SpawnContext::start`] received.
    ///
    /// In two cases, the result of an instance is the error `ECANCELED`: the instance was not started because of
    /// [`SpawnBatch::cancel`], or the caller has already taken the result of the instance from the batch.
    #[must_use]
    pub fn into_results(self) -> Vec<Result<Child, SpawnError>> {
        let mut results = ResultsInOrder::new(self.instances.len());
        self.for_each(|result| results.store(result));
        results.into_vec()
    }

    /// Cancels the start of all instances (processes) of this batch that have not been started yet. Returns at once.
    /// Instances that have been started continue to run. A start that is in progress is completed. As an iterator,
    /// the batch returns no result for an instance that was not started.
    pub fn cancel(&self) {
        self.is_cancelled.store(true, Ordering::Relaxed);
    }

    /// Returns the next result of the batch without waiting. A result is the index of an instance in the list that
    /// [`SpawnContext::start`] received, with the process or the error. `None` if no result is available now.
    /// [`SpawnBatch::is_finished`] then says whether more results will follow.
    pub fn next_ready_result(&mut self) -> Option<InstanceResult> {
        self.next_result(false)
    }

    /// Returns the reason why a template could not be made. A [template](crate::proxy::Template) is a process that
    /// has already loaded the program. Each spawner thread (a thread that starts instances of the batch) makes a
    /// template and forks its instances (processes) from the template. A thread without a template starts its
    /// instances by exec. If several threads have failed to make a template, returns the reason for the first one.
    ///
    /// `None` if no thread has failed so far. Always `None` if the context uses no templates
    /// ([`SpawnContext::fork_from_templates`]).
    #[must_use]
    pub fn template_error(&self) -> Option<TemplateError> {
        self.refusal.get().copied()
    }

    /// Returns the reason why an instance (process) of the batch could not be forked from a template, and was started
    /// by exec instead. A template is a process that has already loaded the program. If this happened to several
    /// instances, returns the reason for the first one. `None` if this has happened to no instance so far. If there
    /// was no template at all, [`SpawnBatch::template_error`] returns the reason.
    #[must_use]
    pub fn fork_error(&self) -> Option<ForkError> {
        self.mismatch.get().copied()
    }

    /// Returns how many instances (processes) of the batch have been forked from a template so far. A template is a
    /// process that has already loaded the program. All other instances were started without a template, or were not
    /// started. The number is final when the batch has returned all results ([`SpawnBatch::is_finished`]).
    #[must_use]
    pub fn forked_count(&self) -> usize {
        self.forked.load(Ordering::Relaxed)
    }

    /// Returns whether the batch has returned its last result. There is one result for each instance (process). Except
    /// after [`SpawnBatch::cancel`]: an instance that was not started has no result.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        self.busy_spawners == 0 && self.results.is_empty()
    }

    /// Returns the begin and the end of the period in which the instances (processes) of the batch were started, as
    /// times of `CLOCK_MONOTONIC`. The period begins just before the first process was created. It ends when the last
    /// instance had begun the program or had failed to start. Only the results that this batch has received so far
    /// are considered. `None` if the batch has received no results yet.
    #[must_use]
    pub fn start_period(&self) -> Option<(Duration, Duration)> {
        self.start_period
    }

    /// Returns the next result of the batch. If all results that were read have been returned, reads one packet of
    /// results from the socket. If `wait` is true, waits for this packet.
    ///
    /// `None` in two cases:
    /// - All spawner threads have sent their last results, and all results were returned.
    /// - `wait` is false, and no packet has arrived.
    fn next_result(&mut self, wait: bool) -> Option<InstanceResult> {
        loop {
            if let Some(result) = self.results.pop_front() {
                return Some(result);
            }
            if self.busy_spawners == 0 {
                return None;
            }
            // An error is not expected, because only this batch and its threads use the socket.
            match results::receive_packet(self.socket.as_fd(), wait) {
                Ok(Some(packet)) => self.store_packet(packet),
                Ok(None) => return None,
                Err(_) => self.busy_spawners = 0,
            }
        }
    }

    /// Stores the results of `packet` for later calls of [`SpawnBatch::next_result`], and extends the field
    /// `start_period` by the period of the packet.
    fn store_packet(&mut self, packet: ResultPacket) {
        self.busy_spawners -= usize::from(packet.is_last);
        self.results.extend(packet.results);
        let (first, last) = packet.start_period;
        let (begin, end) = self.start_period.unwrap_or(packet.start_period);
        self.start_period = Some((begin.min(first), end.max(last)));
    }

    /// Starts a spawner thread: it starts the instances with the indexes `indexes`, and sends the results to the
    /// batch.
    ///
    /// - If `entry` is given, the thread first enters the mount namespace for its NUMA node. If this fails, the
    ///   thread ends without any result.
    /// - If the instances are tasks (processes that share one address space), the thread first makes their address
    ///   space. If this fails, the thread ends without any result.
    /// - If the instances must end with their launcher, the thread lives until `context` is dropped.
    /// - If the thread can't be created, each of the instances gets this error as its result.
    ///
    /// If the instances are tasks, the returned receiver gets one message: `Ok` when their address space exists, or
    /// the error. It gets no message if the thread can't be created.
    fn start_spawner(
        &mut self,
        context: &SpawnContext,
        indexes: Vec<usize>,
        entry: Option<NamespaceEntry>,
    ) -> mpsc::Receiver<Result<(), AddressSpaceError>> {
        let (report_sender, report) = mpsc::channel();
        let setup = Arc::clone(&context.setup);
        let instances = Arc::clone(&self.instances);
        let is_cancelled = Arc::clone(&self.is_cancelled);
        let refusal = Arc::clone(&self.refusal);
        let (forked, mismatch) = (Arc::clone(&self.forked), Arc::clone(&self.mismatch));
        let socket = self.sending.as_raw_fd();
        // If the instances end with their launcher, the thread waits at its end until `keep_alive` is dropped.
        let (keep_alive, released) = mpsc::channel::<()>();
        let ends_with_launcher = setup.ends_with_launcher;
        let indexes_if_failed = indexes.clone();
        let thread = std::thread::Builder::new().name("spawner".into()).stack_size(THREAD_STACK_BYTES);
        let started = thread.spawn(move || {
            signals::block_all_signals();
            if entry.is_some_and(|entry| !entry.enter()) {
                return;
            }
            // The descriptors of an address space must be in no other table: the host ends when they are closed.
            let has_own_table = unshare_descriptor_table().is_ok();
            let work = SpawnerWork { setup, instances, indexes, is_cancelled, refusal, forked, mismatch };
            match work.run(socket, has_own_table, &report_sender) {
                Err(error) => {
                    let _ = report_sender.send(Err(error));
                }
                Ok(host) if ends_with_launcher => {
                    let _ = released.recv();
                    host.into_iter().for_each(end_without_pidfd);
                }
                Ok(_) => {}
            }
        });
        match started {
            Ok(_) => {
                self.busy_spawners += 1;
                if ends_with_launcher {
                    context.keep_spawner_thread(keep_alive);
                }
            }
            Err(error) => {
                let errno = Errno::from_raw(error.raw_os_error().unwrap_or(libc::EAGAIN));
                let error = SpawnError { step: SpawnStep::Clone, errno };
                self.results.extend(indexes_if_failed.into_iter().map(|index| (index, Err(error))));
            }
        }
        report
    }
}

impl Iterator for SpawnBatch {
    type Item = InstanceResult;

    /// Waits for the next result.
    fn next(&mut self) -> Option<InstanceResult> {
        self.next_result(true)
    }
}

impl AsFd for SpawnBatch {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for SpawnBatch {
    fn drop(&mut self) {
        while self.next().is_some() {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arguments::Arguments;
    use crate::instance::Stdio;
    use crate::placement::Placement;

    /// Makes one instance for each element of `numbers`. The element is the number of its placement.
    fn instances(numbers: &[usize]) -> Vec<Instance> {
        let placements: Vec<_> = (0..10).map(|_| Arc::new(Placement::default())).collect();
        let arguments = Arc::new(Arguments::literal(&["true"]).unwrap());
        let instance = |(rank, number): (usize, &usize)| Instance {
            rank: u32::try_from(rank).unwrap(),
            size: u32::try_from(numbers.len()).unwrap(),
            arguments: Arc::clone(&arguments),
            variables: Vec::new(),
            placement: Arc::clone(&placements[*number]),
            stdio: Stdio::default(),
        };
        numbers.iter().enumerate().map(instance).collect()
    }

    #[test]
    fn each_placement_has_a_spawner_if_there_are_enough() {
        assert_eq!(indexes_by_spawner(&instances(&[0, 1, 0, 1, 0]), 8), [vec![0, 2, 4], vec![1, 3]]);
        assert_eq!(indexes_by_spawner(&instances(&[0, 0]), 8), [vec![0, 1]]);
        assert!(indexes_by_spawner(&[], 8).is_empty());
    }

    #[test]
    fn the_spawners_and_their_templates_are_counted() {
        let context = SpawnContext::new("true").unwrap().set_max_spawner_threads(2);
        assert_eq!(context.starter_count(&instances(&[0, 0])), 1);
        assert_eq!(context.starter_count(&instances(&[0, 1, 2])), 2);
        let context = context.fork_from_templates();
        assert_eq!(context.starter_count(&instances(&[0, 1, 2])), 2, "one thread and its template");
        assert_eq!(context.starter_count(&instances(&[0, 1, 2].repeat(8))), 4);
    }

    #[test]
    fn each_node_has_a_spawner_of_its_own() {
        let mut list = instances(&[0, 1, 2, 0, 1, 2]);
        for (index, node) in [(0, 1), (3, 1), (1, 0), (4, 0)] {
            let placement = Placement { preferred_numa_node: Some(node), ..Placement::default() };
            list[index].placement = Arc::new(placement);
        }
        let expected = [(None, vec![2, 5]), (Some(0), vec![1, 4]), (Some(1), vec![0, 3])];
        assert_eq!(indexes_by_node(&list), BTreeMap::from(expected));
    }

    #[test]
    fn neighbouring_placements_share_a_spawner_if_there_are_too_few() {
        assert_eq!(indexes_by_spawner(&instances(&[0, 1, 2, 3]), 2), [vec![0, 1], vec![2, 3]]);
        assert_eq!(indexes_by_spawner(&instances(&[0, 1, 2, 0, 1, 2]), 1), [vec![0, 1, 2, 3, 4, 5]]);
        assert_eq!(indexes_by_spawner(&instances(&[0, 1, 2]), 2), [vec![0, 1], vec![2]]);
    }
}
