//! Farms for C programs: `include/pjw_farm.h` and the manual page pjw_farm(3) describe the functions.

mod options;
mod types;

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::ptr;
use std::time::Duration;

use libc::pid_t;
use nix::errno::Errno;
use pjw_core::ids::Pid;
use spawn::farm::{FarmError, ItemResult, NextResult, RunningFarm};

use crate::failure::{self, Failure, to_c_result};
pub use types::{PjwFarmBytes, PjwFarmItem, PjwFarmOptions, PjwFarmProgress, PjwFarmResult};

/// The C type `pjw_farm_t`: a started farm, which is a group of worker processes that compute items. C programs only
/// use pointers to this type.
pub struct PjwFarm {
    running: RunningFarm<'static>,
    /// The result whose bytes the caller may read.
    last_result: Option<ItemResult>,
}

impl Failure {
    /// Returns the failure of a farm that can't continue. `EAGAIN` of fork(2) becomes `ENOMEM`, because `EAGAIN` of
    /// `pjw_farm_next` means that no result came in time.
    fn of_farm_without_workers(error: FarmError) -> Self {
        let failure = Self::from(error);
        let errno = if failure.errno == Errno::EAGAIN { Errno::ENOMEM } else { failure.errno };
        Self { errno, ..failure }
    }
}

impl From<FarmError> for Failure {
    fn from(error: FarmError) -> Self {
        let errno = match &error {
            FarmError::InvalidOption { .. }
            | FarmError::InvalidCpus { .. }
            | FarmError::ChildSignalIgnored => Errno::EINVAL,
            FarmError::MultipleThreads(_) => Errno::EBUSY,
            FarmError::SystemCall { errno, .. } | FarmError::Fork(errno) => *errno,
            FarmError::WorkerDies { .. }
            | FarmError::IoProcessDies { .. }
            | FarmError::EndFailed { .. }
            | FarmError::IoProcessEndFailed { .. } => Errno::ECHILD,
            FarmError::IoProcessFailed { .. } => Errno::EIO,
            FarmError::ItemTooLarge { .. } => Errno::EMSGSIZE,
            FarmError::Overwritten(_) | FarmError::ResultOverwritten { .. } => Errno::EFAULT,
        };
        Self { errno, text: error.to_string() }
    }
}

/// Appends the `size` bytes at `bytes` to the byte array `to`. The functions `work` and `read` of a program with a
/// farm (a group of worker processes that compute items) call this. `work` appends the result of the item that it
/// computes. `read` appends the bytes of the item that it reads. Returns 0. Returns -1 with `EINVAL` if `to` is NULL,
/// or if `bytes` is NULL and `size` is not 0.
///
/// # Safety
/// `to` must be NULL, or the pointer that the library passed to `work` or `read`. This pointer is valid until `work`
/// or `read` returns. `bytes` must be NULL or point to `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pjw_farm_append(to: *mut PjwFarmBytes, bytes: *const c_void, size: usize) -> c_int {
    to_c_result(|| {
        // SAFETY: the caller guarantees NULL or such a pointer.
        let to = unsafe { to.as_mut() }.ok_or_else(|| Failure::invalid("to is NULL"))?;
        if size == 0 {
            return Ok(0);
        }
        if bytes.is_null() {
            return Err(Failure::invalid("bytes is NULL, and size is not 0"));
        }
        // SAFETY: the caller guarantees `size` bytes.
        to.0.extend_from_slice(unsafe { std::slice::from_raw_parts(bytes.cast(), size) });
        Ok(0)
    })
}

/// Starts a farm: forks worker processes, which compute items, from the calling process. If `options` contains a
/// function that reads the items, also forks a reader process, which calls this function. If `options` contains a
/// function that writes the results, also forks a writer process.
///
/// Returns the farm, or NULL with `errno`. After an error, no process of the farm remains. `errno` is:
///
/// - `EINVAL`: an option is invalid, or the process ignores `SIGCHLD`.
/// - `EBUSY`: the process has several threads, and the flag `PJW_FARM_ALLOW_THREADS` is not set.
/// - Another value: the error of a system call.
///
/// # Safety
/// `options` must be NULL, or point to options whose field `size` is correct. The functions in the options must
/// fulfil the conditions in `pjw_farm.h`. The pointer `data` in the options must be valid as long as the farm exists.
/// With the flag `PJW_FARM_ALLOW_THREADS`, the functions must not wait for a lock that another thread can hold.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pjw_farm_start(options: *const PjwFarmOptions) -> *mut PjwFarm {
    let mut farm = ptr::null_mut();
    to_c_result(|| {
        // SAFETY: the caller guarantees the same.
        let running = unsafe { options::start(options) }?;
        farm = Box::into_raw(Box::new(PjwFarm { running, last_result: None }));
        Ok(0)
    });
    farm
}

