//! `pjwctl run -- CMD`: a command that never executes one instruction outside its jail.
//!
//! No child is made. pjwctl registers itself as the job's first member; the daemon puts it on the job's cores
//! before it replies; pjwctl looks at its own masks, and then executes the command in its own place. So the
//! process id, the signals, the terminal and the exit status are the command's by construction, and if pjwctl
//! is killed on the way, the job ends with its only member. The socket is closed on exec.
//!
//! It never waits for cores: a command that waits in a queue is a batch system's trade, and one that runs outside while
//! it waits would break the promise.

use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitCode};

use anyhow::{Context, anyhow, bail};
use nix::errno::Errno;
use pjw_core::cpuset::CpuSet;
use pjw_core::explain::named;
use pjw_core::process::Tid;
use pjw_ipc::call::{Assign, JobName};
use pjw_ipc::client::{Client, ClientFault};
use pjw_ipc::wire::{Core, Job, Status};
use pjw_linux::affinity;

use super::{Nothing, Warden, assign, job_id, status};
use crate::cli::{Amount, Run};
use crate::output;

/// What shells answer for a command that isn't there, and for one that can't be executed.
const NOT_FOUND: u8 = 127;
const NOT_EXECUTABLE: u8 = 126;

/// Becomes the command; returns only if that fails.
pub(super) fn run(warden: &Warden, wish: &Run) -> anyhow::Result<ExitCode> {
    let Some((program, arguments)) = wish.command.split_first() else { bail!("no command was given") };
    let pid = std::process::id();
    let job = wish.job.clone().unwrap_or_else(|| default_name(program, pid));
    let mut client = warden.connect()?;
    // Which PUs make a core does not change with the job, and a failure here leaves nothing to undo.
    let status::Reply { status } = client.call("GetStatus", &Nothing {})?;
    let amount = &wish.amount;
    let wish = Assign {
        job: job_id(&job)?,
        cores: amount.cores,
        cpus: amount.cpus.as_ref().map(ToString::to_string),
        pids: Some(vec![pid]),
        near: amount.near.clone(),
        bind_memory: amount.bind_memory,
        isolated: amount.isolated,
        fresh: Some(true),
        ..Assign::default()
    };
    let assign::Reply { job } =
        client.call("Assign", &wish).map_err(|fault| refused(fault, amount, &status))?;
    let cpus = match granted(&job) {
        Ok(cpus) => cpus,
        Err(error) => {
            release(&mut client, &job.id);
            return Err(error);
        }
    };
    let error = Command::new(program)
        .args(arguments)
        .env("PJW_JOB", &job.id)
        .env("PJW_CPUS", cpus.to_string())
        .env("PJW_NCORES", cores_in(&cpus, &status.cores).to_string())
        .exec();
    release(&mut client, &job.id);
    Ok(not_run(program, &error))
}

/// Says why a command was not run, with the code that shells have for it.
pub(super) fn not_run(program: &OsStr, error: &io::Error) -> ExitCode {
    let name = Path::new(program).display();
    let (code, why) = if is_there(program) {
        (NOT_EXECUTABLE, format!("{error}; check its permissions and format"))
    } else {
        (NOT_FOUND, "there is no such command; check its name, and PATH".to_owned())
    };
    output::complain(&format!("can't run {name}: {why}"));
    ExitCode::from(code)
}

