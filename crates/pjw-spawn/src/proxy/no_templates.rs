//! The types and functions of templates for architectures other than x86_64, on which templates do not exist.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use pjw_core::cpuset::CpuSet;
use pjw_core::ids::Pid;

use super::parameters::InstanceParameters;
use super::refusal::{ForkError, ForkHereError, TemplateError};
use crate::child::Child;
use crate::context::SpawnContext;
use crate::instance::Instance;
use crate::setup::Setup;

/// The type of templates on architectures other than x86_64. A template is a process from which other processes of
/// the same program are forked. Templates exist only on x86_64, so this type has no values.
#[derive(Debug)]
pub struct Template(Infallible);

/// The type of spares on architectures other than x86_64. A spare is a process that was made in advance and is
/// stopped before `main`. Spares exist only on x86_64, so this type has no values.
#[derive(Debug)]
pub struct SpareProcess(Infallible);

/// On architectures other than x86_64, always returns `Ok(None)`, because each process of the program is started by
/// exec there. On x86_64, the function stops the calling process, and other processes of its program are then forked
/// from the stopped process.
///
/// # Errors
/// None.
pub fn fork_here() -> Result<Option<InstanceParameters>, ForkHereError> {
    Ok(None)
}

impl Template {
    /// On architectures other than x86_64, always returns an error. On x86_64, the function starts a template: a
    /// process from which other processes of the same program are forked.
    ///
    /// # Errors
    /// [`TemplateError::Unsupported`].
    pub fn load_until_main(_: &SpawnContext, _: &Instance) -> Result<Self, TemplateError> {
        Err(TemplateError::Unsupported)
    }

    /// On architectures other than x86_64, always returns an error. On x86_64, the function starts a template, and
    /// waits until the program has called [`fork_here`]. A template is a process from which other processes of the
    /// same program are forked.
    ///
    /// # Errors
    /// [`TemplateError::Unsupported`].
    pub fn load_until_fork_here(_: &SpawnContext, _: &Instance) -> Result<Self, TemplateError> {
        Err(TemplateError::Unsupported)
    }

    /// On architectures other than x86_64, always returns [`TemplateError::Unsupported`]. On x86_64, the function
    /// starts a template: a process from which other processes of the same program are forked.
    pub(crate) fn from_setup(
        _: Arc<Setup>,
        _: &Instance,
        _: Option<CpuSet>,
        _: &AtomicBool,
    ) -> Result<Self, TemplateError> {
        Err(TemplateError::Unsupported)
    }

    /// On x86_64, starts a new process for a template whose process has ended. On other architectures, the function
    /// can't be called, because no value of this type exists.
    pub(crate) fn reload(&mut self, _: &Instance) -> Result<(), TemplateError> {
        match self.0 {}
    }

    /// On x86_64, returns the process id of the template: the process from which other processes of its program are
    /// forked. On other architectures, the function can't be called, because no value of this type exists.
    #[must_use]
    pub fn pid(&self) -> Pid {
        match self.0 {}
    }

    /// On x86_64, returns whether the file of the program is the same as when the template was loaded. On other
    /// architectures, the function can't be called, because no value of this type exists.
    #[must_use]
    pub fn is_up_to_date(&self) -> bool {
        match self.0 {}
    }

    /// On x86_64, makes a process of the program as a fork of the template. On other architectures, the function
    /// can't be called, because no value of this type exists.
    ///
    /// # Errors
    /// None.
    pub fn fork(&mut self, _: &Instance) -> Result<Child, ForkError> {
        match self.0 {}
    }

    /// On x86_64, makes a spare: a process of the program that is stopped before `main`. On other architectures, the
    /// function can't be called, because no value of this type exists.
    ///
    /// # Errors
    /// None.
    pub fn make_spare(&mut self) -> Result<SpareProcess, ForkError> {
        match self.0 {}
    }

    /// On x86_64, turns a spare (a process that is stopped before `main`) into a running process of the program. On
    /// other architectures, the function can't be called, because no value of this type exists.
    ///
    /// # Errors
    /// None.
    pub fn start_spare(&mut self, _: SpareProcess, _: &Instance) -> Result<Child, ForkError> {
        match self.0 {}
    }

    /// On x86_64, makes several processes of the program as forks of the template. On other architectures, the
    /// function can't be called, because no value of this type exists.
    pub fn fork_all<'a>(
        &mut self,
        _: impl IntoIterator<Item = &'a Instance>,
        _: impl FnMut(&'a Instance, Result<Child, ForkError>),
    ) {
        match self.0 {}
    }
}
