//! Other processors than x86_64 have no templates.

use std::convert::Infallible;
use std::sync::Arc;

use pjw_core::cpuset::CpuSet;
use pjw_core::ids::Pid;

use super::parameters::InstanceParameters;
use super::refusal::{ForkError, ForkHereError, TemplateError};
use crate::child::Child;
use crate::context::Context;
use crate::instance::Instance;
use crate::setup::Setup;

/// The type of templates on architectures other than x86_64. A template is a process from which other processes of its
/// program are forked. The type has no values, because templates exist for x86_64 only.
#[derive(Debug)]
pub struct Template(Infallible);

/// The type of spares on architectures other than x86_64. A spare is a process that is stopped before `main`. It
/// becomes an instance (a running process of the program) later. The type has no values, because spares exist for
/// x86_64 only.
#[derive(Debug)]
pub struct Spare(Infallible);

/// Always returns `Ok(None)`. On this architecture, there are no templates (processes from which instances are forked),
/// so every process of the program was started by exec.
///
/// # Errors
/// None.
pub fn fork_here() -> Result<Option<InstanceParameters>, ForkHereError> {
    Ok(None)
}

impl Template {
    /// Always returns an error, because templates exist for x86_64 only. A template is a process from which other
    /// processes of its program are forked.
    ///
    /// # Errors
    /// [`TemplateError::Unsupported`].
    pub fn load(_: &Context, _: &Instance) -> Result<Self, TemplateError> {
        Err(TemplateError::Unsupported)
    }

    /// Always returns an error, because templates exist for x86_64 only. A template is a process from which other
    /// processes of its program are forked.
    ///
    /// # Errors
    /// [`TemplateError::Unsupported`].
    pub fn load_until_fork_here(_: &Context, _: &Instance) -> Result<Self, TemplateError> {
        Err(TemplateError::Unsupported)
    }

    /// As [`Template::load`].
    pub(crate) fn of_setup(_: Arc<Setup>, _: &Instance, _: Option<CpuSet>) -> Result<Self, TemplateError> {
        Err(TemplateError::Unsupported)
    }

    /// Returns the process id of the template: a process from which other processes of its program are forked.
    #[must_use]
    pub fn pid(&self) -> Pid {
        match self.0 {}
    }

    /// Returns whether the file of the program is unchanged since the template (a process from which other processes of
    /// the program are forked) was loaded.
    #[must_use]
    pub fn is_up_to_date(&self) -> bool {
        match self.0 {}
    }

    /// On x86_64, this function makes a process of the program as a fork of the template. On this architecture, the
    /// function can't be called, because no value of this type exists.
    ///
    /// # Errors
    /// None.
    pub fn fork(&mut self, _: &Instance) -> Result<Child, ForkError> {
        match self.0 {}
    }

    /// On x86_64, this function makes a spare: a process of the program that is stopped before `main`. On this
    /// architecture, the function can't be called, because no value of this type exists.
    ///
    /// # Errors
    /// None.
    pub fn make_spare(&mut self) -> Result<Spare, ForkError> {
        match self.0 {}
    }

    /// On x86_64, this function turns a spare (a process that is stopped before `main`) into a running
    /// process of the program. On this architecture, the function can't be called, because no value of this
    /// type exists.
    ///
    /// # Errors
    /// None.
    pub fn start_spare(&mut self, _: Spare, _: &Instance) -> Result<Child, ForkError> {
        match self.0 {}
    }

    /// On x86_64, this function makes several processes of the program as forks of the template. On this architecture,
    /// the function can't be called, because no value of this type exists.
    pub fn fork_n<'a>(
        &mut self,
        _: impl IntoIterator<Item = &'a Instance>,
        _: impl FnMut(&'a Instance, Result<Child, ForkError>),
    ) {
        match self.0 {}
    }
}
