//! Farms for C programs: `include/pjw_farm.h` and the manual page pjw_farm(3) describe the functions.

mod options;
mod types;

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::ptr;
use std::time::Duration;

use libc::pid_t;
use nix::errno::Errno;
use spawn::farm::{FarmError, ItemResult, NextResult, RunningFarm};

use crate::failure::{self, Failure, returned};
pub use types::{PjwFarmBytes, PjwFarmItem, PjwFarmOptions, PjwFarmProgress, PjwFarmResult};

/// The C type `pjw_farm_t`: a farm that runs.
pub struct PjwFarm {
    running: RunningFarm<'static>,
    /// The result whose bytes the caller may read.
    last: Option<ItemResult>,
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
            FarmError::Overwritten(_) => Errno::EFAULT,
        };
        Self { errno, text: error.to_string() }
    }
}

/// Appends `size` bytes at `bytes` to the result of an item, or to an item that is read. Returns 0, or -1 with `errno`
/// if a pointer is NULL.
///
/// # Safety
/// `to` must be NULL or the pointer that the function of the program was called with. `bytes` must be NULL or point to
/// `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pjw_farm_append(to: *mut PjwFarmBytes, bytes: *const c_void, size: usize) -> c_int {
    returned(|| {
        // SAFETY: the caller guarantees NULL or such a pointer.
        let to = unsafe { to.as_mut() }.ok_or_else(|| Failure::invalid("to is NULL"))?;
        if size == 0 {
            return Ok(0);
        }
        if bytes.is_null() {
            return Err(Failure::invalid("bytes is NULL, and size is not 0"));
        }
        // SAFETY: the caller guarantees so many bytes.
        to.0.extend_from_slice(unsafe { std::slice::from_raw_parts(bytes.cast(), size) });
        Ok(0)
    })
}

/// Forks the workers now, and the reader and the writer if `options` has their functions. Returns the farm, or NULL with
/// `errno`: `EINVAL` for a wrong option, `EBUSY` if the process has several threads, or the error of a system call. No
/// process is left then.
///
/// # Safety
/// `options` must be NULL or point to options whose field `size` is right. Its functions must be such as `pjw_farm.h`
/// says, and `data` must be valid as long as the farm exists. With `PJW_FARM_ALLOW_THREADS` the functions must not wait
/// for a lock of another thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pjw_farm_start(options: *const PjwFarmOptions) -> *mut PjwFarm {
    let mut farm = ptr::null_mut();
    returned(|| {
        // SAFETY: the caller guarantees the same.
        let running = unsafe { options::start(options) }?;
        farm = Box::into_raw(Box::new(PjwFarm { running, last: None }));
        Ok(0)
    });
    farm
}

/// Waits for the next result, for at most `timeout_ms` milliseconds, or without a limit if that is below 0. Returns 1
/// and writes the result; or 0 when all results were delivered and all processes have ended; or -1 with `errno`. `errno`
/// is `EAGAIN` if no result came in time. For any other `errno` the farm can't go on and its processes were killed.
///
/// The bytes of the result are valid until the next call of this function or of [`pjw_farm_end`].
///
/// # Safety
/// `farm` must be NULL or a farm of [`pjw_farm_start`] that was not ended. `result` must be NULL or point to memory for
/// a result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pjw_farm_next(
    farm: *mut PjwFarm,
    result: *mut PjwFarmResult,
    timeout_ms: c_int,
) -> c_int {
    returned(|| {
        // SAFETY: the caller guarantees NULL or a farm.
        let farm = unsafe { farm.as_mut() }.ok_or_else(farm_is_null)?;
        if result.is_null() {
            return Err(Failure::invalid("result is NULL"));
        }
        let timeout = u64::try_from(timeout_ms).ok().map(Duration::from_millis);
        loop {
            match farm.running.next_within(timeout)? {
                NextResult::Result(next) => {
                    let next = farm.last.insert(next);
                    // SAFETY: the caller gives the room.
                    unsafe { result.write(PjwFarmResult::of(next)) };
                    return Ok(1);
                }
                NextResult::End => return Ok(0),
                NextResult::NothingYet if timeout.is_some() => {
                    return Err(Failure {
                        errno: Errno::EAGAIN,
                        text: format!("no result came within {timeout_ms} ms"),
                    });
                }
                NextResult::NothingYet => {}
            }
        }
    })
}

/// Writes how far the farm is. Returns 0, or -1 with `EINVAL` if a pointer is NULL.
///
/// # Safety
/// `farm` as for [`pjw_farm_next`]. `progress` must be NULL or point to memory for the value.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pjw_farm_get_progress(
    farm: *const PjwFarm,
    progress: *mut PjwFarmProgress,
) -> c_int {
    returned(|| {
        // SAFETY: the caller guarantees NULL or a farm.
        let farm = unsafe { farm.as_ref() }.ok_or_else(farm_is_null)?;
        if progress.is_null() {
            return Err(Failure::invalid("progress is NULL"));
        }
        // SAFETY: the caller gives the room.
        unsafe { progress.write(PjwFarmProgress::of(&farm.running.progress())) };
        Ok(0)
    })
}

/// Writes the process ids of at most `count` workers that run now into `pids`. Returns the number of all that run, or -1
/// with `EINVAL` if `farm` is NULL, or if `pids` is NULL and `count` is not 0.
///
/// # Safety
/// `farm` as for [`pjw_farm_next`]. `pids` must be NULL or point to memory for `count` values.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pjw_farm_workers(farm: *const PjwFarm, pids: *mut pid_t, count: c_uint) -> c_int {
    returned(|| {
        // SAFETY: the caller guarantees NULL or a farm.
        let farm = unsafe { farm.as_ref() }.ok_or_else(farm_is_null)?;
        if pids.is_null() && count > 0 {
            return Err(Failure::invalid("pids is NULL, and count is not 0"));
        }
        let running = farm.running.worker_pids();
        for (at, pid) in running.iter().enumerate().take(count as usize) {
            // SAFETY: the caller gives room for so many values.
            unsafe { pids.add(at).write(pid.0.cast_signed()) };
        }
        Ok(c_int::try_from(running.len()).unwrap_or(c_int::MAX))
    })
}

/// Kills the processes of the farm that still run, and frees it. Does nothing if `farm` is NULL.
///
/// # Safety
/// `farm` as for [`pjw_farm_next`]. It must not be used afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pjw_farm_end(farm: *mut PjwFarm) {
    if !farm.is_null() {
        // SAFETY: the value is from `pjw_farm_start`, and nothing else knows it any more.
        drop(unsafe { Box::from_raw(farm) });
    }
}

/// Returns the message about the last failure in the calling thread, as a C string. Empty if there was no failure. The
/// message is valid until the next failure in the same thread.
#[unsafe(no_mangle)]
pub extern "C" fn pjw_farm_error() -> *const c_char {
    failure::last_text()
}

fn farm_is_null() -> Failure {
    Failure::invalid("farm is NULL")
}
