//! libpjw_job.so: the crate pjw-job for C programs. `include/pjw_job.h` and the manual page pjw_job(3)
//! describe the functions. A function that fails sets `errno`, and keeps a message for the calling thread,
//! which [`pjw_job_error`] returns.

mod failure;

use std::ffi::{CStr, OsStr, c_char, c_int};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr;
use std::time::Duration;

use job::{Cores, CoresSource, Job, WantError};
use libc::cpu_set_t;
use pjw_core::cpuset::{CpuSet, Pu};

use crate::failure::{Failure, to_c_result};

/// The C type `pjw_job_t`: a handle by which a C program reads the cores of a job, and says how many cores the job
/// wants. C programs only use pointers to this type. Contains the [`Job`] of the crate pjw-job.
#[derive(Debug)]
pub struct PjwJob(Job);

/// The C type `pjw_cores_t`: how many cores and CPUs a job has at one time. The fields are those of the C type in
/// `pjw_job.h`, in the same order.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct PjwCores {
    /// A number that differs after each change. 0 without a core map: the CPUs of the job, as pjwd publishes them.
    epoch: u64,
    /// The time at which the leaving CPUs are taken from the job, in ns of `CLOCK_MONOTONIC`. If they are taken at
    /// different times, the earliest of these times. 0 if no CPU is leaving.
    leaving_at_ns: u64,
    /// 1 if pjwd publishes the cores. 0 if the numbers are those of the affinity mask of the calling thread.
    has_core_map: u32,
    /// The number of CPUs on which the job may run.
    cpus: u32,
    /// The number of physical cores of these CPUs.
    cores: u32,
    /// The number of CPUs that the job does not own. Each is free, or belongs to another job that leaves it idle, or is
    /// a housekeeping CPU (a CPU that is reserved for the system).
    borrowed: u32,
    /// The number of CPUs that are to be taken from the job at the time `leaving_at_ns`, or later.
    leaving: u32,
    /// The number of CPUs that are not leaving, but at least 1: the number of threads that a program should have.
    threads: u32,
}

impl From<&Cores> for PjwCores {
    fn from(cores: &Cores) -> Self {
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        Self {
            epoch: cores.epoch,
            leaving_at_ns: cores.leaving_at_ns.unwrap_or(0),
            has_core_map: u32::from(cores.source == CoresSource::CoreMap),
            cpus: count(cores.cpus.len()),
            cores: cores.core_count,
            borrowed: count(cores.borrowed.len()),
            leaving: count(cores.leaving.len()),
            threads: count(cores.recommended_thread_count()),
        }
    }
}

/// Opens a job and returns a pointer for further calls. `directory` is the path of the directory in which pjwd
/// publishes the cores of the job, such as `/run/pjwd/jobs/slurm:123`. If `directory` is NULL, opens the job to which
/// this process belongs. The first of the environment variables `PJW_JOB_DIR`, `PJW_JOB` and `SLURM_JOB_ID` that is
/// set says which job this is. The call succeeds even if there is no such directory: [`pjw_job_cores`] then describes
/// the affinity mask of the calling thread. Returns NULL and sets `errno` only after an internal error of the
/// library.
///
/// # Safety
/// `directory` must be NULL or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pjw_job_open(directory: *const c_char) -> *mut PjwJob {
    let mut opened = ptr::null_mut();
    to_c_result(|| {
        let job = if directory.is_null() {
            Job::of_this_process()
        } else {
            // SAFETY: the caller gives a C string.
            Job::in_directory(Path::new(OsStr::from_bytes(unsafe { CStr::from_ptr(directory) }.to_bytes())))
        };
        opened = Box::into_raw(Box::new(PjwJob(job)));
        Ok(0)
    });
    opened
}

/// Frees the memory of `job`. Does nothing if `job` is NULL.
///
/// # Safety
/// `job` must be NULL or from [`pjw_job_open`]. The caller must not use `job` after this call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pjw_job_close(job: *mut PjwJob) {
    if !job.is_null() {
        // SAFETY: the value is from `pjw_job_open`, and the caller does not use it any more.
        drop(unsafe { Box::from_raw(job) });
    }
}

