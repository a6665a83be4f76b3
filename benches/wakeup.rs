//! Measures what the owner of a core feels of a borrower.
//!
//! The first two tables show how late the owner runs after a wake-up. Its core is empty, lent to a program with one
//! thread for each PU, or shared with this program. The program that shares the core is in a cgroup at idle priority,
//! has the normal priority, or has the policy SCHED_IDLE in a cgroup of its own. In the first table, the owner works for
//! 20 us after each wake-up. In the second table, it works for 1.2 ms, which is two thirds of the time. The kernel
//! always prefers a thread that uses little CPU time, so only the second table shows what the priority of the other
//! program does.
//!
//! The third table shows the time from the owner's wake-up until no thread of a borrower with 64 threads is on the
//! core, and none may run there. The owner works without a pause meanwhile. pjwd hears the wake-up by BPF, or samples
//! the owner. The limit is the bare write of a cpuset that holds such a program.
#![forbid(unsafe_code)]

use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::ensure;
use pjw_benches::load::owner::{Measurement, measure_owner, run_as_owner_or_borrower, start_borrower};
use pjw_benches::measure::chart::Chart;
use pjw_benches::measure::results::{Figure, median, print_line, publish, quantile, target_directory};
use pjw_benches::peers::cgroups::Cgroup;
use pjw_benches::programs::daemon::{EventSource, PrivateWarden};
use pjw_benches::setup::Setup;
use pjw_benches::setup::parts::is_selected;
use pjw_core::cpuset::CpuSet;

/// The keys of the private daemon: as in the bench `lending`, but quicker, because a return is measured hundreds of
/// times.
const KEYS: &str = "enforcement = \"auto\"\n[lending]\nenabled = true\nbuffer = 0\nlend_after = \"50ms\"\n";
/// The threads of the borrower whose leaving is measured.
const MANY_THREADS: usize = 64;
/// The line in the log of a daemon that can't load the BPF program.
const NO_BPF: &str = "because BPF can't report them";
/// The quantiles of the chart, in percent.
const PERCENTILES: [f64; 8] = [1.0, 10.0, 25.0, 50.0, 75.0, 90.0, 99.0, 99.9];

/// One row of the results: what is measured, and which other program runs on the core.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Row {
    /// There is no borrower.
    Empty,
    /// There is no borrower, once more. The difference to [`Row::Empty`] is the noise of the machine.
    EmptyAgain,
    /// The borrower is a besteffort job.
    Lent,
    /// The other program is in no job. Its cgroup is at idle priority (`cpu.idle`), as that of a borrower. This is what
    /// the kernel alone costs the owner.
    IdleCgroup,
    /// The other program is in no job and has the normal priority.
    Normal,
    /// The other program is in no job. Its threads have the policy SCHED_IDLE, and its cgroup has the normal weight.
    IdlePolicy,
    /// The bare write of a cpuset, until no thread of a program is on a core.
    CpusetWrite,
    /// A borrower leaves, and pjwd hears the owner's wake-up by BPF.
    ReturnWithBpf,
    /// A borrower leaves, and pjwd samples the owner.
    ReturnWithoutBpf,
}

/// How late the owner runs. The first row is the peer of the others.
const LATENESS: [Row; 6] =
    [Row::Empty, Row::EmptyAgain, Row::Lent, Row::IdleCgroup, Row::Normal, Row::IdlePolicy];
/// How long it takes until the borrower has left. The first row is the peer of the others.
const RETURN: [Row; 3] = [Row::CpusetWrite, Row::ReturnWithBpf, Row::ReturnWithoutBpf];

impl Row {
    fn name(self) -> &'static str {
        match self {
            Row::Empty => "empty core",
            Row::EmptyAgain => "empty core, again",
            Row::Lent => "lent core",
            Row::IdleCgroup => "core beside an idle cgroup, without lending",
            Row::Normal => "beside a program of normal priority",
            Row::IdlePolicy => "beside SCHED_IDLE in a cgroup of its own",
            Row::CpusetWrite => "bare write of a cpuset",
            Row::ReturnWithBpf => "borrower has left, with BPF",
            Row::ReturnWithoutBpf => "borrower has left, without BPF",
        }
    }
}

/// The measured times of a row in µs, of each round. `None` after it was skipped.
type Times = Option<Vec<Vec<f64>>>;

