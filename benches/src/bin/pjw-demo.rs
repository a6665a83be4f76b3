//! The program of `make demo`: it measures two jobs that compete for this machine, without pjwd and with it, and
//! shows what pjwd reports about them. It ends in less than two minutes and leaves only `result.json` behind. With
//! `PJW_BENCH_QUICK=1` it measures once.
#![forbid(unsafe_code)]

use std::io::{Write, stderr, stdout};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::Parser;
use pjw_benches::demo::experiment::Experiment;
use pjw_benches::demo::show;
use pjw_benches::measure::results;
use pjw_benches::programs::daemon::Programs;
use pjw_benches::programs::interrupt::StopSignal;
use pjw_benches::setup::effort::Effort;
use pjw_benches::setup::scale::Scale;

/// Two jobs that compete for this machine, without pjwd and with it
#[derive(Debug, Parser)]
struct Args {
    /// The directory of result.json
    #[arg(long, value_name = "DIR", default_value = "target/demo")]
    out: PathBuf,
}

fn main() -> ExitCode {
    match run_demo(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(stderr(), "pjw-demo: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Measures the two jobs, prints the results, and writes them to `result.json` in the directory `args.out`. Then runs
/// the jobs once more to show what `pjwctl` prints about them.
fn run_demo(args: &Args) -> anyhow::Result<()> {
    let interrupt = StopSignal::install()?;
    let programs = Programs::from_current_exe()?;
    let scale = Scale::from_this_machine()?;
    print_line(&show::introduction(&scale));
    let experiment = Experiment { programs: &programs, scale: &scale, interrupt: &interrupt };
    if let Some(warning) = show::busy_warning(experiment.used_by_others()?, &scale) {
        print_line(&warning);
    }
    let times = experiment.measure(Effort::from_environment(), |number, times| {
        print_line(&show::repetition_line(number, times));
    })?;
    let medians = times.medians().context("nothing was measured")?;
    let result = results::write_json(&args.out, "result", &medians)?;
    print_line(&show::table(&times, &medians));
    print_line("The two jobs once more, with pjwd, and what pjwctl shows of them while they run:");
    show::show_live_jobs(&experiment, print_line)?;
    print_line(&format!(
        "\nEvery process that was started has ended. The figures are in {}.",
        result.display()
    ));
    Ok(())
}

fn print_line(line: &str) {
    let mut out = stdout().lock();
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}
