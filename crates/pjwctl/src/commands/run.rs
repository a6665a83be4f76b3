//! `pjwctl run -- CMD`: runs a command that executes no instruction outside its job's cores.
//!
//! No child process is created. pjwctl registers its own process as the first member of the job. The daemon sets the
//! affinity of that process before it replies. pjwctl checks its own masks, and then executes the command in its
//! place. So the process id, the signals, the terminal and the exit status are those of the command. If pjwctl is
//! killed before, the job ends with its only member. The socket is closed on exec.
//!
//! `run` never waits in a queue, which is the task of a batch system. Two kinds of jobs wait all the same. If a
//! besteffort job can borrow no core, the daemon freezes its processes, also pjwctl, until there is a core. An isolated
//! job waits until the kernel has made its partition.
//!
//! The daemon freezes pjwctl before it replies, and a frozen pjwctl can print nothing. So the first request for a
//! besteffort job has `refuse_frozen`. If the daemon refuses it, pjwctl prints that the command waits, and sends the
//! request again without `refuse_frozen`. A daemon of an earlier version does not know this parameter: it gets the
//! request again too, but without the message, because it does not say whether there is a core.

use std::ffi::OsStr;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail};
use nix::errno::Errno;
use pjw_core::cpu_count_variables::{CpuCounts, cpu_count_environment};
use pjw_core::{cpuset::CpuSet, text::cpus_text};
use pjw_ipc::call::{Assign, JobParameter};
use pjw_ipc::client::{Client, ClientError};
use pjw_ipc::wire::{Core, Job, Status, Warning};
use pjw_linux::sys::affinity;
use pjw_spawn::{CheckError, find_program};

use super::connection::{
    DaemonAddress, call_for_field, call_persistently, cpu_count_variables, job_directory, parse_job_id,
    read_status,
};
use super::interpreter::missing_interpreter_text;
use crate::cli::{CoreArgs, CoreCountArg, RunArgs, value_name};
use crate::output;

/// The time between two checks whether the processes of a job have its cores.
pub(super) const TIME_BETWEEN_CHECKS: Duration = Duration::from_millis(20);
/// How long a job that waits for a core goes on waiting while no pjwd runs, or while pjwd is busy.
const MAX_TIME_WITHOUT_DAEMON: Duration = Duration::from_secs(600);
/// The number of times that the cores of a new besteffort job may be exchanged before its command starts.
const MAX_EXCHANGES: u32 = 5;
/// How long a command waits until the kernel has made the partition of an isolated job and moved its processes into it.
pub(super) const MAX_TIME_FOR_PARTITION: Duration = Duration::from_secs(5);
/// The codes of the warnings that a job has no cpuset, or no isolated partition.
const MISSING_CPUSET_CODES: [&str; 2] = ["no-wall", "no-partition"];
/// The exit code (127) with which a shell reports that a command, or the interpreter that it names, does not exist.
pub(super) const NOT_FOUND: u8 = 127;
/// The exit code (126) with which a shell reports that a command exists but can't be executed.
pub(super) const NOT_EXECUTABLE: u8 = 126;

