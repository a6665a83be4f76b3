//! `pjwctl hook HOOK`: what schedulers call before, in and after a job.
//!
//! A scheduler takes a hook that fails, or takes long, for a broken node: Slurm drains it. So all the work is done on a
//! thread that is waited for only so long; whatever goes wrong is one line on standard error; and the exit code is 0 unless
//! `--strict` asks for more. A starter becomes the job's command in any case. No scheduler's own command is ever run, and
//! doing anything twice changes nothing.
//!
//! [`desk`] asks the daemon, [`variables`] makes what a job is told; each scheduler has a file of its own, which reads
//! what that one tells its hooks.

mod condor;
mod desk;
mod flux;
mod lsf;
mod pbs;
mod sge;
mod slurm;
mod variables;

use std::fmt::Write as _;
use std::io::Read;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{anyhow, bail};
use pjw_core::snapshot::Marks;
use pjw_sources::Host;

use crate::cli::{Hook, Which, name_of};
use crate::output;
use desk::Desk;

/// No file that a hook is told of is longer.
const LONGEST_FILE: u64 = 1 << 20;

/// What a hook gives back: variables, for those that set any.
type Variables = Vec<(String, String)>;

/// What a hook finds where it is called.
struct Scene {
    desk: Desk,
    /// Its environment, as marks that the sources read.
    marks: Marks,
    host: Host,
    /// Its arguments.
    words: Vec<String>,
    /// What whoever set it up says of the count.
    cores: Option<u32>,
}

pub(super) fn run(socket: Option<PathBuf>, wish: Hook) -> anyhow::Result<ExitCode> {
    let (which, strict, patience) = (wish.which, wish.strict, wish.timeout);
    let until = Instant::now() + patience;
    let words = wish.words.clone();
    let done = within(patience, move || serve(which, &Scene::of(socket, &wish, until)));
    let (variables, code) = match done {
        Ok(variables) => (variables, ExitCode::SUCCESS),
        Err(error) => {
            let goes_on =
                if strict && !which.is_starter() { "refused, as --strict says" } else { "the job goes on" };
            let complaint = format!("hook {}: {error}; {goes_on}", name_of(&which));
            output::complain(&complaint);
            // Slurm throws away what a prolog says that ends well. Users' hooks would let users write there.
            if is_root() {
                output::log_warning(Path::new("/dev/log"), &complaint);
            }
            (Vec::new(), if strict { ExitCode::FAILURE } else { ExitCode::SUCCESS })
        }
    };
    if which.is_starter() {
        return Ok(start(&words, variables));
    }
    let lines = variables.iter().fold(String::new(), |mut lines, (name, value)| {
        let export = if which == Which::SlurmTaskProlog { "export " } else { "" };
        let _ = writeln!(lines, "{export}{name}={value}");
        lines
    });
    if !lines.is_empty()
        && let Err(error) = output::print(&lines)
    {
        output::complain(&format!("hook {}: {error}; the job goes on", name_of(&which)));
    }
    Ok(code)
}

/// What the work comes to, if it is done in time. What isn't goes on until this process ends or becomes another.
fn within<T: Send + 'static>(
    patience: Duration,
    work: impl FnOnce() -> anyhow::Result<T> + Send + 'static,
) -> anyhow::Result<T> {
    let (done, told) = mpsc::channel();
    let worker = std::thread::Builder::new().spawn(move || done.send(work()));
    worker.map_err(|error| anyhow!("no thread can be started: {error}; look at the limit of processes"))?;
    told.recv_timeout(patience).unwrap_or_else(|_| {
        bail!(
            "not done within {patience:?}: pjwd hangs or the node is overloaded; see pjwd's log, or restart it with: \
             systemctl restart pjwd"
        )
    })
}

fn serve(which: Which, scene: &Scene) -> anyhow::Result<Variables> {
    match which {
        Which::SlurmProlog => slurm::prolog(scene),
        Which::SlurmEpilog => slurm::epilog(scene),
        Which::SlurmTaskProlog => slurm::task_prolog(scene),
        Which::LsfPreExec => lsf::pre_exec(scene),
        Which::LsfPostExec => lsf::post_exec(scene),
        Which::LsfJobStarter => lsf::starter(scene),
        Which::PbsBegin => pbs::begin(scene),
        Which::TorqueBegin => pbs::torque_begin(scene),
        Which::PbsEnd | Which::TorqueEnd => pbs::end(scene),
        Which::PbsLaunch => pbs::launch(scene),
        Which::SgeProlog => sge::prolog(scene),
        Which::SgeEpilog => sge::epilog(scene),
        Which::SgeStarter => sge::starter(scene),
        Which::CondorPrepare => condor::prepare(scene),
        Which::CondorJobWrapper => condor::wrapper(scene),
        Which::FluxProlog => flux::prolog(scene),
        Which::FluxEpilog => flux::epilog(scene),
    }
}

impl Scene {
    fn of(socket: Option<PathBuf>, wish: &Hook, until: Instant) -> Self {
        let text = |word: std::ffi::OsString| word.to_string_lossy().into_owned();
        let environ = std::env::vars_os().map(|(name, value)| (text(name), text(value))).collect();
        let name = file(Path::new("/proc/sys/kernel/hostname")).unwrap_or_default().trim().to_owned();
        Self {
            desk: Desk::new(socket, until),
            marks: Marks { environ, ..Marks::default() },
            host: Host { name, flux_user: None },
            words: wish.words.iter().cloned().map(text).collect(),
            cores: wish.cores,
        }
    }

    /// The arguments, to read from.
    fn words(&self) -> Vec<&str> {
        self.words.iter().map(String::as_str).collect()
    }

    fn variable(&self, name: &str) -> Option<&str> {
        self.marks.environ.get(name).map(String::as_str).filter(|value| !value.is_empty())
    }

    /// The text of the file that a variable names, if it does.
    fn file_of(&self, variable: &str) -> Option<String> {
        file(Path::new(self.variable(variable)?))
    }
}

/// A small file's text; nothing if it can't be read.
fn file(path: &Path) -> Option<String> {
    let mut text = Vec::new();
    std::fs::File::open(path).ok()?.take(LONGEST_FILE).read_to_end(&mut text).ok()?;
    Some(String::from_utf8_lossy(&text).into_owned())
}

/// Whether this hook may register jobs. Those that a scheduler runs as the job's owner may not: discovery finds the job.
fn is_root() -> bool {
    nix::unistd::geteuid().is_root()
}

/// Becomes the job's command; returns only if there is none that can be executed.
fn start(words: &[std::ffi::OsString], variables: Variables) -> ExitCode {
    let Some((program, arguments)) = words.split_first() else {
        output::complain("no command was given: put the job's command after --");
        return ExitCode::from(2);
    };
    let error = Command::new(program).args(arguments).envs(variables).exec();
    super::run::not_run(program, &error)
}
