//! `pjwctl spawn -n N -- CMD`: starts many instances of a command, each on its own part of the job's cores from its
//! first instruction.
//!
//! pjwctl registers its own process as the first member of the job, as `run` does. The spawner threads of this process
//! carry the masks of the parts, and the instances inherit cgroup and mask: the daemon has no work for an instance. If
//! pjwctl is killed, the kernel kills the instances (docs/adr/0020-spawn-launcher.md). The job ends with its last
//! process.

mod advice;
mod commands;
mod grant;
mod group;
mod instance;
mod labels;
mod library_search;
mod mode;
mod refusal;
mod replicas;
mod report;
mod signals;
mod sizes;
mod streams;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::bail;
use nix::time::{ClockId, clock_gettime};
use pjw_core::cpuset::CpuSet;
use pjw_core::parts::{DivisionRule, divide_for_tasks, divide_into_parts, numa_node_containing};
use pjw_core::topology::Topology;
use pjw_core::within_job::sort_parts;
use pjw_linux::topology::{self, TopologySource};
use pjw_spawn::proxy::Template;
use pjw_spawn::{
    Arguments, CheckError, Instance, Placement, SpawnContext, Stdio, can_prefer_numa_node,
    check_process_limits, raise_descriptor_limit, reset_launcher_signals,
};

use super::connection::DaemonAddress;
use crate::cli::{CoreCountArg, ProxyArg, ShareArg, SpawnArgs};
use crate::output;
use commands::RankedCommand;
use grant::{CpuOrigin, Grant};
use group::{InstanceGroup, Program, StartFailure};
use labels::LabelledPipes;
use mode::StartMode;
use refusal::{LoadOption, load_error};
use sizes::SizeVariables;

/// The descriptors of a labelled instance: both ends of two pipes.
const DESCRIPTORS_OF_LABELS: usize = 4;

/// The descriptors that the start of a program needs: both ends of a socket pair, two sets of watched descriptors, and
/// one descriptor for signals. The socket pair of a program is still open when the next program is started.
const DESCRIPTORS_OF_PROGRAMS: usize = 5;

/// A command whose program was found and whose arguments were parsed.
struct PreparedCommand {
    /// The settings for the start of the program.
    context: SpawnContext,
    command: RankedCommand,
    /// The parsed arguments of `command`, which all instances of the command share.
    arguments: Arc<Arguments>,
}

/// Runs `pjwctl spawn`: starts several instances (processes) of a command, and waits until they have ended. With
/// `--async`, only waits until they have begun. `request` contains the command line options.
pub(super) fn run(daemon: &DaemonAddress, request: &SpawnArgs) -> anyhow::Result<ExitCode> {
    let (group, grant) = match start_group(daemon, request) {
        Ok(started) => started,
        Err(error) if error.is::<StartFailure>() => {
            output::print_error(&error.to_string());
            return Ok(ExitCode::FAILURE);
        }
        Err(error) => {
            output::print_error(&format!("nothing was started: {error:#}"));
            return Ok(ExitCode::from(refusal::exit_code(&error)));
        }
    };
    match finish_group(group, &grant, request) {
        Err(error) if !output::is_closed_pipe(&error) => {
            output::print_error(&error.to_string());
            Ok(ExitCode::FAILURE)
        }
        finished => finished,
    }
}

