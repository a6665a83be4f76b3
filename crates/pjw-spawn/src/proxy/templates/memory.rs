//! How the launcher (the process that started a template) writes into the memory of a template or a spare.

use std::io::IoSlice;

use nix::errno::Errno;
use nix::sys::uio::{RemoteIoVec, process_vm_writev};

use crate::child::Child;
use crate::failure::{SpawnError, SpawnStep};
use crate::proxy::refusal::ForkError;

/// The most pieces of one call of process_vm_writev(2): `IOV_MAX`, which is `UIO_MAXIOV` of linux/uio.h.
const MAX_PIECES: usize = 1024;

/// Writes into the memory of the stopped process `process` by process_vm_writev(2). Each element of `changes` contains
/// an address, and the bytes that are written there.
///
/// # Errors
/// [`ForkError::WriteForbidden`] if the kernel forbids the call. In this case nothing was written. [`ForkError::Ended`]
/// if the process has ended.
pub(super) fn write(process: &Child, changes: &[(u64, Vec<u8>)]) -> Result<(), ForkError> {
    changes.chunks(MAX_PIECES).try_for_each(|pieces| write_pieces(process, pieces))
}

/// Writes `changes` into the memory of the stopped process `process` by one call of process_vm_writev(2). Each change
/// is an address and the bytes that are written there. `changes` must have at most [`MAX_PIECES`] elements.
///
/// # Errors
/// The errors of [`write()`].
fn write_pieces(process: &Child, changes: &[(u64, Vec<u8>)]) -> Result<(), ForkError> {
    let local: Vec<IoSlice<'_>> = changes.iter().map(|(_, bytes)| IoSlice::new(bytes)).collect();
    let remote_piece = |(address, bytes): &(u64, Vec<u8>)| RemoteIoVec {
        base: usize::try_from(*address).unwrap_or(0),
        len: bytes.len(),
    };
    let remote: Vec<RemoteIoVec> = changes.iter().map(remote_piece).collect();
    let length: usize = remote.iter().map(|piece| piece.len).sum();
    let pid = nix::unistd::Pid::from_raw(process.pid.0.cast_signed());
    match process_vm_writev(pid, &local, &remote) {
        Ok(written) if written == length => Ok(()),
        Err(Errno::ESRCH) => Err(ForkError::Ended),
        Err(errno @ (Errno::EPERM | Errno::ENOSYS)) => Err(ForkError::WriteForbidden(errno)),
        Ok(_) => Err(SpawnError { step: SpawnStep::Clone, errno: Errno::EFAULT }.into()),
        Err(errno) => Err(SpawnError { step: SpawnStep::Clone, errno }.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU8, Ordering};

    use pjw_core::ids::Pid;

    use super::*;

    #[test]
    fn more_pieces_than_one_call_takes_are_written() {
        let memory: Vec<AtomicU8> = (0..2500).map(|_| AtomicU8::new(0)).collect();
        // Only the process id is used.
        let process =
            Child { pid: Pid(std::process::id()), pidfd: std::fs::File::open("/dev/null").unwrap().into() };
        let change = |byte: &AtomicU8| (byte.as_ptr().expose_provenance() as u64, vec![7]);
        let changes: Vec<_> = memory.iter().map(change).collect();
        assert_eq!(write(&process, &changes), Ok(()));
        assert!(memory.iter().all(|byte| byte.load(Ordering::Relaxed) == 7));
    }
}