/// Runs `pjwctl run`: makes a job of this process, waits until the job holds cores, and executes the command in
/// `request`. The command replaces this process. The function returns only if the command was not executed. If the
/// job was already made, it is then released.
pub(super) fn run(daemon: &DaemonAddress, request: &RunArgs) -> anyhow::Result<ExitCode> {
    let Some((program, arguments)) = request.command.split_first() else { bail!("no command was given") };
    if program.is_empty() {
        bail!("the name of the command is empty: give a program after --");
    }
    let pid = std::process::id();
    let job = request.job.clone().unwrap_or_else(|| default_job_name(program, pid));
    let core_args = &request.core_args;
    let cores_unit = request.cores_unit;
    let is_isolated = core_args.isolated == Some(true);
    let parameters = Assign {
        job: parse_job_id(&job)?,
        cores: core_args.cores.and_then(CoreCountArg::core_count),
        all_cores: (core_args.cores == Some(CoreCountArg::All)).then_some(true),
        cpus: core_args.cpus.as_ref().map(ToString::to_string),
        pids: Some(vec![pid]),
        near: core_args.near_device.clone(),
        bind_memory: core_args.bind_memory,
        isolated: core_args.isolated,
        within_job: core_args.within_job.map(|rule| value_name(&rule)),
        class: core_args.class.map(|class| value_name(&class)),
        smt: cores_unit.map(|smt| value_name(&smt)),
        fresh: Some(true),
        ..Assign::default()
    };
    let mut notice = WaitNotice::new(program);
    let mut status = None;
    let (mut client, job): (Client, Job) = call_persistently(daemon, |client| {
        // The PUs of each core do not depend on the job, and a failure here leaves nothing to undo.
        if status.is_none() {
            status = Some(read_status(client)?);
        }
        make_job(client, &parameters, &mut notice)
    })?;
    let status = status.unwrap_or_default();
    let cpus = match wait_for_cores(daemon, &mut client, job.clone(), is_isolated, &mut notice) {
        Ok(cpus) => cpus,
        Err(error) => {
            release(&mut client, &job.id);
            return Err(error);
        }
    };
    print_missing_cpuset(&mut client, &job.id, core_args);
    let mut command = Command::new(program);
    // An inherited variable names the directory of the job in which pjwctl was started.
    match job_directory(&status, &job.id) {
        Some(directory) => command.env("PJW_JOB_DIR", directory),
        None => command.env_remove("PJW_JOB_DIR"),
    };
    let counts = cpu_counts(&cpus, &status.cores);
    let error = command
        .args(arguments)
        .env("PJW_JOB", &job.id)
        .env("PJW_CPUS", cpus.to_string())
        .env("PJW_NCORES", counts.cores.to_string())
        .envs(cpu_count_environment(&cpu_count_variables(&status), counts, environment_variable))
        .exec();
    release(&mut client, &job.id);
    Ok(report_exec_failure(program, &error))
}

/// Prints why the program `program` could not be executed. `error` is the error of execve(2). Returns the exit code
/// with which a shell reports this failure: 127 if there is no such program, or no interpreter for it, 126 otherwise.
pub(super) fn report_exec_failure(program: &OsStr, error: &io::Error) -> ExitCode {
    let (code, why) = exec_failure(program, error);
    output::print_error(&format!("can't run {}: {why}", Path::new(program).display()));
    ExitCode::from(code)
}

/// Returns the exit code and an error text for the command `program`, which could not be executed because of `error`.
/// The exit code is the one that a shell gives. Searches the program in `PATH` again, because `error` alone does not
/// show whether the program exists: execvp(3) also fails with `ENOENT` if an interpreter is missing.
fn exec_failure(program: &OsStr, error: &io::Error) -> (u8, String) {
    match find_program(program) {
        Err(CheckError::NotExecutable { why, .. }) => (NOT_EXECUTABLE, why),
        Err(_) => (NOT_FOUND, "there is no such command; check its name, and PATH".to_owned()),
        Ok(file) if error.kind() == io::ErrorKind::NotFound => {
            let why = missing_interpreter_text(&file);
            (
                NOT_FOUND,
                why.unwrap_or_else(|| format!("{error}; it, or the interpreter that it names, is gone")),
            )
        }
        Ok(_) => (NOT_EXECUTABLE, format!("{error}; check its permissions and format")),
    }
}

/// The message that a command waits because its besteffort job can borrow no core. It is printed at most once.
pub(super) struct WaitNotice<'a> {
    program: &'a OsStr,
    is_printed: bool,
}

impl<'a> WaitNotice<'a> {
    /// The message for the command `program`, which is not printed yet.
    pub(super) fn new(program: &'a OsStr) -> Self {
        Self { program, is_printed: false }
    }

    /// Prints that the command waits until its job `job` can borrow a core. `how` is the verb of the sentence: `waits`
    /// or `waits frozen`. Prints nothing if the message was printed before.
    fn print(&mut self, job: &str, how: &str) {
        if !self.is_printed {
            self.is_printed = true;
            let program = Path::new(self.program).display();
            output::print_error(&format!(
                "no core is free to borrow: {program} {how} until one is free (pjwctl show {job})"
            ));
        }
    }
}

