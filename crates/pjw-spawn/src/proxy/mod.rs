//! Templates: a program is loaded and linked once, in a template, and each instance is a fork of the template.
//!
//! A [`Template`] is a process of the program that is stopped before `main`. The launcher traces the process by
//! ptrace(2) until it has reached this point, and maps a page with code of this crate (`templates/message/stub.rs`)
//! into the process. Then the template is not traced any more, and waits on a channel without using a CPU.
//! [`Template::fork`] writes the arguments and the environment of an instance over those of the template. The template
//! then calls clone(2) with `CLONE_PARENT`, so that the instance is a child of the launcher.
//!
//! Each instance has its own process id, arguments, environment, mask, streams, exit status, bytes of `AT_RANDOM` and
//! names in /proc, as a program started by exec. All instances share what the loader made: the address layout, and the
//! stack canary and the pointer guard of dynamic programs.

mod parameters;
mod refusal;
/// Templates exist for x86_64 only. On other architectures, `no_templates.rs` has the same names.
#[cfg_attr(not(target_arch = "x86_64"), path = "no_templates.rs")]
mod templates;

pub use parameters::InstanceParameters;
pub use refusal::{ForkError, ForkHereError, TemplateError};
pub use templates::{SpareProcess, Template, fork_here};
