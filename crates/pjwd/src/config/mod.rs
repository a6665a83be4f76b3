//! The configuration: from a TOML file to the [`Policy`] that decisions use.
//!
//! A file is read whole and judged whole: every problem is reported in one go, each with its place, what is
//! allowed there and the nearest known key ([`Problem`]). What the file leaves out has its default, and
//! `config/pjwd.toml` lists all of it. Nothing here is global: a reload makes a second [`Config`], and the
//! daemon swaps the two between cycles or keeps the first.
//!
//! Reading doesn't need the machine; only housekeeping has to be resolved against one, in [`Config::policy`].
//! Sockets and directories are no keys: they are arguments of the command, so every key may change while the
//! daemon runs.

mod keys;
mod places;
mod problem;
mod read;
mod settings;
mod values;

#[cfg(test)]
mod metrics_tests;
#[cfg(test)]
mod shipped_tests;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::unistd::Uid;
use pjw_core::job::Source;
use pjw_core::policy::Policy;
use pjw_core::topology::Topology;
use pjw_core::wall::Ground;

use self::keys::Key;
use self::problem::Place;
pub use self::problem::Problem;
pub use self::settings::{LogFormat, LogLevel, MetricsSettings, Scan, Settings};

/// A valid configuration and where it came from.
#[derive(Debug, Clone, Default)]
pub struct Config {
    settings: Settings,
    /// `None` if no file was read.
    path: Option<PathBuf>,
    /// Where the housekeeping rule stands, for problems that only a machine shows.
    housekeeping: Option<Place>,
}

impl Config {
    /// Reads a file, or the [default one](Config::default_path) if none is named.
    ///
    /// # Errors
    /// Everything that is wrong with the file, in its order. A file that was named must be there; the default
    /// one need not.
    pub fn load(path: Option<&Path>) -> Result<Self, Vec<Problem>> {
        match (path, Self::default_path()) {
            (Some(path), _) => Self::parse(path, &read::text(path)?),
            (None, Some(path)) if read::exists(&path) => Self::load(Some(&path)),
            (None, _) => Ok(Self::default()),
        }
    }

    /// Where a configuration is looked for unless another place is named: `/etc/pjw/pjwd.toml` for root;
    /// `pjw/pjwd.toml` in `$XDG_CONFIG_HOME` or else `$HOME/.config` for others, who may have neither.
    #[must_use]
    pub fn default_path() -> Option<PathBuf> {
        if Uid::effective().is_root() {
            return Some(PathBuf::from("/etc/pjw/pjwd.toml"));
        }
        let absolute = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
        let base = absolute("XDG_CONFIG_HOME").or_else(|| absolute("HOME").map(|home| home.join(".config")));
        base.map(|base| base.join("pjw/pjwd.toml"))
    }

    /// Reads the text of a file; `path` is only named in problems.
    ///
    /// # Errors
    /// Everything that is wrong with it, in its order.
    pub fn parse(path: &Path, text: &str) -> Result<Self, Vec<Problem>> {
        let (settings, housekeeping) = read::settings(path, text)?;
        Ok(Self { settings, path: Some(path.to_owned()), housekeeping })
    }

    /// What is set.
    #[must_use]
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// The file that was read, if one was.
    #[must_use]
    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// The time between two looks at what ran.
    #[must_use]
    pub fn interval(&self) -> Duration {
        self.settings.interval
    }

    /// The time between two rescans; never below [`Config::interval`].
    #[must_use]
    pub fn rescan_interval(&self) -> Duration {
        self.settings.rescan_interval
    }

    /// The numbers and modes for decisions on this machine. The daemon's own pid is not known here.
    ///
    /// # Errors
    /// If the machine hasn't got what `housekeeping` names, or nothing would be left for jobs.
    pub fn policy(&self, topology: &Topology) -> Result<Policy, Vec<Problem>> {
        let settings = &self.settings;
        let housekeeping = settings.housekeeping.resolve(topology).map_err(|error| {
            let text = crate::report::chain(&error);
            let path = self.path.as_deref().unwrap_or(Path::new("the configuration"));
            let key = Key::Housekeeping.name();
            vec![match &self.housekeeping {
                Some(place) => Problem::at(path, place.clone(), Some(&key), text),
                None => Problem::of_file(path, text),
            }]
        })?;
        // What people do by hand needs no batch system and can't be switched off.
        let by_hand = Source::ALL.into_iter().filter(|source| !source.is_scheduler());
        Ok(Policy {
            mode: settings.mode,
            housekeeping,
            share_smt: settings.share_smt,
            on_exhausted: settings.on_exhausted,
            adopt_strays: settings.adopt_strays,
            user_max_cores: settings.user_max_cores,
            first_person_uid: settings.first_person_uid,
            sources: settings.sources.iter().copied().chain(by_hand).collect(),
            source_cores: settings.source_cores.clone(),
            enforcement: settings.enforcement,
            ground: Ground::default(),
            narrowable: pjw_sources::narrowable(),
            own_pid: None,
            only_user: None,
            hot_permille: settings.hot_permille,
            cold_permille: settings.cold_permille,
            smoothing_permille: settings.smoothing_permille,
            pin: settings.pin,
            oversubscribed: settings.oversubscribed,
            reservation_timeout: settings.reservation_timeout,
        })
    }

    /// What another configuration would change, one sentence per key in the order of the documentation; empty
    /// if nothing.
    #[must_use]
    pub fn changes(&self, new: &Self) -> Vec<String> {
        let sentence = |key: Key| {
            let (old, new) = (key.show(&self.settings), key.show(&new.settings));
            (old != new).then(|| format!("{} is now {new} (was {old})", key.name()))
        };
        Key::all().filter_map(sentence).collect()
    }
}