fn main() -> anyhow::Result<()> {
    run_as_owner_or_borrower()?;
    let setup = Setup::prepare()?;
    let rounds = setup.effort.pick(1, 9);
    let lateness = measure_rows(&setup, LATENESS, Measurement::Lateness, rounds)?;
    let busy = measure_rows(&setup, LATENESS, Measurement::BusyLateness, rounds)?;
    let returns = measure_rows(&setup, RETURN, Measurement::Return, rounds)?;
    let mut figures = Vec::new();
    report("how late an owner runs that works for 20 us", "", LATENESS, &lateness, &mut figures)?;
    report("how late an owner runs that works for 1.2 ms", "busy, ", LATENESS, &busy, &mut figures)?;
    report("how long it takes until the borrower has left", "", RETURN, &returns, &mut figures)?;
    let rows = LATENESS.iter().zip(&lateness).chain(RETURN.iter().zip(&returns));
    let chart = Chart {
        title: "After the wake-up of a core's owner".into(),
        x_label: "percent of the wake-ups".into(),
        y_label: "us".into(),
        lines: rows
            .filter(|(_, times)| times.is_some())
            .map(|(row, times)| (row.name().into(), points(times)))
            .collect(),
    };
    chart.write(&target_directory()?, "wakeup")?;
    publish("wakeup", &figures)
}

/// Measures the rows in turns. A row that can't be measured on this machine is skipped, with the reason.
fn measure_rows<const N: usize>(
    setup: &Setup,
    rows: [Row; N],
    measurement: Measurement,
    rounds: usize,
) -> anyhow::Result<[Times; N]> {
    let mut all = [const { Some(Vec::new()) }; N];
    for round in 0..rounds {
        for turn in 0..N {
            setup.interrupt.check()?;
            let at = (turn + round) % N;
            let Some(times) = all[at].as_mut().filter(|_| is_selected(rows[at].name())) else { continue };
            match measure(setup, rows[at], measurement) {
                Ok(measured) => times.push(measured),
                Err(why) => {
                    setup.interrupt.check()?;
                    print_line(&format!("skipped: {}: {why:#}", rows[at].name()))?;
                    all[at] = None;
                }
            }
        }
    }
    Ok(all)
}

/// Returns a quantile of each round, as the median over the rounds. Other programs of the machine disturb some rounds,
/// and the p99 of all times together would be that of these rounds.
fn quantile_of_rounds(times: &Times, share: f64) -> f64 {
    let rounds = times.iter().flatten();
    let quantiles: Vec<f64> = rounds.filter_map(|times| quantile(times, share)).collect();
    median(&quantiles).unwrap_or(f64::NAN)
}

/// Prints the table of some rows, and adds their figures, with `prefix` in their names. The first row is the peer.
fn report<const N: usize>(
    title: &str,
    prefix: &str,
    rows: [Row; N],
    all: &[Times; N],
    figures: &mut Vec<Figure>,
) -> anyhow::Result<()> {
    print_line(&format!(
        "\n{title:<48}{:>10}{:>10}{:>10}{:>10}{:>12}",
        "wake-ups", "p50 us", "p99 us", "max us", "p99 ratio"
    ))?;
    for (row, times) in rows.iter().zip(all).filter(|(_, times)| times.is_some()) {
        let count: usize = times.iter().flatten().map(Vec::len).sum();
        let max = times.iter().flatten().flatten().copied().fold(0.0, f64::max);
        let (p50, p99) = (quantile_of_rounds(times, 0.5), quantile_of_rounds(times, 0.99));
        let ratio = p99 / quantile_of_rounds(&all[0], 0.99);
        print_line(&format!("{:<48}{count:>10}{p50:>10.1}{p99:>10.1}{max:>10.1}{ratio:>12.2}", row.name()))?;
        for (quantile_name, share, value) in [("p50", 0.5, p50), ("p99", 0.99, p99)] {
            let name = format!("{prefix}{quantile_name}, {}", row.name());
            let peer_value = quantile_of_rounds(&all[0], share);
            figures.push(Figure::new(&name, value, "us", rows[0].name(), peer_value));
        }
    }
    Ok(())
}

fn points(times: &Times) -> Vec<(f64, f64)> {
    PERCENTILES.iter().map(|&percent| (percent, quantile_of_rounds(times, percent / 100.0))).collect()
}

fn measure(setup: &Setup, row: Row, measurement: Measurement) -> anyhow::Result<Vec<f64>> {
    match row {
        Row::CpusetWrite => cpuset_writes(setup),
        Row::ReturnWithBpf | Row::ReturnWithoutBpf => returns(setup, row),
        _ => lateness(setup, row, measurement),
    }
}

