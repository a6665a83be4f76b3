//! pjw-sim
