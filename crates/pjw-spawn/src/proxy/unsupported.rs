//! Other processors than x86_64 have no templates.

use std::convert::Infallible;
use std::sync::Arc;

use pjw_core::ids::Pid;

use super::{ForkError, TemplateRefusal};
use crate::child::Child;
use crate::context::Context;
use crate::instance::Instance;
use crate::setup::Setup;

/// A template, which this processor has none of.
#[derive(Debug)]
pub struct Template(Infallible);

/// A spare, which this processor has none of.
#[derive(Debug)]
pub struct Spare(Infallible);

impl Template {
    /// Refuses.
    ///
    /// # Errors
    /// Always [`TemplateRefusal::Unsupported`].
    pub fn load(_: &Context, _: &Instance) -> Result<Self, TemplateRefusal> {
        Err(TemplateRefusal::Unsupported)
    }

    /// As [`Template::load`].
    pub(crate) fn of_setup(_: Arc<Setup>, _: &Instance) -> Result<Self, TemplateRefusal> {
        Err(TemplateRefusal::Unsupported)
    }

    /// The process id of the template.
    #[must_use]
    pub fn pid(&self) -> Pid {
        match self.0 {}
    }

    /// Whether the program's file is still the one that was loaded.
    #[must_use]
    pub fn is_current(&self) -> bool {
        match self.0 {}
    }

    /// Makes an instance.
    ///
    /// # Errors
    /// Is never called.
    pub fn fork(&mut self, _: &Instance) -> Result<Child, ForkError> {
        match self.0 {}
    }

    /// Makes a spare.
    ///
    /// # Errors
    /// Is never called.
    pub fn make_spare(&mut self) -> Result<Spare, ForkError> {
        match self.0 {}
    }

    /// Lets a spare begin the program.
    ///
    /// # Errors
    /// Is never called.
    pub fn begin(&mut self, _: Spare, _: &Instance) -> Result<Child, ForkError> {
        match self.0 {}
    }

    /// Makes instances.
    pub fn fork_n<'a>(
        &mut self,
        _: impl IntoIterator<Item = &'a Instance>,
        _: impl FnMut(&'a Instance, Result<Child, ForkError>),
    ) {
        match self.0 {}
    }
}