/// Waits for the next result of the farm (a group of worker processes that compute items), for at most `timeout_ms`
/// milliseconds. If `timeout_ms` is negative, waits without a limit. The return value is:
///
/// - 1 with the next result in `result`. Its bytes are valid until the next call of this function or of
///   [`pjw_farm_end`].
/// - 0 after the last result, when all processes of the farm have ended.
/// - -1 with `errno` after an error:
///   - `EAGAIN`: no result came in time. The farm continues.
///   - `EINVAL`: `farm` or `result` is NULL, or the function `fork_process` of the program returns invalid values.
///   - `ENOMEM`: for 10 s, fork(2) failed with `ENOMEM` or `EAGAIN`. The farm can't continue.
///   - Another value, listed in pjw_farm(3): the farm can't continue. After the last result, the error means that a
///     process of the farm failed at its end.
///
/// If the farm can't continue, its processes are killed, and each later call returns 0.
///
/// # Safety
/// `farm` must be NULL, or a farm from [`pjw_farm_start`] that [`pjw_farm_end`] has not freed. `result` must be NULL
/// or point to memory for a result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pjw_farm_next(
    farm: *mut PjwFarm,
    result: *mut PjwFarmResult,
    timeout_ms: c_int,
) -> c_int {
    to_c_result(|| {
        // SAFETY: the caller guarantees NULL or a farm.
        let farm = unsafe { farm.as_mut() }.ok_or_else(farm_is_null)?;
        if result.is_null() {
            return Err(Failure::invalid("result is NULL"));
        }
        let timeout = u64::try_from(timeout_ms).ok().map(Duration::from_millis);
        loop {
            match farm.running.next_within(timeout).map_err(Failure::of_farm_without_workers)? {
                NextResult::Result(next) => {
                    let next = farm.last_result.insert(next);
                    // SAFETY: the caller guarantees memory for a result.
                    unsafe { result.write(PjwFarmResult::from_result(next)) };
                    return Ok(1);
                }
                NextResult::End => return Ok(0),
                NextResult::TimedOut if timeout.is_some() => {
                    return Err(Failure {
                        errno: Errno::EAGAIN,
                        text: format!("no result came within {timeout_ms} ms"),
                    });
                }
                NextResult::TimedOut => {}
            }
        }
    })
}

/// Writes the progress of the farm (a group of worker processes that compute items) into `progress`: how many items
/// are done, how many failed, and how many workers run. Returns 0, or -1 with `EINVAL` if a pointer is NULL.
///
/// # Safety
/// `farm` must be NULL, or a farm from [`pjw_farm_start`] that [`pjw_farm_end`] has not freed. `progress` must be
/// NULL or point to memory for the value.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pjw_farm_get_progress(
    farm: *const PjwFarm,
    progress: *mut PjwFarmProgress,
) -> c_int {
    to_c_result(|| {
        // SAFETY: the caller guarantees NULL or a farm.
        let farm = unsafe { farm.as_ref() }.ok_or_else(farm_is_null)?;
        if progress.is_null() {
            return Err(Failure::invalid("progress is NULL"));
        }
        // SAFETY: the caller guarantees memory for the value.
        unsafe { progress.write(PjwFarmProgress::from_progress(&farm.running.progress())) };
        Ok(0)
    })
}