/// Begins to start the instances of `pjwctl spawn`, and returns them and their grant of cores. First checks the command
/// line `request`, the programs and the limits on processes and descriptors, and waits until the job holds cores. After
/// an error, releases the job.
///
/// # Errors
/// [`StartFailure`] if instances had begun, which were killed then. Any other error if no instance was started.
fn start_group(daemon: &DaemonAddress, request: &SpawnArgs) -> anyhow::Result<(InstanceGroup, Grant)> {
    reset_launcher_signals();
    // This check comes before memory is allocated for each instance. The number of spawner threads is not known before
    // the grant.
    check_process_limits(usize::try_from(request.instances.unwrap_or(0))?, 0)?;
    let commands = commands::read_commands(request)?;
    let size = commands.iter().map(|command| command.ranks.len()).sum::<usize>();
    if size == 0 {
        return Err(CheckError::NoInstances.into());
    }
    let size = u32::try_from(size)?;
    let programs: Vec<PreparedCommand> =
        commands.into_iter().map(|command| prepare(command, request)).collect::<anyhow::Result<_>>()?;
    if request.proxy == ProxyArg::Always && programs.iter().any(|program| program.command.ranks.len() < 2) {
        bail!("--proxy always needs at least 2 instances of a program: use --proxy auto");
    }
    let mut labels = LabelledPipes::default();
    let descriptors = if request.prefix_output_with_rank { DESCRIPTORS_OF_LABELS + 1 } else { 1 };
    if request.instances.is_none() {
        check_process_limits(size as usize, 0)?;
    }
    raise_descriptor_limit(size as usize * descriptors + programs.len() * DESCRIPTORS_OF_PROGRAMS)?;
    let topology = topology::load_topology(TopologySource::Live)?;
    let name = programs.first().map(|program| program.command.program.clone()).unwrap_or_default();
    let grant = Grant::obtain(daemon, request, size, &name)?;
    let started = placements(&topology, &grant.cpus, grant.origin, request, size).and_then(|placements| {
        let used = &placements[..placements.len().min(size as usize)];
        let has_templates = request.proxy != ProxyArg::Never;
        let sizes = SizeVariables::new(&topology, used, &grant.cpu_count_variables, has_templates);
        let programs = divide_by_part_size(programs, &sizes, placements.len());
        raise_descriptor_limit(size as usize * descriptors + programs.len() * DESCRIPTORS_OF_PROGRAMS)?;
        let places: Vec<_> = programs.iter().map(|program| program.command.place(request)).collect();
        let labelled = request.prefix_output_with_rank.then_some(&mut labels);
        let programs = add_instances(programs, size, &placements, &sizes, &grant, labelled)?;
        let programs = with_templates(programs, request.proxy);
        check_programs(&programs, &places)?;
        match request.proxy {
            ProxyArg::Always => check_templates(&programs, &sizes)?,
            ProxyArg::Never => {
                advice::before_start(&programs).iter().for_each(|advice| output::print_error(advice));
            }
            ProxyArg::Auto | ProxyArg::Late => {}
        }
        let programs =
            if request.replicate { replicas::with_replicas(&topology, programs)? } else { programs };
        InstanceGroup::start(programs, labels, sizes.unequal_variable().map(str::to_owned))
    });
    match started {
        Ok(group) => Ok((group, grant)),
        Err(error) => {
            grant.release();
            Err(error)
        }
    }
}

/// Waits for the instances in `group`, and prints the result. Returns the exit code of `pjwctl spawn`. If the wait
/// fails, kills the instances.
fn finish_group(mut group: InstanceGroup, grant: &Grant, request: &SpawnArgs) -> anyhow::Result<ExitCode> {
    let mode = match wait_for_instances(&mut group, request) {
        Ok(mode) => mode,
        Err(error) => {
            group.abort();
            return Err(StartFailure(error).into());
        }
    };
    report::print_result(&group, &mode, grant.job.as_deref(), request.json)?;
    Ok(group.exit_code())
}

/// Waits until all instances have begun, and prints how they were started if this is not what the options say. Then
/// waits until they have ended, except with `--async`. Prints the rest of their output. Returns how the instances
/// were started.
fn wait_for_instances(group: &mut InstanceGroup, request: &SpawnArgs) -> anyhow::Result<StartMode> {
    group.wait_until_begun()?;
    let mode = StartMode::from_request(request, group.template_use());
    let mut messages: Vec<String> = mode.start_mode_text(request.proxy).into_iter().collect();
    if request.proxy != ProxyArg::Never {
        messages.extend(advice::after_exec(group.contexts_without_forks()));
    }
    messages.iter().for_each(|message| group.print_message(message));
    if !request.in_background {
        group.wait_until_ended()?;
    }
    group.print_remaining_output();
    Ok(mode)
}

/// Makes the contexts of `programs` fork their instances from templates (processes that have loaded the program), as
/// the option `--proxy` says. Changes nothing for `--proxy never`.
fn with_templates(programs: Vec<Program>, proxy: ProxyArg) -> Vec<Program> {
    let template: fn(SpawnContext) -> SpawnContext = match proxy {
        ProxyArg::Never => return programs,
        ProxyArg::Auto | ProxyArg::Always => SpawnContext::fork_from_templates,
        ProxyArg::Late => SpawnContext::use_fork_here_templates,
    };
    let program = |Program { context, instances }| Program { context: template(context), instances };
    programs.into_iter().map(program).collect()
}