/// Whether there is such a command, executable or not. The error of execvp(3) doesn't tell: a directory in PATH that
/// the user may not search makes it EACCES.
fn is_there(program: &OsStr) -> bool {
    if program.as_bytes().contains(&b'/') {
        return Path::new(program).exists();
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    !program.is_empty() && std::env::split_paths(&path).any(|dir| dir.join(program).exists())
}

/// The CPUs that the job was granted, once this process is seen to be on them.
fn granted(job: &Job) -> anyhow::Result<CpuSet> {
    let cpus: CpuSet =
        job.cpus.parse().context("pjwd's answer names no CPUs: are pjwctl and pjwd of the same version?")?;
    match outside(&cpus)? {
        None => Ok(cpus),
        Some(allowed) => bail!(
            "{} was granted {} and this process may run on {}: the command was not started; \
             pjwctl events tells what happened",
            job.id,
            named(&cpus),
            named(&allowed)
        ),
    }
}

/// Why the daemon said no. Where only time would bring cores, it is told that time is not given: its configuration
/// may promise otherwise for jobs whose processes run meanwhile.
fn refused(fault: ClientFault, amount: &Amount, status: &Status) -> anyhow::Error {
    match fault {
        ClientFault::Refused { error, message }
            if error.ends_with(".Refused") && is_short(amount, status) =>
        {
            anyhow!("{message}; run never waits for cores, whatever on_exhausted says: try again later")
        }
        fault => fault.into(),
    }
}

/// Whether the machine has what is asked for, but not free.
fn is_short(amount: &Amount, status: &Status) -> bool {
    let set = |list: &str| list.parse::<CpuSet>().unwrap_or_default();
    let (free, reserved) = (set(&status.pool.free), set(&status.pool.housekeeping));
    let usable = set(&status.node.cpus).difference(&reserved);
    match (&amount.cpus, amount.cores) {
        (Some(cpus), _) => cpus.is_subset(&usable) && !cpus.is_subset(&free),
        (None, Some(cores)) => {
            let whole = status.cores.iter().filter(|core| !set(&core.cpus).intersects(&reserved));
            status.fits.machine < cores && cores as usize <= whole.count()
        }
        (None, None) => false,
    }
}

/// The first mask of this process's threads that is not inside `cpus`.
fn outside(cpus: &CpuSet) -> anyhow::Result<Option<CpuSet>> {
    let masks = own_masks().map_err(|error| anyhow!("can't read this process's CPU mask: {error}"))?;
    Ok(masks.into_iter().find(|mask| mask.is_empty() || !mask.is_subset(cpus)))
}

/// Where every thread may run; this program has one, but the promise is for all. Not `Cpus_allowed_list`: that of whoever
/// may run everywhere has PUs that are off, and no job.
fn own_masks() -> io::Result<Vec<CpuSet>> {
    let mut masks = Vec::new();
    for task in std::fs::read_dir("/proc/self/task")? {
        let name = task?.file_name();
        let tid = name.to_str().and_then(|name| name.parse().ok());
        let tid = tid.ok_or_else(|| io::Error::other(format!("{} is no thread", name.display())))?;
        match affinity::get(Tid(tid)) {
            Ok(mask) => masks.push(mask),
            Err(Errno::ESRCH) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(masks)
}

/// Gives the job back. It would end with this process anyway, so a failure here changes nothing.
fn release(client: &mut Client, job: &str) {
    let _ = client.call::<serde_json::Value>("Release", &JobName { job: job.to_owned() });
}

/// On how many cores these PUs are.
pub(super) fn cores_in(cpus: &CpuSet, cores: &[Core]) -> usize {
    let pus = |core: &Core| core.cpus.parse::<CpuSet>().unwrap_or_default();
    cores.iter().filter(|core| pus(core).intersects(cpus)).count()
}

/// A name that tells what runs and that no other running process has: `make-4711`.
fn default_name(program: &OsStr, pid: u32) -> String {
    let allowed = |c: char| if c.is_ascii_alphanumeric() || "._-+@".contains(c) { c } else { '_' };
    let base = Path::new(program).file_name().unwrap_or(OsStr::new("job")).to_string_lossy();
    let name: String = base.chars().take(64).map(allowed).collect();
    format!("{name}-{pid}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn default_names_are_job_ids_whatever_the_command_is_called() {
        let long = "x".repeat(5_000);
        for program in ["make", "/usr/bin/make", "./a b:c", "..", "/", "", "é\n[", &long] {
            let name = default_name(OsStr::new(program), 4711);
            assert_eq!(job_id(&name).unwrap(), format!("manual:{name}"));
            assert!(name.ends_with("-4711"), "{name}");
        }
        assert_eq!(default_name(OsStr::new("/usr/bin/make"), 7), "make-7");
    }

    #[test]
    fn cores_are_counted_by_their_pus() {
        let core = |cpus: &str| Core { cpus: cpus.into(), ..Core::default() };
        let cores = [core("0,4"), core("1,5"), core("2,6"), core("")];
        assert_eq!(cores_in(&"0-1,4-5".parse().unwrap(), &cores), 2);
        assert_eq!(cores_in(&"5".parse().unwrap(), &cores), 1);
        assert_eq!(cores_in(&CpuSet::new(), &cores), 0);
    }

    #[test]
    fn what_time_would_bring_is_told_from_what_it_would_not() {
        let core = |n: u32| Core { cpus: n.to_string(), ..Core::default() };
        let mut status = Status { cores: (0..4).map(core).collect(), ..Status::default() };
        status.node.cpus = "0-3".into();
        status.pool.housekeeping = "0".into();
        status.pool.free = "3".into();
        status.fits.machine = 1;
        let short = |cores, cpus: Option<&str>| {
            let cpus = cpus.map(|list| list.parse().unwrap());
            is_short(&Amount { cores, cpus, near: None, bind_memory: None, isolated: None }, &status)
        };
        assert!(short(Some(2), None) && short(Some(3), None) && short(None, Some("2-3")));
        assert!(!short(Some(1), None) && !short(None, Some("3")), "it is free: the reason is another");
        assert!(
            !short(Some(4), None) && !short(None, Some("0")) && !short(None, Some("7")),
            "never possible"
        );
    }

    #[test]
    fn a_process_is_inside_its_own_mask_and_outside_any_other() {
        let mine = own_masks().unwrap().into_iter().fold(CpuSet::new(), |all, mask| all.union(&mask));
        assert_eq!(outside(&mine).unwrap(), None);
        let elsewhere = CpuSet::from(pjw_core::cpuset::Pu(60_000));
        assert!(outside(&elsewhere).unwrap().is_some());
        assert!(outside(&CpuSet::new()).unwrap().is_some(), "no grant at all is no jail");
    }
}
