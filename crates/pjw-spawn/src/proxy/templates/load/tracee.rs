//! A process that is traced with ptrace(2): its memory, its registers, and the system calls that the tracer
//! makes it execute.

use std::fs::File;
use std::mem::{MaybeUninit, size_of};
use std::os::unix::fs::FileExt;

use nix::errno::Errno;
use nix::sys::ptrace::{self, Options};
use nix::sys::signal::Signal;
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

use super::arch::{self, Registers};
use crate::child::Child;

/// A child process that the calling thread traces with ptrace(2). The process is stopped, except during the calls of
/// methods that let it run. Dropping this value kills the process.
#[derive(Debug)]
pub(in crate::proxy::templates) struct Tracee {
    pid: Pid,
    /// `None` after the end of the trace.
    child: Option<Child>,
    memory: File,
}

/// The reason why a traced process has stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::proxy::templates) enum StopReason {
    /// Before or after a system call.
    SystemCall,
    /// At a breakpoint, whose instruction has been executed, or after execve(2).
    Trap,
}

/// Error: a traced process has ended, or can't be traced any longer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::proxy::templates) enum TraceError {
    /// The process has exited. The variant contains the exit status.
    Exited(i32),
    /// A signal has killed the process. The variant contains the number of the signal.
    Killed(i32),
    /// A call of ptrace(2) or an access to the memory of the process has failed.
    Failed(Errno),
}

impl From<Errno> for TraceError {
    fn from(errno: Errno) -> Self {
        Self::Failed(errno)
    }
}

impl Tracee {
    /// Waits until `child` has stopped after its execve(2), and returns it as a traced process. `child` must have
    /// requested the trace before its execve(2). From now on, the kernel kills the process when the calling thread
    /// ends.
    pub(in crate::proxy::templates) fn after_exec(child: Child) -> Result<Self, TraceError> {
        let pid = Pid::from_raw(child.pid.0.cast_signed());
        wait_for_stop(pid)?;
        let options = Options::PTRACE_O_EXITKILL | Options::PTRACE_O_TRACESYSGOOD;
        let memory = File::options().read(true).write(true).open(format!("/proc/{pid}/mem"));
        match (ptrace::setoptions(pid, options), memory) {
            (Ok(()), Ok(memory)) => Ok(Self { pid, child: Some(child), memory }),
            (options, memory) => {
                child.kill_and_wait();
                Err(TraceError::Failed(
                    options.err().or(memory.as_ref().err().map(errno_of)).unwrap_or(Errno::EPERM),
                ))
            }
        }
    }

    /// Returns the process id of the traced process.
    pub(in crate::proxy::templates) fn pid(&self) -> Pid {
        self.pid
    }

    /// Reads `bytes.len()` bytes of the memory of the process at `address`.
    pub(in crate::proxy::templates) fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), Errno> {
        self.memory.read_exact_at(bytes, address).map_err(|error| errno_of(&error))
    }

    /// Reads a 64-bit number from the memory of the process at `address`.
    pub(in crate::proxy::templates) fn read_u64(&self, address: u64) -> Result<u64, Errno> {
        let mut bytes = [0; 8];
        self.read(address, &mut bytes)?;
        Ok(u64::from_ne_bytes(bytes))
    }

    /// Reads the C string at `address` from the memory of the process. The result has no NUL byte.
    pub(in crate::proxy::templates) fn read_string(&self, address: u64) -> Result<Vec<u8>, Errno> {
        let mut text = Vec::new();
        let mut byte = [0];
        loop {
            self.read(address + text.len() as u64, &mut byte)?;
            match byte {
                [0] => return Ok(text),
                [byte] => text.push(byte),
            }
        }
    }

    /// Writes `bytes` into the memory of the process at `address`, even if the mapping there is read-only.
    pub(in crate::proxy::templates) fn write(&self, address: u64, bytes: &[u8]) -> Result<(), Errno> {
        self.memory.write_all_at(bytes, address).map_err(|error| errno_of(&error))
    }

    /// Reads the registers of the stopped process.
    pub(in crate::proxy::templates) fn registers(&self) -> Result<Registers, Errno> {
        ptrace::getregs(self.pid)
    }

    /// Sets the registers of the stopped process.
    pub(in crate::proxy::templates) fn set_registers(&self, registers: Registers) -> Result<(), Errno> {
        ptrace::setregs(self.pid, registers)
    }

    /// Lets the process run until it has executed a breakpoint. Signals that the process gets during this time are
    /// delivered.
    pub(in crate::proxy::templates) fn run(&mut self) -> Result<StopReason, TraceError> {
        self.resume_until_stop(ptrace::cont)
    }

    /// Lets the process run until a system call begins or ends, or until the process has executed a breakpoint.
    pub(in crate::proxy::templates) fn run_to_system_call(&mut self) -> Result<StopReason, TraceError> {
        self.resume_until_stop(ptrace::syscall)
    }

    /// Lets the process execute one instruction.
    pub(in crate::proxy::templates) fn step(&mut self) -> Result<StopReason, TraceError> {
        self.resume_until_stop(ptrace::step)
    }

    /// Resumes the process by `resume`, and waits until it stops. A signal for the process does not end the wait: the
    /// signal is delivered, and the process resumed again.
    ///
    /// # Errors
    /// If the process has ended, or can't be resumed.
    fn resume_until_stop(
        &mut self,
        resume: fn(Pid, Option<Signal>) -> Result<(), Errno>,
    ) -> Result<StopReason, TraceError> {
        let mut signal = None;
        loop {
            resume(self.pid, signal)?;
            match wait_for_stop(self.pid) {
                Ok(StopOrSignal::Stop(reason)) => return Ok(reason),
                Ok(StopOrSignal::Signal(arrived)) => signal = Some(arrived),
                Err(error) => {
                    let has_ended = !matches!(error, TraceError::Failed(_));
                    if has_ended {
                        self.child = None;
                    }
                    return Err(error);
                }
            }
        }
    }

    /// Lets the process execute the system call `number` with `arguments`, and returns the result. If the system call
    /// fails, the error is [`TraceError::Failed`]. Afterwards the registers and the code of the process are as before.
    pub(in crate::proxy::templates) fn call(
        &mut self,
        number: i64,
        arguments: [u64; 6],
    ) -> Result<u64, TraceError> {
        let saved_registers = self.registers()?;
        let address = arch::instruction_pointer(&saved_registers);
        let mut saved_code = [0; arch::SYSTEM_CALL.len()];
        self.read(address, &mut saved_code)?;
        self.write(address, &arch::SYSTEM_CALL)?;
        self.set_registers(arch::for_system_call(saved_registers, number, arguments))?;
        self.step()?;
        let result = arch::system_call_result(&self.registers()?);
        self.write(address, &saved_code)?;
        self.set_registers(saved_registers)?;
        let errno = result.cast_signed().checked_neg().and_then(|negated| i32::try_from(negated).ok());
        match errno {
            Some(errno @ 1..=4095) => Err(TraceError::Failed(Errno::from_raw(errno))),
            _ => Ok(result),
        }
    }

    /// Ends the tracing of the process, and lets the process run.
    pub(in crate::proxy::templates) fn detach(mut self) -> Result<Child, Errno> {
        ptrace::detach(self.pid, None)?;
        self.child.take().ok_or(Errno::ESRCH)
    }
}