/// Checks each program, and the limits on processes for all programs together. `places` contains the line of each
/// program in the file of commands, if there is one. The error names the line if its arguments are too large, or too
/// large together with the environment.
fn check_programs(programs: &[Program], places: &[Option<String>]) -> anyhow::Result<()> {
    for (program, place) in programs.iter().zip(places) {
        let checked = program.context.check_instances(&program.instances);
        checked.map_err(|error| match (&error, place) {
            (CheckError::TooLarge { is_environment: false, .. }, Some(place)) => {
                anyhow::Error::new(error).context(place.clone())
            }
            _ => error.into(),
        })?;
    }
    let instances = programs.iter().map(|program| program.instances.len()).sum();
    let starters = programs.iter().map(|program| program.context.starter_count(&program.instances)).sum();
    Ok(check_process_limits(instances, starters)?)
}

/// Checks for `--proxy always` that instances of each program can be forked from a template (a process that has
/// loaded the program). To check this, loads one template of each program, and ends it. Skips a program with a single
/// instance, which is executed instead of forked.
///
/// # Errors
/// The error of [`load_error`] if a template can't be loaded. Another error if each program has a single instance,
/// because the parts of the cores have different sizes, and instances on parts of different sizes can't have the same
/// template.
fn check_templates(programs: &[Program], sizes: &SizeVariables) -> anyhow::Result<()> {
    let mut has_templates = false;
    for program in programs {
        let [first, _, ..] = &program.instances[..] else { continue };
        if let Err(refusal) = Template::load_until_main(&program.context, first) {
            return Err(load_error(refusal, program.context.program_path(), LoadOption::Proxy));
        }
        has_templates = true;
    }
    match sizes.unequal_variable().filter(|_| !has_templates) {
        Some(name) => {
            bail!("{}; use --proxy auto or never, or parts of the same size", mode::unequal_values_text(name))
        }
        None => Ok(()),
    }
}

/// Prepares a command. The error names the line of a command of a file.
fn prepare(command: RankedCommand, request: &SpawnArgs) -> anyhow::Result<PreparedCommand> {
    let place = command.place(request);
    let prepared = prepare_program(command, request);
    match place {
        Some(place) => prepared.map_err(|error| error.context(place)),
        None => prepared,
    }
}

/// Finds the program of `command`, and parses its arguments. Returns both with a new context (the settings for the
/// start of the program). The context says whether the instances end with pjwctl, and whether they share memory, as
/// the options in `request` say. Fails if there is no such program, or if the arguments can't be parsed.
fn prepare_program(command: RankedCommand, request: &SpawnArgs) -> anyhow::Result<PreparedCommand> {
    let context = SpawnContext::new(&command.program)?.add_rank_variables();
    let context = if request.in_background { context } else { context.kill_when_launcher_ends() };
    let context = match request.share {
        None => context,
        Some(ShareArg::Memory) => context.share_memory()?,
    };
    // With this variable, the instances of one command find each other.
    let context = context.set_variable("PJW_GROUP", group_name());
    let arguments = Arguments::for_command(&command.program, &command.arguments).map_err(CheckError::from)?;
    Ok(PreparedCommand { context, command, arguments: Arc::new(arguments) })
}

/// Returns a name for the instances of this command. No other command of this machine has had the name since the
/// machine was started.
fn group_name() -> String {
    let since_boot = clock_gettime(ClockId::CLOCK_MONOTONIC).map_or(Duration::ZERO, Duration::from);
    format!("{}.{}", std::process::id(), since_boot.as_nanos())
}

/// Divides the CPUs `granted` into parts as the option `--map` says, and returns the placement of each part: its CPUs
/// and the NUMA node for its memory. `size` is the number of instances. If there are more instances than parts, the
/// instances use the parts in turns.
///
/// `origin` says who chose the CPUs. If pjwd chose them, `--cores N` already had its effect. Otherwise (with
/// `--local`, or in a job of a batch system), only the first N cores in `granted` are divided.
///
/// # Errors
/// If a part of the map is not inside `granted`. If only the first N cores are divided, also if N is 0 or more than
/// the number of cores in `granted`.
fn placements(
    topology: &Topology,
    granted: &CpuSet,
    origin: CpuOrigin,
    request: &SpawnArgs,
    size: u32,
) -> anyhow::Result<Vec<Arc<Placement>>> {
    let cores = request.cores.and_then(CoreCountArg::core_count);
    let cpus = match cores.filter(|_| origin != CpuOrigin::Warden) {
        None => granted.clone(),
        Some(cores) => first_cores(topology, granted, cores)?,
    };
    let map = request.map.clone().unwrap_or_default();
    // A rule for the processes of the job chooses the nodes, also those of tasks.
    let divide = match request.share {
        Some(ShareArg::Memory) if request.within_job.is_none() => divide_for_tasks,
        _ => divide_into_parts,
    };
    let parts = divide(topology, &cpus, &map, size);
    let parts = sort_parts(topology, parts, request.within_job.map(Into::into).unwrap_or_default());
    if let Some(part) = parts.iter().find(|part| !part.is_subset(granted)) {
        let more = match origin {
            CpuOrigin::AffinityMask => "widen the affinity mask of this process (taskset)",
            CpuOrigin::BatchSystem => "request more from the batch system",
            CpuOrigin::Warden => "request more with --cores",
        };
        bail!("the part {part} of the map is not inside the CPUs {granted}: choose from these, or {more}");
    }
    let placement = |part: CpuSet| {
        let node = numa_node_containing(topology, &part);
        let preferred_numa_node = node.filter(|node| can_prefer_numa_node(*node));
        Arc::new(Placement { preferred_numa_node, ..Placement::on_cpus(part) })
    };
    Ok(parts.into_iter().map(placement).collect())
}

