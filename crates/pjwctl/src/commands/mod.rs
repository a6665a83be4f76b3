//! One file for each verb: it asks the daemon and hands the answer to a renderer, or prints it as JSON.

mod assign;
mod check_config;
mod completions;
mod daemon_program;
mod defrag;
mod doctor;
mod events;
mod explain;
mod hook;
mod jobs;
pub mod man;
mod plan;
mod release;
mod reload;
mod run;
mod show;
mod simulate;
mod status;
mod topology;

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use nix::unistd::{Uid, User, geteuid};
use pjw_core::job::JobId;
use pjw_ipc::client::{Client, runtime_dir, socket_path};
use serde::Serialize;

use crate::cli::{Cli, Verb};
use crate::output;
use crate::render::UserNames;

/// Does what the command line says. `run` returns only if it fails.
///
/// # Errors
/// If the daemon isn't there or says no, or the output can't be written; the error's text is for people.
pub fn run(cli: Cli) -> anyhow::Result<ExitCode> {
    let warden = Warden { socket: cli.socket };
    match cli.verb {
        Verb::Status(json) => status::run(&warden, json),
        Verb::Jobs(json) => jobs::run(&warden, json),
        Verb::Show { job, json } => show::run(&warden, &job, json),
        Verb::Assign(wish) => assign::run(&warden, &wish),
        Verb::Release { job, .. } => release::run(&warden, job.as_deref()),
        Verb::Run(wish) => run::run(&warden, &wish),
        Verb::Explain { subject, json } => explain::run(&warden, &subject, json),
        Verb::Plan { defrag: false, json } => plan::run(&warden, json),
        Verb::Plan { defrag: true, json } => defrag::plan(&warden, json),
        Verb::Defrag(json) => defrag::run(&warden, json),
        Verb::Events { follow, json } => events::run(&warden, follow, json),
        Verb::Topology(what) => topology::run(&warden, &what),
        Verb::Simulate(what) => simulate::run(&what),
        Verb::Hook(wish) => hook::run(warden.socket, wish),
        Verb::Doctor(wish) => doctor::run(&warden, &wish),
        Verb::Reload => reload::run(&warden),
        Verb::CheckConfig { file } => check_config::run(&file),
        Verb::Completions { shell } => completions::run(shell),
        Verb::Man { dir } => man::run(dir.as_deref()),
    }
}

/// Where the daemon is to be found.
#[derive(Debug)]
struct Warden {
    socket: Option<PathBuf>,
}

impl Warden {
    /// Where somebody said that it is.
    fn told(&self) -> Option<&Path> {
        self.socket.as_deref().filter(|path| !path.as_os_str().is_empty())
    }

    /// Where it is looked for.
    fn path(&self) -> PathBuf {
        let xdg = std::env::var_os("XDG_RUNTIME_DIR");
        socket_path(self.told(), geteuid().as_raw(), xdg.as_deref().map(Path::new))
    }

    /// A connection; the error says where it was looked for and how to start the daemon.
    fn connect(&self) -> anyhow::Result<Client> {
        let told = self.told();
        let (uid, xdg) = (geteuid().as_raw(), std::env::var_os("XDG_RUNTIME_DIR"));
        let xdg = xdg.as_deref().map(Path::new);
        let path = self.path();
        let client = Client::connect(&path)?;
        if told.is_none()
            && let Some(note) = another_answers(&path, &runtime_dir(uid, xdg), uid)
        {
            output::complain(&note);
        }
        Ok(client)
    }
}

/// What is to be said where root's daemon answers in the place of the user's own, which was running once: jobs of one are
/// unknown to the other.
fn another_answers(path: &Path, own: &Path, uid: u32) -> Option<String> {
    let was_there = own.symlink_metadata().is_ok_and(|dir| dir.is_dir() && dir.uid() == uid);
    (was_there && !path.starts_with(own)).then(|| {
        format!(
            "your own pjwd, which listens in {}, is not running: {} answers instead; start yours again with: pjwd",
            own.display(),
            path.display()
        )
    })
}

/// The parameters of a method that has none.
#[derive(Serialize)]
struct Nothing {}

/// A job's full id, checked here so that a hopeless one isn't even sent.
fn job_id(text: &str) -> anyhow::Result<String> {
    Ok(text.parse::<JobId>()?.to_string())
}

/// The names of these users; one without a name is left out.
fn user_names(uids: impl IntoIterator<Item = u32>) -> UserNames {
    let uids: BTreeSet<u32> = uids.into_iter().collect();
    let name = |uid| Some((uid, User::from_uid(Uid::from_raw(uid)).ok()??.name));
    uids.into_iter().filter_map(name).collect::<BTreeMap<_, _>>()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_answer_of_another_daemon_is_told_apart_from_ones_own() {
        let (dir, uid) = (tempfile::tempdir().unwrap(), geteuid().as_raw());
        let (own, system) = (dir.path().join("pjwd"), dir.path().join("run/pjwd.sock"));
        assert_eq!(another_answers(&system, &own, uid), None, "there never was an own one");
        std::fs::create_dir(&own).unwrap();
        let told = another_answers(&system, &own, uid).unwrap();
        assert!(told.contains(own.to_str().unwrap()) && told.contains(system.to_str().unwrap()), "{told}");
        assert_eq!(
            another_answers(&own.join("pjwd.sock"), &own, uid),
            None,
            "it is the own one that answers"
        );
        assert_eq!(
            another_answers(&system, &own, uid + 1),
            None,
            "a directory of another's is no trace of one's own"
        );
    }
}