/// Makes the new job that `parameters` describe, which contains this process. If the daemon is going to freeze this
/// process at once, because the job can borrow no core, prints `notice` before.
pub(super) fn make_job(
    client: &mut Client,
    parameters: &Assign,
    notice: &mut WaitNotice<'_>,
) -> Result<Job, ClientError> {
    // A frozen process could print nothing until it has a core.
    if parameters.class.as_deref() == Some("besteffort") && !notice.is_printed {
        let unless_frozen = Assign { refuse_frozen: Some(true), ..parameters.clone() };
        match call_for_field(client, "Assign", &unless_frozen, "job") {
            Err(refusal) if refusal.is_would_freeze() => notice.print(&parameters.job, "waits frozen"),
            // pjwd is older than this pjwctl, as between an update and the restart of pjwd.
            Err(refusal) if refusal.is_unknown_parameter("refuse_frozen") => {}
            reply => return reply,
        }
    }
    call_for_field(client, "Assign", parameters, "job")
}

/// Waits until the job `job` of this process holds cores, and returns its PUs (logical CPUs). Only two kinds of jobs
/// have to wait:
///
/// - A job of the class `besteffort` runs on cores that it borrows. While it can borrow no core, the daemon freezes
///   this process. Exception: pjwd freezes no process that it can't move into the cpuset of the job. Such a process
///   prints `notice`.
/// - A job with an isolated partition (`is_isolated`): this process runs elsewhere until the kernel has moved it into
///   the partition (a cpuset whose cores are only for this job). The wait ends after [`MAX_TIME_FOR_PARTITION`].
///
/// If the connection `client` breaks, or pjwd answers that it is busy, replaces `client` by a new connection.
///
/// # Errors
/// If the job is released meanwhile, if this process can also run on other PUs, or if pjwd gives no status for
/// [`MAX_TIME_WITHOUT_DAEMON`].
pub(super) fn wait_for_cores(
    daemon: &DaemonAddress,
    client: &mut Client,
    mut job: Job,
    is_isolated: bool,
    notice: &mut WaitNotice<'_>,
) -> anyhow::Result<CpuSet> {
    let begin = Instant::now();
    // The cores of a borrower may be exchanged between the reply and the check.
    let mut exchanges = 0;
    let mut was_frozen = false;
    loop {
        let is_frozen = job.cpus.is_empty() && job.class == "besteffort" && job.enforcement != "none";
        if !is_frozen {
            let cpus = verify_grant(&job);
            exchanges += 1;
            let can_change = if is_isolated {
                begin.elapsed() < MAX_TIME_FOR_PARTITION
            } else {
                job.class == "besteffort" && exchanges <= MAX_EXCHANGES
            };
            if cpus.is_ok() || !can_change {
                return cpus;
            }
        } else if was_frozen {
            // The first state without cores may be outdated: this process may have been frozen and thawed since. If
            // the second state has no cores either, this process runs and is not frozen.
            notice.print(&job.id, "waits");
        }
        was_frozen = is_frozen;
        std::thread::sleep(TIME_BETWEEN_CHECKS);
        let status = read_status_persistently(daemon, client, &job.id, MAX_TIME_WITHOUT_DAEMON)?;
        let held = status.jobs.into_iter().find(|other| other.id == job.id);
        job = held.ok_or_else(|| anyhow!("{} was released before it had a core", job.id))?;
    }
}

/// Prints pjwd's warnings that the job `job` has no isolated partition, or no cpuset for the memory. Prints nothing
/// if `request` asks for neither, or if the status can't be read. The job has its cores in any case.
pub(super) fn print_missing_cpuset(client: &mut Client, job: &str, request: &CoreArgs) {
    if request.isolated != Some(true) && request.bind_memory != Some(true) {
        return;
    }
    let Ok(status) = read_status(client) else { return };
    let is_of_cpuset =
        |warning: &&Warning| warning.job == job && MISSING_CPUSET_CODES.contains(&warning.code.as_str());
    for Warning { text, remedy, .. } in status.warnings.iter().filter(is_of_cpuset) {
        output::print_error(&format!("{text}; {remedy}"));
    }
}

