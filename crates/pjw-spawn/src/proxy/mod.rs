//! Proxy: a program is loaded and linked once, and every instance is a fork of it.
//!
//! A [`Template`] is a process of the program that is stopped before `main`. ptrace(2) leads it there and gives it a
//! page of code of ours (`templates/message/stub.rs`); from then on it is not traced, and waits on a channel without
//! using a CPU. [`Template::fork`] writes the arguments and the environment of an instance over the template's and has
//! it make one clone(2) with `CLONE_PARENT`, so that the instance is a child of the launcher.
//!
//! Instances have of their own what a started program has: process id, arguments, environment, mask, streams, exit
//! status, the bytes of `AT_RANDOM`, the names in /proc. They share what the loader made: the address layout, the stack
//! canary and the pointer guard of dynamic programs.

mod parameters;
mod refusal;
/// Templates exist for x86_64 only. Elsewhere the same names say so.
#[cfg_attr(not(target_arch = "x86_64"), path = "no_templates.rs")]
mod templates;

pub use parameters::InstanceParameters;
pub use refusal::{ForkError, ForkHereError, TemplateError};
pub use templates::{SpareProcess, Template, fork_here};
