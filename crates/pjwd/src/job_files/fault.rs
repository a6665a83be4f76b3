//! The error of an operation on a file of a job, and the sentence that says what it means for the programs in the job.

use std::io;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use pjw_core::job::JobId;
use thiserror::Error;

/// The error of an operation on a file or directory of a job, below `STATE_DIR/jobs`: the failed operation, the path,
/// and the error of the kernel.
#[derive(Debug, Error)]
#[error("can't {operation} {path}: {source}", path = path.display())]
pub(super) struct FileFault {
    operation: &'static str,
    path: PathBuf,
    source: io::Error,
    part: UnpublishedPart,
}

/// The part of the files of a job that programs do not find, or in which they find former values, after a
/// [`FileFault`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum UnpublishedPart {
    /// The whole core map: the files `cpus`, `coremap.json` and `coremap`.
    CoreMap,
    /// The files `cpus` and `coremap.json`, but not the page `coremap`.
    TextFiles,
    /// The page `coremap`, but not the files `cpus` and `coremap.json`.
    Page,
    /// The file `want`, but not the core map.
    WantFile,
    /// The page `coremap` has former cores, but not the files `cpus` and `coremap.json`.
    FormerPage,
    /// The whole core map has former cores.
    FormerCoreMap,
}

impl FileFault {
    /// Returns whether the file system has no space for the file.
    pub(super) fn is_lack_of_space(&self) -> bool {
        matches!(self.source.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
    }

    /// Returns whether this process or the system has no free file descriptor.
    pub(super) fn is_lack_of_descriptors(&self) -> bool {
        let errno = self.source.raw_os_error().map(Errno::from_raw);
        matches!(errno, Some(Errno::EMFILE | Errno::ENFILE))
    }

    /// Replaces the part of the files that is not published because of this error.
    pub(super) fn with_part(self, part: UnpublishedPart) -> Self {
        Self { part, ..self }
    }

    /// Returns a sentence for the user: what the programs in the job `id` miss because of this error, which file could
    /// not be written, and what they still find.
    pub(super) fn describe_effect(&self, id: &JobId) -> String {
        match self.part {
            UnpublishedPart::CoreMap => format!("programs in {id} get no core map: {self}"),
            UnpublishedPart::TextFiles => format!(
                "the files cpus and coremap.json of {id} may have former cores: {self}; its page coremap has the \
                 present ones"
            ),
            UnpublishedPart::Page => format!(
                "programs in {id} get no page coremap: {self}; its files cpus and coremap.json have the present cores"
            ),
            UnpublishedPart::WantFile => format!(
                "the file want of {id} is missing or has a former number: {self}; its core map has the present cores"
            ),
            UnpublishedPart::FormerPage => format!(
                "the page coremap of {id} has former cores: {self}; its files cpus and coremap.json have the present \
                 ones"
            ),
            UnpublishedPart::FormerCoreMap => format!("the core map of {id} has former cores: {self}"),
        }
    }
}

/// Returns a function that converts an [`io::Error`] to a [`FileFault`] by which the whole core map is not published.
/// `operation` is the failed operation as a verb, such as `write`. `path` is the path of the file.
pub(super) fn file_fault<'a>(
    operation: &'static str,
    path: &'a Path,
) -> impl Fn(io::Error) -> FileFault + 'a {
    move |source| FileFault { operation, path: path.to_owned(), source, part: UnpublishedPart::CoreMap }
}
