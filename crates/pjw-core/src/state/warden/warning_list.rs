//! The list of all warnings, which is made again only when one of them changes.

use alloc::sync::Arc;

use crate::basics::prelude::*;
use crate::terms::Warning;

/// The warnings of the last decision.
#[derive(Debug, Clone, Default)]
pub(super) struct WarningList {
    all: Arc<[Arc<Warning>]>,
    /// The warnings in `all` that are not kept elsewhere.
    others: Vec<Arc<Warning>>,
    /// Whether a warning that is kept elsewhere has changed since the list was made.
    is_outdated: bool,
}

impl WarningList {
    /// Lets the next [`WarningList::update`] make the list again.
    pub(super) fn mark_outdated(&mut self) {
        self.is_outdated = true;
    }

    /// Returns the list of all warnings: `strays` about the unassigned processes of users, `others`, and `of_jobs`. If
    /// `others` are the same as in the last call, and [`WarningList::mark_outdated`] was not called since, returns the
    /// same list.
    pub(super) fn update<'a>(
        &mut self,
        strays: impl Iterator<Item = &'a Arc<Warning>>,
        others: Vec<Arc<Warning>>,
        of_jobs: impl Iterator<Item = &'a Arc<Warning>>,
    ) -> Arc<[Arc<Warning>]> {
        if self.is_outdated || self.others != others {
            self.all = strays.cloned().chain(others.iter().cloned()).chain(of_jobs.cloned()).collect();
            self.others = others;
            self.is_outdated = false;
        }
        Arc::clone(&self.all)
    }
}
