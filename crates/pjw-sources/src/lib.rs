//! pjw-sources
