//! The work of a spawner thread: it starts its instances and sends the results to the batch.

use std::os::fd::{BorrowedFd, RawFd};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use nix::time::{ClockId, clock_gettime};
use pjw_core::cpuset::CpuSet;
use pjw_core::ids::Pid;

use crate::failure::{SpawnError, SpawnStep};
use crate::instance::Instance;
use crate::own_policy::set_own_mask;
use crate::proxy::{ForkError, Template, TemplateError};
use crate::results::{self, InstanceResult, MAX_RESULTS, ResultPacket};
use crate::setup::Setup;
use crate::spawner::Spawner;
use crate::tasks::AddressSpaceError;
use crate::tasks::descriptors::close_descriptor_range;
use crate::tasks::group::{GroupProgress, start_group};

/// The work of one spawner thread, which is a thread that starts processes: the instances to start, and the state
/// that the thread shares with the batch ([`crate::SpawnBatch`]).
pub(crate) struct SpawnerWork {
    pub(crate) setup: Arc<Setup>,
    /// All instances of the batch.
    pub(crate) instances: Arc<[Instance]>,
    /// The indexes of the instances that this thread starts.
    pub(crate) indexes: Vec<usize>,
    pub(crate) is_cancelled: Arc<AtomicBool>,
    /// Receives the reason why no template could be loaded.
    pub(crate) refusal: Arc<OnceLock<TemplateError>>,
    /// Counts the instances that were forked from a template.
    pub(crate) forked: Arc<AtomicUsize>,
    /// Receives the reason why an instance could not be forked from the template.
    pub(crate) mismatch: Arc<OnceLock<ForkError>>,
}

impl SpawnerWork {
    /// Starts the instances (processes), and sends the results to `socket`. `has_own_table` says whether the calling
    /// thread has its own table of file descriptors. If so, all descriptors in the table are closed at the end, because
    /// the table may contain pipe ends of other instances.
    ///
    /// If the instances are tasks (processes in one address space) that must end together with the calling thread,
    /// returns the process id of their host. The caller must then end the host.
    ///
    /// If the instances are tasks, sends `Ok` to `ready` when their address space exists.
    ///
    /// # Errors
    /// If the address space can't be made. No task was started then, and no result was sent. The thread must tell the
    /// batch only after this call, which drops the instances: the batch, not this thread, must be their last owner.
    pub(crate) fn run(
        self,
        socket: RawFd,
        has_own_table: bool,
        ready: &Sender<Result<(), AddressSpaceError>>,
    ) -> Result<Option<Pid>, AddressSpaceError> {
        let mut packet = ResultPacket { start_period: (now(), now()), ..ResultPacket::default() };
        let mut host = None;
        match Spawner::new(&self.setup) {
            Ok(_) if self.setup.task_program.is_some() => {
                host = self.start_tasks(socket, &mut packet, ready)?;
            }
            Ok(mut spawner) => match self.load_template() {
                Some(template) => self.fork_all(template, &mut spawner, socket, &mut packet),
                None => self.exec_all(&mut spawner, socket, &mut packet),
            },
            Err(errno) => {
                let _ = ready.send(Ok(()));
                let error = SpawnError { step: SpawnStep::Mask, errno };
                for index in &self.indexes {
                    packet.results.push((*index, Err(error)));
                    send_if_full(socket, &mut packet);
                }
            }
        }
        // The instances own descriptors of the caller's table. The batch, not this thread, must be their last owner.
        drop(self);
        packet.is_last = true;
        send(socket, &mut packet);
        if has_own_table {
            close_all_descriptors();
        }
        Ok(host)
    }

    /// Loads the template, which is a process from which the instances of this thread are forked. If all of these
    /// instances have CPUs, first sets the affinity mask of the calling thread to these CPUs, and leaves this mask
    /// set.
    ///
    /// `None` if the context uses no templates, if the batch has fewer than two instances, or if the template can't
    /// be loaded. In the last case, stores the reason in `refusal`.
    fn load_template(&self) -> Option<Template> {
        let first = self.instances.get(*self.indexes.first()?)?;
        if self.setup.template_stop_point.is_none() || self.instances.len() < 2 {
            return None;
        }
        // The template and its memory lie where its instances will be. An instance without CPUs inherits the mask of
        // the caller, which this thread then keeps.
        let placements = self.indexes.iter().filter_map(|index| Some(&self.instances.get(*index)?.placement));
        let cpus = placements
            .map(|placement| placement.cpus.as_ref())
            .try_fold(CpuSet::new(), |all, cpus| Some(all.union(cpus?)));
        let requested_mask = cpus.filter(|cpus| set_own_mask(cpus).is_ok());
        match Template::from_setup(Arc::clone(&self.setup), first, requested_mask, &self.is_cancelled) {
            Ok(template) => Some(template),
            Err(refusal) => {
                let _ = self.refusal.set(refusal);
                None
            }
        }
    }

