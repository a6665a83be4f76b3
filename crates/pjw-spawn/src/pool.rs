//! A pool of worker processes with spares: processes, forked in advance and stopped before `main`, that replace failed
//! workers.

use std::collections::VecDeque;

use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use thiserror::Error;

use crate::checks::CheckError;
use crate::checks::room::raise_descriptor_limit;
use crate::child::{Child, ExitStatus};
use crate::context::SpawnContext;
use crate::failure::{SpawnError, SpawnStep};
use crate::instance::Instance;
use crate::proxy::{ForkError, SpareProcess, Template, TemplateError};
use crate::signals::child_status_is_discarded;

/// The number of descriptors that the pool keeps open for each spare (a stopped process that replaces a failed
/// worker): the pidfd of the spare, and the socket for messages to it.
const DESCRIPTORS_OF_SPARE: usize = 2;

/// A group of worker processes, and of spares that replace failed workers. A spare is a process of the same program
/// that is stopped before `main` and uses no CPU. A worker has failed if a signal killed it, or if it exited with a
/// status other than 0. [`WorkerPool::wait`] then turns a spare into a new worker, and later makes a new spare. A
/// worker that exits with status 0 is not replaced.
///
/// Workers and spares are forked from a [`Template`], which is a process too. If the template is killed,
/// [`WorkerPool::wait`] loads it again as soon as a new process is needed.
///
/// Dropping the pool ends the spares. The workers continue to run.
#[derive(Debug)]
pub struct WorkerPool {
    /// The process from which the workers and the spares are forked.
    template: Template,
    /// The spares that are ready to replace a worker.
    spares: VecDeque<SpareProcess>,
    /// The number of spares that [`WorkerPool::wait`] restores.
    spare_count: usize,
    workers: Vec<Worker>,
    /// Reports the end of workers.
    epoll: Epoll,
}

/// One worker of the pool, and the process that does its work now.
#[derive(Debug)]
struct Worker {
    instance: Instance,
    /// `None` after it has ended and was not replaced.
    child: Option<Child>,
    /// Whether the worker has failed and could not be replaced. The replacement is tried again later.
    is_missing: bool,
}

/// Error: a [`WorkerPool`] can't be started. A pool consists of worker processes, and of spares: stopped processes
/// that replace failed workers.
#[derive(Debug, Error)]
pub enum WorkerPoolError {
    /// The program can't have a [`Template`], from which the workers and the spares are forked. The variant
    /// contains the reason.
    #[error(transparent)]
    NoTemplate(#[from] TemplateError),
    /// A worker or a spare could not be started.
    #[error("worker {rank}: {error}")]
    Worker {
        /// The index of the worker in the list of instances. If a spare (a stopped process that replaces a failed
        /// worker) could not be started, the number of workers.
        rank: usize,
        /// The reason why the worker or the spare could not be started.
        error: ForkError,
    },
    /// The calling process ignores `SIGCHLD`, or has set `SA_NOCLDWAIT`. The kernel then discards the exit status of
    /// each worker, and the pool could not read whether a worker has failed.
    #[error(
        "the process ignores SIGCHLD: give the signal its default action, so that the end of a worker can be read"
    )]
    ChildSignalIgnored,
    /// The limit of open descriptors is too low for the workers and the spares, and can't be raised. The variant
    /// contains the reason.
    #[error(transparent)]
    Descriptors(#[from] CheckError),
    /// The pidfds of the workers can't be watched by epoll(7). The variant contains the error number.
    #[error("the workers can't be watched: epoll: {}", .0.desc())]
    Watch(Errno),
}

/// Error: [`WorkerPool::wait`] can't wait for the end of a worker.
#[derive(Debug, Error)]
pub enum WorkerPoolWaitError {
    /// No limit of time was given, no worker runs, and at least one worker has failed and could not be replaced. The
    /// variant contains the first reason. A further call of [`WorkerPool::wait`] tries again to replace the workers.
    #[error(
        "no worker runs, and a worker that failed can't be replaced: {0}; remove the cause and wait again"
    )]
    NotReplaced(ForkError),
    /// No limit of time was given, and all workers have exited with status 0. No worker will end any more.
    #[error("no worker runs: all workers have exited with status 0")]
    AllDone,
    /// epoll(7) or waitid(2) has failed. The variant contains the error number. waitid(2) fails with `ECHILD` if
    /// another part of the program has waited for the end of a worker. A new worker replaces this worker all the same.
    #[error("the end of a worker can't be read: {}", .0.desc())]
    SystemCall(#[from] Errno),
}

/// A worker process that has ended, as [`WorkerPool::wait`] returns it: which worker, how it ended, and whether it
/// was replaced.
#[derive(Debug)]
pub struct EndedWorker {
    /// The index of the worker in the list of instances that [`WorkerPool::start`] received.
    pub index: usize,
    /// How the worker ended: its exit status, or the signal that killed it.
    pub exit: ExitStatus,
    /// Whether the worker was replaced. `None` if it exited with status 0: such a worker is not replaced.
    /// `Some(Ok(()))` if a new worker runs in its place. `Some(Err(…))` if the replacement failed. Each further call
    /// of [`WorkerPool::wait`] then tries again, until [`WorkerPool::worker`] returns a new worker.
    pub replacement: Option<Result<(), ForkError>>,
}

