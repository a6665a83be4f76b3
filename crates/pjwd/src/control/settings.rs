//! The part of the configuration that the control server needs.

use super::admission::AdmissionRules;
use crate::config::Settings;
use crate::memory::MemorySettings;

/// The configuration settings of the control server: the part of pjwd that answers clients. A reload of the
/// configuration sends new settings to the control server.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ControlSettings {
    /// Which users are administrators, and what other users may do.
    pub rules: AdmissionRules,
    /// How often pjwd measures the memory use of each job without a request of a client, and how much CPU time these
    /// measurements may use.
    pub memory: MemorySettings,
}

impl From<&Settings> for ControlSettings {
    fn from(settings: &Settings) -> Self {
        Self { rules: AdmissionRules::from(settings), memory: settings.memory }
    }
}
