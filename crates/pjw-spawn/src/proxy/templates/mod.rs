//! The template and its instances, for x86_64.

mod channel;
mod environment;
mod late;
mod load;
mod memory;
mod message;
mod processes;
mod shape;
mod spare;
mod template;
#[cfg(test)]
mod tests;

pub use late::fork_here;
pub use spare::SpareProcess;
pub use template::Template;