/// Writes the process ids of the farm's worker processes into `pids`, at most `count` ids. Returns the number of all
/// workers, even if this number is larger than `count`. A worker that has died is included until a call of
/// [`pjw_farm_next`] notices its death. Returns -1 with `EINVAL` if `farm` is NULL, or if `pids` is NULL and `count` is
/// not 0.
///
/// # Safety
/// `farm` must be NULL, or a farm from [`pjw_farm_start`] that [`pjw_farm_end`] has not freed. `pids` must be NULL or
/// point to memory for `count` values.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pjw_farm_workers(farm: *const PjwFarm, pids: *mut pid_t, count: c_uint) -> c_int {
    to_c_result(|| {
        // SAFETY: the caller guarantees NULL or a farm.
        let farm = unsafe { farm.as_ref() }.ok_or_else(farm_is_null)?;
        if pids.is_null() && count > 0 {
            return Err(Failure::invalid("pids is NULL, and count is not 0"));
        }
        let worker_pids = farm.running.worker_pids();
        for (index, pid) in worker_pids.iter().enumerate().take(count as usize) {
            // SAFETY: the caller guarantees memory for `count` values.
            unsafe { pids.add(index).write(to_c_pid(Some(*pid))) };
        }
        Ok(c_int::try_from(worker_pids.len()).unwrap_or(c_int::MAX))
    })
}

/// Returns the process id of the farm's reader process, which reads the items. If the reader has died, its old process
/// id is returned until a call of [`pjw_farm_next`] notices the death. Returns 0 if the farm has no reader, if the
/// reader has read all items and ended, or if a reader that died is not replaced yet. Returns -1 with `EINVAL` if
/// `farm` is NULL.
///
/// # Safety
/// `farm` must be NULL, or a farm from [`pjw_farm_start`] that [`pjw_farm_end`] has not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pjw_farm_reader(farm: *const PjwFarm) -> pid_t {
    to_c_result(|| {
        // SAFETY: the caller guarantees NULL or a farm.
        let farm = unsafe { farm.as_ref() }.ok_or_else(farm_is_null)?;
        Ok(to_c_pid(farm.running.reader_pid()))
    })
}

/// Returns the process id of the farm's writer process, which writes the results. If the writer has died, its old
/// process id is returned until a call of [`pjw_farm_next`] notices the death. Returns 0 if the farm has no writer, if
/// the writer has written all results and ended, or if a writer that died is not replaced yet. Returns -1 with `EINVAL`
/// if `farm` is NULL.
///
/// # Safety
/// `farm` must be NULL, or a farm from [`pjw_farm_start`] that [`pjw_farm_end`] has not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pjw_farm_writer(farm: *const PjwFarm) -> pid_t {
    to_c_result(|| {
        // SAFETY: the caller guarantees NULL or a farm.
        let farm = unsafe { farm.as_ref() }.ok_or_else(farm_is_null)?;
        Ok(to_c_pid(farm.running.writer_pid()))
    })
}

/// Ends a farm (a group of worker processes that compute items): kills all processes of the farm that still run, and
/// frees the memory of the farm. Does nothing if `farm` is NULL.
///
/// # Safety
/// `farm` must be NULL or a farm from [`pjw_farm_start`]. The caller must not use `farm` after this call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pjw_farm_end(farm: *mut PjwFarm) {
    if !farm.is_null() {
        // SAFETY: the value is from `pjw_farm_start`, and nothing else knows it any more.
        drop(unsafe { Box::from_raw(farm) });
    }
}

/// Returns the message about the last failure of a function of this library in the calling thread, as a C string. The
/// message is empty if no function failed. The pointer is valid until the next failure in this thread.
#[unsafe(no_mangle)]
pub extern "C" fn pjw_farm_error() -> *const c_char {
    failure::last_failure_message()
}

/// Returns the process id for a C program. 0 if there is no process.
fn to_c_pid(pid: Option<Pid>) -> pid_t {
    pid.map_or(0, |pid| pid.0.cast_signed())
}

fn farm_is_null() -> Failure {
    Failure::invalid("farm is NULL")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refused_fork_of_a_running_farm_does_not_look_like_a_missing_result() {
        let refused = Failure::of_farm_without_workers(FarmError::Fork(Errno::EAGAIN));
        assert_eq!((refused.errno, refused.text.is_empty()), (Errno::ENOMEM, false));
        assert_eq!(Failure::of_farm_without_workers(FarmError::ChildSignalIgnored).errno, Errno::EINVAL);
    }
}
