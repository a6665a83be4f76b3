//! pjw-linux