/// Returns the PUs (logical CPUs) of the first `cores` cores in `mask`, the affinity mask of this process. Used for
/// `--cores` with `--local`, and in a job of a batch system.
///
/// # Errors
/// If `cores` is 0 or more than the cores in `mask`.
fn first_cores(topology: &Topology, mask: &CpuSet, cores: u32) -> anyhow::Result<CpuSet> {
    let all = divide_into_parts(topology, mask, &DivisionRule::Core, 0);
    let wanted = usize::try_from(cores)?;
    if wanted == 0 || wanted > all.len() {
        bail!(
            "{cores} cores were asked for, and the affinity mask {mask} of this process has {}: choose from 1 to {}",
            all.len(),
            all.len()
        );
    }
    Ok(all[..wanted].iter().fold(CpuSet::new(), |cpus, core| cpus.union(core)))
}

/// Divides the instances of each program into groups, if they will be forked from templates (processes that have
/// loaded the program). All instances of a group run on parts of the same size. The reason is that the environment
/// variables with the size, such as `OMP_NUM_THREADS`, must be set when the template is loaded. Each group has a
/// context (the settings for the start) with its variables. Without templates, each program stays one group. `parts`
/// is the number of parts.
fn divide_by_part_size(
    programs: Vec<PreparedCommand>,
    sizes: &SizeVariables,
    parts: usize,
) -> Vec<PreparedCommand> {
    let mut divided = Vec::new();
    for PreparedCommand { context, command, arguments } in programs {
        let RankedCommand { ranks, program, arguments: words, line } = command;
        for (part, ranks) in sizes.divide_into_groups(ranks, parts) {
            let context = sizes.apply_to_context(context.clone(), part);
            let command = RankedCommand { ranks, program: program.clone(), arguments: words.clone(), line };
            divided.push(PreparedCommand { context, command, arguments: Arc::clone(&arguments) });
        }
    }
    divided
}