    /// Starts the instances as forks of `template`, and sends the results to `socket`.
    ///
    /// - If an instance can't be forked from this template, `spawner` starts the instance by exec.
    /// - If the start of an instance itself fails, this error is its result.
    /// - After the batch was cancelled, starts no more instances.
    /// - Sends `packet` whenever it is full. The last results stay in `packet`, and the caller must send them.
    fn fork_all(
        &self,
        mut template: Template,
        spawner: &mut Spawner<'_>,
        socket: RawFd,
        packet: &mut ResultPacket,
    ) {
        let instances = self.indexes.iter().map_while(|index| {
            let is_cancelled = self.is_cancelled.load(Ordering::Relaxed);
            self.instances.get(*index).filter(|_| !is_cancelled)
        });
        template.fork_all(instances, |instance, child| {
            let result = match child {
                Ok(child) => {
                    self.forked.fetch_add(1, Ordering::Relaxed);
                    Ok(child)
                }
                Err(ForkError::Failed(error)) => Err(error),
                Err(error) => {
                    let _ = self.mismatch.set(error);
                    spawner.start(instance)
                }
            };
            // `instance` is an element of `self.instances`: its address gives its index.
            let offset = ptr::from_ref(instance).addr() - self.instances.as_ptr().addr();
            packet.results.push((offset / size_of::<Instance>(), result));
            packet.start_period.1 = now();
            send_if_full(socket, packet);
        });
    }

    /// Makes an address space, starts the instances as tasks (processes that share this address space), and sends the
    /// results to `socket`.
    ///
    /// - After the batch was cancelled, starts no more instances.
    /// - Sends `packet` whenever it is full. The last results stay in `packet`, and the caller must send them.
    /// - Returns the process id of the host (the process that owns the address space) if the tasks must end together
    ///   with the calling thread. The caller must then end the host. Otherwise returns `None`.
    /// - Sends `Ok` to `ready` when the host is ready to start tasks.
    ///
    /// # Errors
    /// If the host can't be made ready. No task was started then, and no result was added to `packet`.
    fn start_tasks(
        &self,
        socket: RawFd,
        packet: &mut ResultPacket,
        ready: &Sender<Result<(), AddressSpaceError>>,
    ) -> Result<Option<Pid>, AddressSpaceError> {
        let mut progress = BatchProgress { packet, socket, ready, is_cancelled: &self.is_cancelled };
        let space = start_group(&self.setup, &self.instances, &self.indexes, &mut progress)?;
        Ok(space.leave_host())
    }

    /// Starts the instances one after the other by exec, and sends the results to `socket`.
    ///
    /// - After the batch was cancelled, starts no more instances.
    /// - Sends `packet` whenever it is full. The last results stay in `packet`, and the caller must send them.
    fn exec_all(&self, spawner: &mut Spawner<'_>, socket: RawFd, packet: &mut ResultPacket) {
        for &index in &self.indexes {
            if self.is_cancelled.load(Ordering::Relaxed) {
                break;
            }
            let Some(instance) = self.instances.get(index) else { break };
            packet.results.push((index, spawner.start(instance)));
            packet.start_period.1 = now();
            send_if_full(socket, packet);
        }
    }
}

/// Reports the start of the tasks of a batch to the owner of the batch.
struct BatchProgress<'a> {
    packet: &'a mut ResultPacket,
    socket: RawFd,
    ready: &'a Sender<Result<(), AddressSpaceError>>,
    is_cancelled: &'a AtomicBool,
}

impl GroupProgress for BatchProgress<'_> {
    fn host_is_forked(&mut self) {
        // The host is not one of the instances.
        self.packet.start_period = (now(), now());
    }

    fn host_is_ready(&mut self) {
        let _ = self.ready.send(Ok(()));
    }

    fn is_cancelled(&self) -> bool {
        self.is_cancelled.load(Ordering::Relaxed)
    }

    fn has_result(&mut self, result: InstanceResult) {
        self.packet.results.push(result);
        self.packet.start_period.1 = now();
        send_if_full(self.socket, self.packet);
    }
}

fn send_if_full(socket: RawFd, packet: &mut ResultPacket) {
    if packet.results.len() == MAX_RESULTS {
        send(socket, packet);
    }
}

/// Sends `packet` to `socket`. The batch keeps both ends open until the last packet, so sending fails only if the
/// system has no memory. The results of the packet are lost then.
fn send(socket: RawFd, packet: &mut ResultPacket) {
    // SAFETY: the batch keeps the descriptor open until it has the last packet of this thread.
    let socket = unsafe { BorrowedFd::borrow_raw(socket) };
    let _ = results::send_packet(socket, packet);
}

/// Closes all descriptors in the calling thread's own table. The thread uses none after this.
fn close_all_descriptors() {
    let _ = close_descriptor_range(0, RawFd::MAX);
}

fn now() -> Duration {
    clock_gettime(ClockId::CLOCK_MONOTONIC).map_or(Duration::ZERO, Duration::from)
}
