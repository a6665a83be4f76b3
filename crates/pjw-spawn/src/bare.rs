//! System calls without the C library. The functions of the C library write `errno`, which lies at the thread pointer.
//! Processes that share their memory and have the same thread pointer would write the same `errno`.

use std::ffi::c_long;

/// The highest errno of the kernel: linux/err.h.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
const MAX_ERRNO: i64 = 4095;

/// Makes the system call `number` with `arguments`, without the C library. Returns the result of the system call, or
/// its errno. This is the function for x86-64 and aarch64.
///
/// # Safety
/// The caller must meet the requirements of this system call for these arguments.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(crate) unsafe fn raw_syscall(number: c_long, arguments: [i64; 5]) -> Result<i64, i32> {
    let [first, second, third, fourth, fifth] = arguments;
    let result: i64;
    // SAFETY: the caller guarantees the call. The kernel keeps all registers except rax, rcx and r11.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        std::arch::asm!(
            "syscall",
            inlateout("rax") number => result,
            in("rdi") first,
            in("rsi") second,
            in("rdx") third,
            in("r10") fourth,
            in("r8") fifth,
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    // SAFETY: the caller guarantees the call. The kernel keeps all registers except x0.
    #[cfg(target_arch = "aarch64")]
    unsafe {
        std::arch::asm!(
            "svc 0",
            in("x8") number,
            inlateout("x0") first => result,
            in("x1") second,
            in("x2") third,
            in("x3") fourth,
            in("x4") fifth,
            options(nostack),
        );
    }
    if (-MAX_ERRNO..0).contains(&result) {
        Err(i32::try_from(-result).unwrap_or(libc::EIO))
    } else {
        Ok(result)
    }
}

/// Makes the system call `number` with `arguments` by syscall(2) of the C library. Returns the result of the system
/// call, or its errno. This is the function for architectures other than x86-64 and aarch64.
///
/// # Safety
/// The caller must meet the requirements of this system call for these arguments.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
pub(crate) unsafe fn raw_syscall(number: c_long, arguments: [i64; 5]) -> Result<i64, i32> {
    let [first, second, third, fourth, fifth] = arguments;
    // SAFETY: the caller guarantees the call.
    let result = unsafe { libc::syscall(number, first, second, third, fourth, fifth) };
    if result < 0 { Err(nix::errno::Errno::last_raw()) } else { Ok(result.into()) }
}

/// Returns the address in `pointer` as an integer, which is the form of a pointer in the arguments of [`raw_syscall`].
pub(crate) fn address<T>(pointer: *const T) -> i64 {
    pointer.expose_provenance().cast_signed() as i64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_returns_its_result_or_its_errno() {
        // SAFETY: both calls change nothing.
        let (pid, failed) = unsafe {
            let flags = i64::from(libc::F_GETFD);
            (raw_syscall(libc::SYS_getpid, [0; 5]), raw_syscall(libc::SYS_fcntl, [-1, flags, 0, 0, 0]))
        };
        assert_eq!(pid, Ok(i64::from(std::process::id())));
        assert_eq!(failed, Err(libc::EBADF));
    }

    #[test]
    fn all_arguments_reach_the_kernel() {
        let mut old: u64 = 0;
        let bytes = size_of_val(&old).try_into().unwrap();
        let (how, null) = (i64::from(libc::SIG_BLOCK), address(std::ptr::null::<u64>()));
        // SAFETY: the kernel writes one set of signals.
        let result =
            unsafe { raw_syscall(libc::SYS_rt_sigprocmask, [how, null, address(&raw mut old), bytes, 0]) };
        assert_eq!((result, old), (Ok(0), crate::signals::blocked_signals()));
        // SAFETY: the fourth argument is a wrong size, so the kernel refuses the call.
        let refused =
            unsafe { raw_syscall(libc::SYS_rt_sigprocmask, [how, null, address(&raw mut old), 1, 0]) };
        assert_eq!(refused, Err(libc::EINVAL));
        // SAFETY: changes nothing: the kernel refuses an unknown operation of prctl(2).
        let unknown = unsafe { raw_syscall(libc::SYS_prctl, [i64::from(i32::MAX), 0, 0, 0, 0]) };
        assert_eq!(unknown, Err(libc::EINVAL));
    }
}
