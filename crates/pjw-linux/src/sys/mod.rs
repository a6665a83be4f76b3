//! System calls and kernel files about this machine and this process. This layer knows no cgroups and no
//! jobs.

pub mod affinity;
pub mod clock;
pub mod cpu_time;
pub mod errno;
pub mod inherited;
pub mod kcmp;
pub mod nice;
pub(crate) mod online;
pub mod own_usage;
pub mod realtime;
pub(crate) mod version;
