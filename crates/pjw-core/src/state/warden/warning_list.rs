//! The list of all warnings. The list is made again only when a warning has changed.

use alloc::sync::Arc;

use crate::basics::prelude::*;
use crate::terms::Warning;

/// The list of all warnings of the last decision of the daemon.
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

    /// Returns the list that the last call of [`WarningList::update`] returned. Empty before the first call.
    pub(super) fn last(&self) -> Arc<[Arc<Warning>]> {
        Arc::clone(&self.all)
    }

    /// Returns the list of all warnings. Makes a new list only if `others` differs from the last call, or if
    /// [`WarningList::mark_outdated`] was called since. Otherwise, returns the same list as in the last call.
    ///
    /// - `strays` has the warnings about the processes of users that belong to no job.
    /// - `of_jobs` has the warnings about jobs.
    /// - `others` has all other warnings.
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