/// Returns the status of pjwd, for the job with the id `job`, which still waits for cores. If the connection `client`
/// is broken, or pjwd answers that it is busy, replaces `client` by a new connection, and requests the status again. If
/// this fails too, prints the error once, and tries again for `max_time`. The job is not registered again, because a
/// restarted pjwd still knows the job.
///
/// # Errors
/// The last error, if pjwd gave no status in this time. An error that a new connection does not mend, at once.
fn read_status_persistently(
    daemon: &DaemonAddress,
    client: &mut Client,
    job: &str,
    max_time: Duration,
) -> anyhow::Result<Status> {
    match read_status(client) {
        // The connection of a frozen process is idle, so pjwd may have closed it for another user.
        Err(error) if needs_new_connection(&error) => {}
        other => return Ok(other?),
    }
    let begin = Instant::now();
    let mut is_reported = false;
    loop {
        // `DaemonAddress::connect` can print a warning, which is printed once.
        let connected = if is_reported {
            Client::connect(&daemon.path()).map_err(anyhow::Error::from)
        } else {
            daemon.connect()
        };
        let error = match connected {
            Err(error) => error,
            Ok(connected) => {
                *client = connected;
                match read_status(client) {
                    Err(error) if needs_new_connection(&error) => error.into(),
                    other => return Ok(other?),
                }
            }
        };
        if begin.elapsed() > max_time {
            return Err(error);
        }
        if !is_reported {
            is_reported = true;
            output::print_error(&format!(
                "{job} waits for a core, and for pjwd for at most ten minutes: {error:#}"
            ));
        }
        std::thread::sleep(TIME_BETWEEN_CHECKS);
    }
}

/// Returns whether a call that failed with `error` can succeed on a new connection.
pub(super) fn needs_new_connection(error: &ClientError) -> bool {
    error.is_busy() || matches!(error, ClientError::Io(_) | ClientError::Timeout { .. })
}

/// Returns the PUs (logical CPUs) that `job`, the job of this process, was granted.
///
/// # Errors
/// If a thread of this process can also run on other PUs, or if the list of PUs can't be parsed.
fn verify_grant(job: &Job) -> anyhow::Result<CpuSet> {
    let cpus: CpuSet = job
        .cpus
        .parse()
        .context("pjwd's reply has no CPUs: check that pjwctl and pjwd have the same version")?;
    match mask_outside(&cpus)? {
        None => Ok(cpus),
        Some(allowed) => bail!(
            "{} was granted {}, but this process is still allowed on {}: the command was not started; \
             pjwctl events has the reason",
            job.id,
            cpus_text(&cpus),
            cpus_text(&allowed)
        ),
    }
}

/// Returns the affinity mask of a thread of this process that is not confined to `cpus`. `None` if there is no such
/// thread.
fn mask_outside(cpus: &CpuSet) -> anyhow::Result<Option<CpuSet>> {
    let masks = own_masks().map_err(|error| {
        let remedy = match error.raw_os_error().map(Errno::from_raw) {
            Some(Errno::EMFILE | Errno::ENFILE) => "raise the limit of open files (ulimit -n)",
            _ => "check that /proc is mounted and shows this process",
        };
        anyhow!("can't read this process's CPU mask: {error}; {remedy}")
    })?;
    Ok(masks.into_iter().find(|mask| mask.is_empty() || !mask.is_subset(cpus)))
}