impl Drop for Tracee {
    fn drop(&mut self) {
        if let Some(child) = &self.child {
            child.kill_and_wait();
        }
    }
}

/// Why waitpid(2) has returned for a traced process: a stop that the tracer wanted, or a signal that the process
/// gets.
enum StopOrSignal {
    Stop(StopReason),
    Signal(Signal),
}

/// Waits until the traced process with the id `pid` stops. Returns the reason of the stop. For a stop by a signal,
/// returns the signal, which the caller must deliver. The calling thread must be the tracer.
///
/// # Errors
/// [`TraceError::Exited`] or [`TraceError::Killed`] if the process has ended. [`TraceError::Failed`] if waitpid(2)
/// fails.
fn wait_for_stop(pid: Pid) -> Result<StopOrSignal, TraceError> {
    loop {
        match waitpid(pid, Some(WaitPidFlag::__WALL)) {
            Ok(WaitStatus::PtraceSyscall(_)) => return Ok(StopOrSignal::Stop(StopReason::SystemCall)),
            Ok(WaitStatus::Stopped(_, Signal::SIGTRAP) | WaitStatus::PtraceEvent(..)) => {
                return Ok(StopOrSignal::Stop(StopReason::Trap));
            }
            Ok(WaitStatus::Stopped(_, signal)) => return Ok(StopOrSignal::Signal(signal)),
            Ok(WaitStatus::Exited(_, status)) => return Err(TraceError::Exited(status)),
            Ok(WaitStatus::Signaled(_, signal, _)) => return Err(TraceError::Killed(signal as i32)),
            Ok(_) | Err(Errno::EINTR) => {}
            Err(errno) => return Err(TraceError::Failed(errno)),
        }
    }
}

/// Returns the bytes of a value, as they are in memory.
pub(in crate::proxy::templates) fn bytes_of<T: PlainData>(value: &T) -> &[u8] {
    // SAFETY: a plain type has no padding, so that all of its bytes are initialised. The slice borrows the value.
    unsafe { std::slice::from_raw_parts((&raw const *value).cast(), size_of::<T>()) }
}

/// Makes a value of type `T` from the first bytes of `bytes`. `None` if `bytes` is shorter than `T`.
pub(in crate::proxy::templates) fn value_of<T: PlainData>(bytes: &[u8]) -> Option<T> {
    let bytes = bytes.get(..size_of::<T>())?;
    let mut value = MaybeUninit::<T>::uninit();
    // SAFETY: the source has as many bytes as the target, and every value of the bytes is a value of a plain type.
    unsafe {
        std::ptr::copy_nonoverlapping(bytes.as_ptr(), value.as_mut_ptr().cast::<u8>(), size_of::<T>());
        Some(value.assume_init())
    }
}

/// A type that can be sent to another process as bytes. The type contains only numbers, and has no padding.
///
/// # Safety
/// The type must have no padding. All combinations of bytes must be valid values of the type.
pub(in crate::proxy::templates) unsafe trait PlainData: Copy {}

// SAFETY: the type has only numbers of 64 bits, in the order of C.
unsafe impl PlainData for crate::proxy::templates::message::stub::StubData {}
// SAFETY: as above.
unsafe impl PlainData for crate::proxy::templates::message::stub::TemplateCall {}
// SAFETY: the type has a number of 64 bits, and an even number of numbers of 32 bits.
unsafe impl PlainData for crate::proxy::templates::message::stub::TemplateReply {}

// SAFETY: the type has numbers of 64 bits. The two numbers of 32 bits at the end fill 64 bits.
unsafe impl PlainData for crate::proxy::templates::message::block::MemoryMap {}

// SAFETY: the type has only numbers of 64 bits, in the order of C.
unsafe impl PlainData for crate::proxy::templates::message::addresses::TemplateAddresses {}

/// Returns the errno of an I/O error. `EIO` if the error has none.
pub(in crate::proxy::templates) fn errno_of(error: &std::io::Error) -> Errno {
    error.raw_os_error().map_or(Errno::EIO, Errno::from_raw)
}