/// Writes into `cores` how many cores and CPUs the job has now. If pjwd publishes no cores for the job, the numbers
/// are those of the affinity mask of the calling thread. While pjwd updates the published cores, the call waits for at
/// most 100 ms. If the update is not complete then, the call writes the cores that were read last through `job`.
/// Returns 0. Returns -1 and sets `errno` to `EINVAL` if `job` or `cores` is NULL.
///
/// # Safety
/// `job` must be NULL or from [`pjw_job_open`]. `cores` must be NULL or have room for a `pjw_cores_t`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pjw_job_cores(job: *mut PjwJob, cores: *mut PjwCores) -> c_int {
    to_c_result(|| {
        // SAFETY: the caller gives NULL or a job.
        let job = unsafe { job_of(job) }?;
        // SAFETY: the caller gives NULL or the room.
        unsafe { write_cores(cores, PjwCores::from(&job.cores())) }
    })
}

/// Writes one of the sets of CPUs of the job into `set`, which has `size` bytes. Returns the number of CPUs
/// in the set. `which` chooses the set, by the values of the C type `enum pjw_cpus`:
///
/// - 0: The CPUs on which the job may run.
/// - 1: The CPUs that the job owns.
/// - 2: The CPUs that the job borrows from other jobs.
/// - 3: The CPUs that are to be taken from the job soon.
/// - 4: The CPUs that the job owns and that another job borrows now.
///
/// Returns -1 and sets `errno` after a failure: `ERANGE` if `size` is too small for the CPUs, `EINVAL` for
/// another `which` or if a pointer is NULL.
///
/// # Safety
/// `job` must be NULL or from [`pjw_job_open`]. `set` must be NULL or have room for `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pjw_job_cpus(
    job: *mut PjwJob,
    which: c_int,
    set: *mut cpu_set_t,
    size: usize,
) -> c_int {
    to_c_result(|| {
        // SAFETY: the caller gives NULL or a job.
        let cores = unsafe { job_of(job) }?.cores();
        let cpus = match which {
            0 => cores.cpus,
            1 => cores.own,
            2 => cores.borrowed,
            3 => cores.leaving,
            4 => cores.lent,
            _ => return Err(Failure::invalid(format!("there is no set {which}"))),
        };
        if set.is_null() {
            return Err(Failure::invalid("the set is NULL"));
        }
        let bytes = cpu_set_bytes(&cpus, size)?;
        // SAFETY: the caller gives room for `size` bytes, and `bytes` has `size` bytes.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), set.cast(), size) };
        Ok(c_int::try_from(cpus.len()).unwrap_or(c_int::MAX))
    })
}

/// Returns 1 if the job may run on the CPU `cpu`: the job owns the CPU, or borrows it from another job.
/// Otherwise returns 0. Returns -1 and sets `errno` to `EINVAL` if `job` is NULL or `cpu` is negative.
///
/// # Safety
/// `job` must be NULL or from [`pjw_job_open`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pjw_job_has_cpu(job: *mut PjwJob, cpu: c_int) -> c_int {
    to_c_result(|| {
        // SAFETY: the caller gives NULL or a job.
        let job = unsafe { job_of(job) }?;
        let cpu = u32::try_from(cpu).map_err(|_| Failure::invalid(format!("{cpu} is no CPU")))?;
        Ok(c_int::from(job.has_cpu(Pu(cpu))))
    })
}

/// Waits until the cores of the job change, but at most `timeout_ms` milliseconds. If `timeout_ms` is negative,
/// waits without a limit. Each change of the cores has a new number, the epoch. `epoch` is the epoch of the cores
/// that the caller got last, from [`pjw_job_cores`] or from this function. If the present epoch already differs,
/// the call returns at once. The return value is:
///
/// - 1 after a change, with the changed cores in `cores`.
/// - 0 if the time has passed. `cores` is then not changed.
/// - -1 with `EINVAL` in `errno` if `job` or `cores` is NULL.
///
/// # Safety
/// `job` must be NULL or from [`pjw_job_open`]. `cores` must be NULL or have room for a `pjw_cores_t`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pjw_job_wait(
    job: *mut PjwJob,
    epoch: u64,
    timeout_ms: c_int,
    cores: *mut PjwCores,
) -> c_int {
    to_c_result(|| {
        // SAFETY: the caller gives NULL or a job.
        let job = unsafe { job_of(job) }?;
        if cores.is_null() {
            return Err(Failure::invalid("the pointer for the cores is NULL"));
        }
        let timeout = u64::try_from(timeout_ms).ok().map(Duration::from_millis);
        let Some(changed) = job.wait_for_change(epoch, timeout) else { return Ok(0) };
        // SAFETY: the caller gives the room.
        unsafe { write_cores(cores, PjwCores::from(&changed)) }?;
        Ok(1)
    })
}