/// Returns the affinity masks of all threads of this process: one thread, or two if the limit of the stack is small.
/// Does not read `Cpus_allowed_list` in /proc: for a thread without a restriction, that list also contains offline
/// PUs (logical CPUs), which no job is granted.
fn own_masks() -> io::Result<Vec<CpuSet>> {
    let mut masks = Vec::new();
    for tid in affinity::own_threads()? {
        match affinity::get_mask(tid) {
            Ok(mask) => masks.push(mask),
            Err(Errno::ESRCH) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(masks)
}

/// Releases the job with the id `job`, so that its cores become free. Errors are ignored, because the daemon also
/// releases the job when this process ends.
pub(super) fn release(client: &mut Client, job: &str) {
    let _ = client.call::<serde_json::Value>("Release", &JobParameter { job: job.to_owned() });
}

/// Returns how many of the cores in `cores` have at least one PU (logical CPU) in `cpus`.
pub(super) fn count_cores(cpus: &CpuSet, cores: &[Core]) -> usize {
    let pus = |core: &Core| core.cpus.parse::<CpuSet>().unwrap_or_default();
    cores.iter().filter(|core| pus(core).intersects(cpus)).count()
}

/// Returns the number of PUs (logical CPUs) in `cpus`, and the number of cores that contain these PUs. `cores` must
/// contain all cores of the machine.
pub(super) fn cpu_counts(cpus: &CpuSet, cores: &[Core]) -> CpuCounts {
    let number = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
    CpuCounts { cores: number(count_cores(cpus, cores)), pus: number(cpus.len()) }
}

/// Returns the value of the environment variable `name` of this process. Bytes that are not valid UTF-8 are replaced.
/// `None` if the variable is not set.
pub(super) fn environment_variable(name: &str) -> Option<String> {
    std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
}

/// Returns the name of a job for which the user chose no name: the file name of the program `program` and the process
/// id `pid`, such as `make-4711`.
pub(super) fn default_job_name(program: &OsStr, pid: u32) -> String {
    let allowed = |c: char| if c.is_ascii_alphanumeric() || "._-+@".contains(c) { c } else { '_' };
    let base = Path::new(program).file_name().unwrap_or(OsStr::new("job")).to_string_lossy();
    let name: String = base.chars().take(64).map(allowed).collect();
    format!("{name}-{pid}")
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn default_names_are_job_ids_whatever_the_command_is_called() {
        let long = "x".repeat(5_000);
        for program in ["make", "/usr/bin/make", "./a b:c", "..", "/", "", "é\n[", &long] {
            let name = default_job_name(OsStr::new(program), 4711);
            assert_eq!(parse_job_id(&name).unwrap(), format!("manual:{name}"));
            assert!(name.ends_with("-4711"), "{name}");
        }
        assert_eq!(default_job_name(OsStr::new("/usr/bin/make"), 7), "make-7");
    }

    #[test]
    fn a_pjwd_that_has_too_many_connections_is_given_up_after_the_time() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("pjwd.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        std::thread::spawn(move || {
            let busy = r#"{"error":"org.pjw.Warden.Busy","parameters":{"message":"too many connections"}}"#;
            for stream in listener.incoming() {
                // The client may have given up.
                let _ = write!(stream.unwrap(), "{busy}\0");
            }
        });
        let daemon = DaemonAddress { socket: Some(socket) };
        let mut client = daemon.connect().unwrap();
        let status = read_status_persistently(&daemon, &mut client, "manual:a", Duration::from_millis(50));
        let error = status.map(drop).unwrap_err();
        assert!(error.downcast_ref::<ClientError>().is_some_and(ClientError::is_busy), "{error:#}");
    }

    #[test]
    fn cores_are_counted_by_their_pus() {
        let core = |cpus: &str| Core { cpus: cpus.into(), ..Core::default() };
        let cores = [core("0,4"), core("1,5"), core("2,6"), core("")];
        assert_eq!(count_cores(&"0-1,4-5".parse().unwrap(), &cores), 2);
        assert_eq!(count_cores(&"5".parse().unwrap(), &cores), 1);
        assert_eq!(count_cores(&CpuSet::new(), &cores), 0);
    }

    #[test]
    fn a_process_is_inside_its_own_mask_and_outside_any_other() {
        let mine = own_masks().unwrap().into_iter().fold(CpuSet::new(), |all, mask| all.union(&mask));
        assert_eq!(mask_outside(&mine).unwrap(), None);
        let elsewhere = CpuSet::from(pjw_core::cpuset::Pu(60_000));
        assert!(mask_outside(&elsewhere).unwrap().is_some());
        assert!(mask_outside(&CpuSet::new()).unwrap().is_some(), "no grant at all is no jail");
    }
}