/// Returns the beginning of the command of the owner. In each row the owner is a guaranteed job of one core, so that it
/// always has the same core.
fn owner_command(warden: &PrivateWarden) -> Command {
    warden.pjwctl_command(&["run", "--job", "owner", "--cores", "1", "--class", "guaranteed", "--"])
}

fn borrower_command(setup: &Setup, warden: &PrivateWarden) -> Command {
    let cores = setup.scale.core_count.to_string();
    warden.pjwctl_command(&["run", "--job", "batch", "--cores", &cores, "--class", "besteffort", "--"])
}

fn start_warden(setup: &Setup, source: EventSource) -> anyhow::Result<PrivateWarden> {
    let keys = format!("housekeeping = \"{}\"\n{KEYS}", setup.scale.unusable_pus);
    PrivateWarden::start_with_config(&setup.programs, &keys, source, &setup.interrupt)
}

/// Measures how late the owner of a core wakes up, in µs. `row` says which other program runs on the core.
fn lateness(setup: &Setup, row: Row, measurement: Measurement) -> anyhow::Result<Vec<f64>> {
    let count = setup.effort.pick(200, 1000);
    let warden = start_warden(setup, EventSource::ProcEvents)?;
    let has_cgroup = matches!(row, Row::IdlePolicy | Row::IdleCgroup);
    let group = has_cgroup.then(|| Cgroup::new("cpu", "other")).transpose()?;
    if let Some(group) = group.as_ref().filter(|_| row == Row::IdleCgroup) {
        group.set_idle()?;
    }
    let launcher = match (row, &group) {
        (Row::Lent, _) => Some(borrower_command(setup, &warden)),
        (Row::Normal, _) => Some(complete_taskset(Command::new("taskset"), &setup.scale.usable_pus)),
        (_, Some(group)) => {
            let mut command = group.run_command();
            if row == Row::IdlePolicy {
                command.args(["chrt", "--idle", "0"]);
            }
            command.arg("taskset");
            Some(complete_taskset(command, &setup.scale.usable_pus))
        }
        (_, None) => None,
    };
    let threads = setup.scale.usable_pus.len();
    let other = launcher.map(|launcher| start_borrower(launcher, threads, &setup.interrupt)).transpose()?;
    let borrower = other.as_ref().map(|program| program.pid());
    measure_owner(owner_command(&warden), measurement, count, borrower, &setup.interrupt)
}

/// Completes a command that ends with taskset(1): appends the option that binds a program to `cpus`.
fn complete_taskset(mut command: Command, cpus: &CpuSet) -> Command {
    command.arg("-c").arg(cpus.to_string());
    command
}

/// Measures how long it takes until the borrower has left the core of its owner, in µs. `row` says whether pjwd uses
/// BPF.
///
/// # Errors
/// If pjwd uses BPF in both rows, or in none.
fn returns(setup: &Setup, row: Row) -> anyhow::Result<Vec<f64>> {
    let is_without_bpf = row == Row::ReturnWithoutBpf;
    let source = if is_without_bpf { EventSource::WithoutBpf } else { EventSource::ProcEvents };
    let warden = start_warden(setup, source)?;
    let borrower = start_borrower(borrower_command(setup, &warden), MANY_THREADS, &setup.interrupt)?;
    let (owner, pid) = (owner_command(&warden), Some(borrower.pid()));
    let count = setup.effort.pick(5, 40);
    let times = measure_owner(owner, Measurement::Return, count, pid, &setup.interrupt)?;
    let log = warden.log();
    ensure!(log.contains(NO_BPF) == is_without_bpf, "pjwd can load BPF programs in both cases, or in none");
    Ok(times)
}

/// Measures the time of a bare write to `cpuset.cpus` that moves the threads of a program off a core, in µs.
fn cpuset_writes(setup: &Setup) -> anyhow::Result<Vec<f64>> {
    let group = Cgroup::new("cpuset", "leave")?;
    let all = &setup.scale.usable_pus;
    let others = all.difference(&setup.scale.usable_cores[0]);
    group.set_cpus(all)?;
    // At the policy SCHED_IDLE, the program does not keep this one from a CPU.
    let mut launcher = group.run_command();
    launcher.args(["chrt", "--idle", "0"]);
    let _program = start_borrower(launcher, MANY_THREADS, &setup.interrupt)?;
    let mut times = Vec::new();
    for _ in 0..setup.effort.pick(5, 40) {
        let begin = Instant::now();
        group.set_cpus(&others)?;
        times.push(begin.elapsed().as_secs_f64() * 1e6);
        group.set_cpus(all)?;
        setup.interrupt.sleep_until(Instant::now() + Duration::from_millis(5))?;
    }
    Ok(times)
}
