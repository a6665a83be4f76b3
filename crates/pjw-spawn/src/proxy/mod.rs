//! Proxy: a program is loaded and linked once, and every instance is a fork of it.
//!
//! A [`Template`] is a process of the program that is stopped before `main`. ptrace(2) leads it there and gives it a
//! page of code of ours (`stub.rs`); from then on it is not traced, and waits on a channel without using a CPU.
//! [`Template::fork`] writes the arguments and the environment of an instance over the template's and has it make one
//! clone(2) with `CLONE_PARENT`, so that the instance is a child of the launcher.
//!
//! Instances have of their own what a started program has: process id, arguments, environment, mask, streams, exit
//! status, the bytes of `AT_RANDOM`, the names in /proc. They share what the loader made: the address layout, the stack
//! canary and the pointer guard of dynamic programs.

mod refusal;

#[cfg(target_arch = "x86_64")]
mod arch;
#[cfg(target_arch = "x86_64")]
mod block;
#[cfg(target_arch = "x86_64")]
mod channel;
#[cfg(target_arch = "x86_64")]
mod entry_stack;
#[cfg(target_arch = "x86_64")]
mod image;
#[cfg(target_arch = "x86_64")]
mod late;
#[cfg(target_arch = "x86_64")]
mod linker;
#[cfg(target_arch = "x86_64")]
mod load;
#[cfg(target_arch = "x86_64")]
mod message;
#[cfg(target_arch = "x86_64")]
mod place;
#[cfg(target_arch = "x86_64")]
mod shape;
#[cfg(target_arch = "x86_64")]
mod spare;
#[cfg(target_arch = "x86_64")]
mod stub;
#[cfg(target_arch = "x86_64")]
mod template;
#[cfg(test)]
mod tests;
#[cfg(target_arch = "x86_64")]
mod tracee;
#[cfg(not(target_arch = "x86_64"))]
mod unsupported;

pub use refusal::{ForkError, TemplateError};
#[cfg(not(target_arch = "x86_64"))]
pub use unsupported::{Spare, Template};
#[cfg(target_arch = "x86_64")]
pub use {
    late::{ForkHereError, InstanceParameters, fork_here},
    spare::Spare,
    template::Template,
};
