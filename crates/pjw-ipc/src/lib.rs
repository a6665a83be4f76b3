//! pjw-ipc
