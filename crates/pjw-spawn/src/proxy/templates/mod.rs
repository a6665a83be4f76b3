//! Templates: processes that have loaded a program and are stopped, and from which further processes of the program
//! (instances) are forked. For x86_64.

mod channel;
mod environment;
mod late;
mod load;
mod memory;
mod message;
mod processes;
mod properties;
mod spare;
mod template;
#[cfg(test)]
mod tests;

pub use late::fork_here;
pub use spare::SpareProcess;
pub use template::Template;