impl WorkerPool {
    /// Starts one worker process for each element of `instances`, and makes `spares` spares. A spare is a stopped
    /// process of the same program that replaces a worker when the worker fails. All elements must have the same
    /// cgroup, the same number of arguments, and the same number of environment variables. The calling thread becomes
    /// the parent of all workers. The soft limit of open descriptors of the calling process is raised if it is too low.
    ///
    /// # Errors
    /// Workers that were already started are killed. The call fails in these cases:
    ///
    /// - `instances` is empty.
    /// - A worker or a spare can't be made.
    /// - The program can't have a [`Template`], the process from which workers and spares are forked.
    /// - The calling process ignores `SIGCHLD`.
    /// - The hard limit of open descriptors is too low: each worker needs one, and each spare two.
    /// - The pool can't watch the workers by epoll(7).
    pub fn start(
        context: &SpawnContext,
        instances: Vec<Instance>,
        spares: usize,
    ) -> Result<Self, WorkerPoolError> {
        if child_status_is_discarded() {
            return Err(WorkerPoolError::ChildSignalIgnored);
        }
        let Some(first) = instances.first() else {
            return Err(WorkerPoolError::Worker {
                rank: 0,
                error: ForkError::Mismatch("number of instances"),
            });
        };
        raise_descriptor_limit(instances.len() + spares * DESCRIPTORS_OF_SPARE)?;
        let template = Template::load_until_main(context, first)?;
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).map_err(WorkerPoolError::Watch)?;
        let workers = instances
            .into_iter()
            .map(|instance| Worker { instance, child: None, is_missing: false })
            .collect();
        let mut pool = Self { template, spares: VecDeque::new(), spare_count: spares, workers, epoll };
        let started = pool.start_all();
        if started.is_err() {
            pool.workers.iter().filter_map(|worker| worker.child.as_ref()).for_each(Child::kill_and_wait);
        }
        started.map(|()| pool)
    }

    fn start_all(&mut self) -> Result<(), WorkerPoolError> {
        for index in 0..self.workers.len() {
            let child = self.fork(index).map_err(|error| WorkerPoolError::Worker { rank: index, error })?;
            self.watch(index, child).map_err(WorkerPoolError::Watch)?;
        }
        let rank = self.workers.len();
        self.refill_spares().map_err(|error| WorkerPoolError::Worker { rank, error })
    }

    /// Makes the spares that are missing.
    fn refill_spares(&mut self) -> Result<(), ForkError> {
        while self.spares.len() < self.spare_count {
            let spare = self.make_process(|template, _| template.make_spare())?;
            self.spares.push_back(spare);
        }
        Ok(())
    }

    /// Forks the process of a worker.
    fn fork(&mut self, index: usize) -> Result<Child, ForkError> {
        self.make_process(|template, workers| template.fork(&workers[index].instance))
    }

    /// Makes a process from the template by calling `make`. If the process of the template has ended, loads the
    /// template again and calls `make` with the new one.
    fn make_process<T>(
        &mut self,
        make: impl Fn(&mut Template, &[Worker]) -> Result<T, ForkError>,
    ) -> Result<T, ForkError> {
        match make(&mut self.template, &self.workers) {
            Err(ForkError::Ended) => {
                self.reload()?;
                make(&mut self.template, &self.workers)
            }
            made => made,
        }
    }

    /// Loads the template again after its process has ended. A message for a process of the old template has addresses
    /// that are wrong for the new one, and the other way round, so the old spares end.
    fn reload(&mut self) -> Result<(), ForkError> {
        let first = self.workers.first().ok_or(ForkError::Ended)?;
        self.template.reload(&first.instance).map_err(ForkError::NotReloaded)?;
        self.spares.clear();
        Ok(())
    }

    /// Stores `child` as the process of the worker with the index `index`, and adds its pidfd to the epoll set.
    fn watch(&mut self, index: usize, child: Child) -> Result<(), Errno> {
        let child = self.workers[index].child.insert(child);
        self.epoll.add(child, EpollEvent::new(EpollFlags::EPOLLIN, index as u64))
    }

    /// Returns the process of a worker. `index` is the index of the worker in the list of instances that
    /// [`WorkerPool::start`] received. `None` if the worker has ended and was not replaced, or if there is no such
    /// worker.
    #[must_use]
    pub fn worker(&self, index: usize) -> Option<&Child> {
        self.workers.get(index)?.child.as_ref()
    }

    /// Returns the number of spares that the pool has now. A spare is a process that is stopped before `main`, and
    /// that replaces a worker which fails.
    #[must_use]
    pub fn ready_spare_count(&self) -> usize {
        self.spares.len()
    }

    /// Waits until a worker ends, and returns this worker. If the worker has failed, a new worker replaces it. A worker
    /// has failed if a signal killed it, or if its exit status is not 0. Returns `None` if no worker has ended within
    /// `timeout_ms` milliseconds. If `timeout_ms` is `None`, waits without a limit, and fails if no worker runs any
    /// more.
    ///
    /// A spare is a stopped process that was made in advance. Each replacement uses up a spare. If no spare is left, a
    /// new process is forked. If no worker has ended when the call begins, the call first makes new spares for the used
    /// ones. It also tries once more to replace each worker that earlier calls could not replace. So if a worker could
    /// not be replaced, the caller should call this function again, with a timeout.
    ///
    /// # Errors
    /// If epoll(7) or waitid(2) fails. If `timeout_ms` is `None` and no worker runs, because each has exited with
    /// status 0 or can't be replaced.
    pub fn wait(&mut self, timeout_ms: Option<u16>) -> Result<Option<EndedWorker>, WorkerPoolWaitError> {
        let index = match self.next_ended(EpollTimeout::ZERO)? {
            Some(index) => index,
            None => {
                let restored = self.restore_missing();
                if timeout_ms.is_none() && self.workers.iter().all(|worker| worker.child.is_none()) {
                    let is_any_missing = self.workers.iter().any(|worker| worker.is_missing);
                    let error = restored.err().filter(|_| is_any_missing);
                    return Err(error.map_or(WorkerPoolWaitError::AllDone, WorkerPoolWaitError::NotReplaced));
                }
                // Otherwise the error is dropped: the next call tries again.
                let timeout = timeout_ms.map_or(EpollTimeout::NONE, EpollTimeout::from);
                let Some(index) = self.next_ended(timeout)? else { return Ok(None) };
                index
            }
        };
        let Some(worker) = self.workers.get_mut(index) else { return Ok(None) };
        let Some(child) = worker.child.take() else { return Ok(None) };
        let exit = child.wait();
        // Closing the pidfd is not enough: a process that another thread is forking may have a copy of it, epoll(7).
        let _ = self.epoll.delete(&child);
        drop(child);
        let replacement = match exit {
            Ok(ExitStatus::Code(0)) => None,
            // Another part of the program has taken the exit status. The worker may have failed.
            Ok(_) | Err(_) => Some(self.replace_worker(index)),
        };
        Ok(Some(EndedWorker { index, exit: exit?, replacement }))
    }

    /// Waits until the process of a worker has ended, and returns the index of this worker. `None` if no process has
    /// ended within `timeout`. Does not take the exit status of the process.
    fn next_ended(&self, timeout: EpollTimeout) -> Result<Option<usize>, Errno> {
        let mut events = [EpollEvent::empty()];
        loop {
            match self.epoll.wait(&mut events, timeout) {
                Ok(0) => return Ok(None),
                Ok(_) => return Ok(usize::try_from(events[0].data()).ok()),
                Err(Errno::EINTR) => {}
                Err(errno) => return Err(errno),
            }
        }
    }

    /// Tries again to replace each failed worker that could not be replaced before. Then makes the missing spares
    /// (stopped processes that replace failed workers). Continues after an error, and returns the first error.
    fn restore_missing(&mut self) -> Result<(), ForkError> {
        let mut result = Ok(());
        for index in 0..self.workers.len() {
            if self.workers[index].is_missing {
                let replaced = self.replace_worker(index);
                result = result.and(replaced);
            }
        }
        let refilled = self.refill_spares();
        result.and(refilled)
    }

    /// Starts a new process for the worker with the index `index`. Uses a spare, which is a process that was forked
    /// in advance and is stopped. Forks a process if there is no spare, or if the spare was killed. After an error,
    /// the worker stays marked as missing, and has no process.
    fn replace_worker(&mut self, index: usize) -> Result<(), ForkError> {
        self.workers[index].is_missing = true;
        let child = match self.spares.pop_front() {
            Some(spare) => match self.template.start_spare(spare, &self.workers[index].instance) {
                // The spare was killed.
                Err(ForkError::Ended) => self.fork(index)?,
                started => started?,
            },
            None => self.fork(index)?,
        };
        if let Err(errno) = self.watch(index, child) {
            if let Some(child) = self.workers[index].child.take() {
                child.kill_and_wait();
            }
            return Err(ForkError::Failed(SpawnError { step: SpawnStep::Clone, errno }));
        }
        self.workers[index].is_missing = false;
        Ok(())
    }
}

#[cfg(test)]
impl WorkerPool {
    /// Returns the [`Instance`] from which a worker is started when it is replaced. `index` is the index of the worker.
    /// Only tests call this function. They change the value to make the replacement fail.
    pub(crate) fn instance_mut(&mut self, index: usize) -> &mut Instance {
        &mut self.workers[index].instance
    }
}