/// Makes the instances of `programs`, each with its rank, variables, placement and output. `size` is the number of
/// instances of all programs. Also sets the environment variables `PJW_JOB` and `PJW_JOB_DIR`, with the job of
/// `grant`, for all instances. If `labels` is `Some`, the instances write to new pipes in `labels`, so that their
/// output gets labels.
fn add_instances(
    programs: Vec<PreparedCommand>,
    size: u32,
    placements: &[Arc<Placement>],
    sizes: &SizeVariables,
    grant: &Grant,
    mut labels: Option<&mut LabelledPipes>,
) -> anyhow::Result<Vec<Program>> {
    let mut result = Vec::new();
    for PreparedCommand { context, command, arguments } in programs {
        let context = match (&grant.job, &grant.directory) {
            (Some(job), Some(directory)) => {
                context.set_variable("PJW_JOB", job).set_variable("PJW_JOB_DIR", directory)
            }
            // An inherited variable names the directory of the job in which pjwctl was started.
            (Some(job), None) => context.set_variable("PJW_JOB", job).remove_variable("PJW_JOB_DIR"),
            (None, _) => context,
        };
        // Before the grant, this process may have had a narrower mask.
        let context = context.set_max_spawner_threads(grant.cpus.len());
        let mut instances = Vec::with_capacity(command.ranks.len());
        for rank in command.ranks {
            let stdio = match &mut labels {
                Some(labels) => labels.add(rank)?,
                None => Stdio::default(),
            };
            let part = rank as usize % placements.len();
            instances.push(Instance {
                rank,
                size,
                arguments: Arc::clone(&arguments),
                variables: sizes.own_variables(part),
                placement: Arc::clone(&placements[part]),
                stdio,
            });
        }
        result.push(Program { context, instances });
    }
    Ok(result)
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;

    use pjw_core::topology::{RegularShape, TopologyLevel};

    use super::*;
    use crate::cli::{Cli, CliCommand};

    /// The parts of the instances of `pjwctl spawn` with these options, on all of two NUMA nodes of four cores. Without
    /// `--local`, pjwd has granted the CPUs.
    fn parts(options: &str, granted: &str) -> anyhow::Result<Vec<CpuSet>> {
        let is_local = options.contains("--local");
        let origin = if is_local { CpuOrigin::AffinityMask } else { CpuOrigin::Warden };
        parts_from(origin, options, granted)
    }

    fn parts_from(origin: CpuOrigin, options: &str, granted: &str) -> anyhow::Result<Vec<CpuSet>> {
        let line = format!("pjwctl spawn {options} -- program");
        let Ok(cli) = Cli::parse_args(line.split_whitespace().map(OsString::from)) else { panic!("{line}") };
        let CliCommand::Spawn(request) = cli.command else { panic!("not spawn") };
        let topology = two_nodes();
        let size = request.instances.unwrap();
        let placements = placements(&topology, &granted.parse().unwrap(), origin, &request, size)?;
        Ok(placements.iter().take(size as usize).map(|placement| placement.cpus.clone().unwrap()).collect())
    }

    fn two_nodes() -> Topology {
        Topology::from_shape(RegularShape {
            packages: 2,
            numa_nodes_per_package: 1,
            l3s_per_numa_node: 1,
            cores_per_l3: 4,
            pus_per_core: 1,
        })
    }

    #[test]
    fn tasks_are_placed_in_one_numa_node_and_other_instances_in_the_order_of_the_machine() {
        let nodes = |options: &str, granted: &str| {
            let parts = parts(options, granted).unwrap();
            let topology = two_nodes();
            topology
                .domains(TopologyLevel::NumaNode)
                .filter(|node| parts.iter().any(|part| part.intersects(&node.cpus)))
                .count()
        };
        for options in ["-n 4", "-n 4 --map core"] {
            assert_eq!(nodes(options, "2-7"), 2, "{options}");
            assert_eq!(nodes(&format!("{options} --share memory"), "2-7"), 1, "{options}");
            assert_eq!(nodes(&format!("{options} --share memory --within-job rr"), "2-7"), 2, "{options}");
        }
        for options in ["-n 4 --share memory", "-n 4 --share memory --proxy never"] {
            assert_eq!(nodes(options, "0-7"), 2, "{options}: each has two cores");
        }
        assert_eq!(nodes("-n 4 --share memory --map core", "0-7"), 1);
    }

    #[test]
    fn a_part_outside_of_the_cpus_is_refused_with_a_remedy_that_helps() {
        let refusal = |options: &str| parts(options, "0-1").unwrap_err().to_string();
        let begin = "the part 7 of the map is not inside the CPUs 0-1: choose from these, or ";
        assert_eq!(refusal("-n 2 --map 0;7"), format!("{begin}request more with --cores"));
        let local = "widen the affinity mask of this process (taskset)";
        assert_eq!(refusal("-n 2 --local --map 0;7"), format!("{begin}{local}"));
        let refused = parts_from(CpuOrigin::BatchSystem, "-n 2 --map 0;7", "0-1").unwrap_err();
        assert_eq!(refused.to_string(), format!("{begin}request more from the batch system"));
    }

    #[test]
    fn in_a_job_of_a_batch_system_the_parts_are_cut_from_as_many_cores_as_requested() {
        let parts = |options: &str| {
            let parts = parts_from(CpuOrigin::BatchSystem, options, "2-7")?;
            Ok::<Vec<String>, anyhow::Error>(parts.iter().map(ToString::to_string).collect())
        };
        assert_eq!(parts("-n 2 --cores 4").unwrap(), ["2-3", "4-5"]);
        for options in ["-n 2", "-n 2 --cores all"] {
            assert_eq!(parts(options).unwrap(), ["2-4", "5-7"], "{options}");
        }
        let refusal = parts("-n 2 --cores 7").unwrap_err().to_string();
        assert!(refusal.contains("7 cores were asked for") && refusal.contains("from 1 to 6"), "{refusal}");
    }
}
