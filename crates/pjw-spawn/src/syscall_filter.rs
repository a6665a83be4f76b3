//! For tests: makes a system call fail, as on a kernel that lacks the call and on a system that forbids the call.

use nix::errno::Errno;

/// Makes the system call with the number `call` fail with `errno`, by a filter of seccomp(2). The filter applies to
/// the calling thread, and to the threads and processes that this thread starts. It can't be removed.
pub(crate) fn refuse_call(call: libc::c_long, errno: Errno) {
    let statement =
        |code: u32, jt, jf, k| libc::sock_filter { code: u16::try_from(code).unwrap(), jt, jf, k };
    let call = u32::try_from(call).unwrap();
    let error = libc::SECCOMP_RET_ERRNO | (errno as i32).cast_unsigned();
    let mut filter = [
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        statement(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 1, call),
        statement(libc::BPF_RET | libc::BPF_K, 0, 0, error),
        statement(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: 4, filter: filter.as_mut_ptr() };
    // SAFETY: the program and its filter outlive the calls.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program), 0);
    }
}
