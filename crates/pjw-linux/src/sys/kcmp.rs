//! Whether two processes have the same address space: kcmp(2).

use std::cmp::Ordering;

use nix::errno::Errno;
use pjw_core::ids::Pid;

/// `KCMP_VM` of the kernel's `include/uapi/linux/kcmp.h`.
const KCMP_VM: libc::c_long = 1;

/// Compares the address spaces of two processes. Returns `Equal` if the two processes share one address space,
/// as after clone(2) with `CLONE_VM`. Otherwise returns `Less` or `Greater`: an arbitrary order of the address
/// spaces, by which callers can sort processes. This order stays the same until the next boot.
///
/// # Errors
/// `ESRCH` if one of the processes has ended. `EPERM` if this user has no permission to trace both processes
/// (ptrace(2)). `ENOSYS` if the kernel has no system call kcmp(2) (`CONFIG_KCMP`).
pub fn compare_address_spaces(first: Pid, second: Pid) -> Result<Ordering, Errno> {
    let number = |pid: Pid| libc::c_long::from(pid.0);
    // SAFETY: the call takes numbers and accesses no memory of this process.
    let order = unsafe { libc::syscall(libc::SYS_kcmp, number(first), number(second), KCMP_VM, 0, 0) };
    match Errno::result(order)? {
        0 => Ok(Ordering::Equal),
        1 => Ok(Ordering::Less),
        2 => Ok(Ordering::Greater),
        // 3: the kernel can't order them, and they differ.
        _ => Ok(first.cmp(&second)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::until_true;

    #[test]
    fn a_process_shares_its_address_space_with_itself_and_not_with_its_child() {
        let own = Pid(std::process::id());
        match compare_address_spaces(own, own) {
            Err(Errno::ENOSYS) => return println!("skipped: this kernel has no kcmp"),
            Err(Errno::EPERM) => return println!("skipped: kcmp is forbidden here, as in a container"),
            _ => {}
        }
        assert_eq!(compare_address_spaces(own, own), Ok(Ordering::Equal));
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let other = Pid(child.id());
        // `spawn` may wait as the parent of vfork(2) does. The kernel lets the parent go on before the child has an
        // address space of its own, and sets the name of the program after that (exec_mmap and begin_new_exec in
        // fs/exec.c).
        let name = format!("/proc/{other}/comm");
        until_true("the child executes sleep", || std::fs::read_to_string(&name).unwrap() == "sleep\n");
        let (one, two) =
            (compare_address_spaces(own, other).unwrap(), compare_address_spaces(other, own).unwrap());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(one != Ordering::Equal && one == two.reverse(), "{one:?} {two:?}");
        assert_eq!(compare_address_spaces(own, other), Err(Errno::ESRCH));
    }
}