/// Informs pjwd that the job can use `cores` cores at present. 0 means that the job needs no core. -1 cancels the
/// number of the last call: the job can then use all cores that pjwd or the batch system granted to it. Returns 0.
/// After a failure, returns -1 and sets `errno`:
///
/// - `ENOENT` if pjwd has no files for the job, for example because the program is in no job or the job has ended.
/// - `EINVAL` if `job` is NULL or `cores` is less than -1.
/// - Otherwise the error of writing the number, such as `EACCES` if the user does not own the job.
///
/// # Safety
/// `job` must be NULL or from [`pjw_job_open`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pjw_job_want(job: *mut PjwJob, cores: c_int) -> c_int {
    to_c_result(|| {
        // SAFETY: the caller gives NULL or a job.
        let job = unsafe { job_of(job) }?;
        match cores {
            0.. => job.set_wanted_cores(cores.cast_unsigned())?,
            -1 => job.reset_wanted_cores()?,
            _ => return Err(Failure::invalid(format!("{cores} is no number of cores"))),
        }
        Ok(0)
    })
}

/// Returns the message about the last failure of a function of this library in the calling thread. The
/// message is empty if no function failed. The pointer is valid until the next failure in this thread.
#[unsafe(no_mangle)]
pub extern "C" fn pjw_job_error() -> *const c_char {
    failure::last_failure_message()
}

impl From<WantError> for Failure {
    fn from(error: WantError) -> Self {
        let errno = match &error {
            WantError::NoJob => libc::ENOENT,
            WantError::WriteFailed { source, .. } => source.raw_os_error().unwrap_or(libc::EIO),
        };
        Self { errno, text: error.to_string() }
    }
}

/// Returns the job to which `job` points. Fails with `EINVAL` if `job` is NULL.
///
/// # Safety
/// The pointer must be NULL or from [`pjw_job_open`].
unsafe fn job_of<'a>(job: *mut PjwJob) -> Result<&'a Job, Failure> {
    // SAFETY: the caller guarantees the pointer.
    unsafe { job.as_ref() }.map(|job| &job.0).ok_or_else(|| Failure::invalid("the job is NULL"))
}

/// Writes `cores` to `destination`, and returns 0. Fails with `EINVAL` if `destination` is NULL.
///
/// # Safety
/// `destination` must be NULL or have room for the value.
unsafe fn write_cores(destination: *mut PjwCores, cores: PjwCores) -> Result<c_int, Failure> {
    if destination.is_null() {
        return Err(Failure::invalid("the pointer for the cores is NULL"));
    }
    // SAFETY: the caller guarantees the room.
    unsafe { destination.write(cores) };
    Ok(0)
}

/// Returns `cpus` as the content of a `cpu_set_t` of `size` bytes: an array of `unsigned long` with one bit for each
/// CPU.
///
/// # Errors
/// `ERANGE` if `size` bytes have no bit for a CPU in `cpus`.
fn cpu_set_bytes(cpus: &CpuSet, size: usize) -> Result<Vec<u8>, Failure> {
    if cpus.last().is_some_and(|last| last.0 as usize >= size.saturating_mul(8)) {
        return Err(Failure {
            errno: libc::ERANGE,
            text: format!("a set of {size} bytes has no room for {cpus}"),
        });
    }
    let mut bytes: Vec<u8> = cpus.words().iter().flat_map(|word| word.to_ne_bytes()).collect();
    bytes.resize(size, 0);
    Ok(bytes)
}
