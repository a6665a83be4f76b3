//! The processes of one call: the arguments from which they are started, and the C program's array for their process
//! ids.

use std::ffi::{CString, c_int, c_uint};
use std::sync::Arc;

use libc::pid_t;
use nix::errno::Errno;
use pjw_core::cpuset::CpuSet;
use spawn::{
    Arguments, Child, Instance, Placement, SpawnError, Stdio, check_descriptor_limit, check_process_limits,
};

use crate::arguments::{StringLists, to_os_strs};
use crate::failure::{Failure, store_failure_message};

/// The largest number of processes that [`check_count`] does not check. So few processes need little memory, and
/// reading the limits takes longer than the start of a process.
const MAX_UNCHECKED_COUNT: c_uint = 1024;

/// Checks whether the limits of the system allow `count` processes and a descriptor for each of them. The functions of
/// this library call this function before they read an array whose length depends on `count`, and before they allocate
/// memory for each process. Up to 1024 processes are not checked here. All limits are checked again before the start.
///
/// # Errors
/// `EAGAIN` if a limit on the number of processes is too low. `EMFILE` if the hard limit of open descriptors is too
/// low.
pub(crate) fn check_count(count: c_uint) -> Result<(), Failure> {
    if count > MAX_UNCHECKED_COUNT {
        // The number of threads that start the processes is not known yet.
        check_process_limits(count as usize, 0)?;
        check_descriptor_limit(count as usize)?;
    }
    Ok(())
}

/// The arguments of one call that starts several processes of a program, such as `pspawn_v`.
#[derive(Debug)]
pub(crate) struct StartArguments {
    /// The number of processes.
    pub(crate) count: c_uint,
    /// The arguments: one list for all processes, or one list for each process.
    pub(crate) arguments: StringLists,
    /// The environments: one for all processes, or one for each process. If there is no environment, the processes have
    /// that of the context.
    pub(crate) environments: StringLists,
    /// The affinity masks. Process i has the mask with the index `i % n`, where `n` is the number of masks. If there
    /// are no masks, all processes run on the CPUs of the calling thread.
    pub(crate) masks: Vec<CpuSet>,
}

impl StartArguments {
    /// Converts the arguments of the call to a list with one element for each process that is to be started. An element
    /// contains the arguments, the environment and the CPUs of the process.
    ///
    /// # Errors
    /// `EINVAL` if an argument list is invalid. `ENOMEM` if there is no memory for the list of processes.
    pub(crate) fn instances(&self) -> Result<Vec<Instance>, Failure> {
        let arguments: Vec<Arc<Arguments>> = self
            .arguments
            .iter()
            .map(|list| {
                Arguments::literal(&to_os_strs(list))
                    .map(Arc::new)
                    .map_err(|error| Failure::invalid(error.to_string()))
            })
            .collect::<Result<_, _>>()?;
        let environments: Vec<&Vec<CString>> = self.environments.iter().collect();
        let mut placements: Vec<_> =
            self.masks.iter().map(|mask| Arc::new(Placement::on_cpus(mask.clone()))).collect();
        if placements.is_empty() {
            placements.push(Arc::new(Placement::default()));
        }
        let instance = |rank: c_uint| Instance {
            rank,
            size: self.count,
            arguments: Arc::clone(of_rank(&arguments, rank)),
            variables: if environments.is_empty() {
                Vec::new()
            } else {
                (*of_rank(&environments, rank)).clone()
            },
            placement: Arc::clone(of_rank(&placements, rank)),
            stdio: Stdio::default(),
        };
        let mut instances = Vec::new();
        // A failed allocation in collect() would abort the C program.
        instances.try_reserve_exact(self.count as usize).map_err(|_| {
            Failure::from_errno(
                &format!("there is no memory for a list of {} processes", self.count),
                Errno::ENOMEM,
            )
        })?;
        instances.extend((0..self.count).map(instance));
        Ok(instances)
    }
}

/// Returns the element of `list` for the process with the number `rank`. If `list` has fewer elements than there are
/// processes, the processes use the elements in turns. `list` must not be empty.
fn of_rank<T>(list: &[T], rank: c_uint) -> &T {
    &list[rank as usize % list.len()]
}

/// The caller's array of process ids, which the library fills. `None` if the caller passed NULL.
pub(crate) struct PidArray<'a>(Option<&'a mut [pid_t]>);

impl PidArray<'_> {
    /// Makes the value from `pids`, the array that the C program passed. `count` is the number of process ids for which
    /// the array has room.
    ///
    /// # Safety
    /// `pids` must be NULL or have room for `count` numbers.
    pub(crate) unsafe fn new(pids: *mut pid_t, count: c_uint) -> Self {
        // SAFETY: the caller guarantees the room. The numbers need not be initialised, because they are only written.
        Self((!pids.is_null()).then(|| unsafe { std::slice::from_raw_parts_mut(pids, count as usize) }))
    }

    /// Writes one number for each process into the array: its process id, or its negative error number if the process
    /// could not be started. Returns the number of processes that have begun their program. Fails with the first error
    /// if no process has begun.
    pub(crate) fn write(self, results: &[Result<Child, SpawnError>]) -> Result<c_int, Failure> {
        let pid_or_errno = |result: &Result<Child, SpawnError>| match result {
            Ok(child) => pid_t::try_from(child.pid.0).unwrap_or(pid_t::MAX),
            Err(error) => -(error.errno as c_int),
        };
        for (element, result) in self.0.into_iter().flatten().zip(results) {
            *element = pid_or_errno(result);
        }
        let first_error = results.iter().find_map(|result| result.as_ref().err());
        let begun_count = results.iter().filter(|result| result.is_ok()).count();
        if let Some(error) = first_error {
            if begun_count == 0 {
                return Err(Failure::from_errno(error.step.name(), error.errno));
            }
            store_failure_message(&format!("{}: {}", error.step, error.errno.desc()));
        }
        Ok(c_int::try_from(begun_count).unwrap_or(c_int::MAX))
    }
}
