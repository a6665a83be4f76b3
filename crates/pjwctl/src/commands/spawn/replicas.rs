//! `--replicate`: copies of the programs and their libraries on each NUMA node that instances run on.

use std::collections::BTreeSet;

use pjw_core::topology::{Topology, TopologyLevel};
use pjw_spawn::proxy::Template;
use pjw_spawn::replicate::Replicas;

use super::group::Program;
use super::refusal::{LoadOption, load_error};
use crate::output;

/// Gives each NUMA node its own copies (replicas) of the files of `programs`: of the programs and their libraries.
/// Returns the changed programs. The copies are made when the instances are started. Prints how much memory they will
/// use. On a machine with a single NUMA node, prints a message and returns `programs` unchanged.
///
/// # Errors
/// If the files of a program can't be found, or if the copies do not fit into the free memory.
pub(super) fn with_replicas(topology: &Topology, programs: Vec<Program>) -> anyhow::Result<Vec<Program>> {
    if topology.domains(TopologyLevel::NumaNode).nth(1).is_none() {
        output::print_error("--replicate: this machine has one NUMA node, so there is nothing to replicate");
        return Ok(programs);
    }
    let all: Vec<(Program, Option<Replicas>)> =
        programs.into_iter().map(with_own_replicas).collect::<anyhow::Result<_>>()?;
    Replicas::check_free_memory(all.iter().filter_map(|(_, replicas)| replicas.as_ref()))?;
    let given = all.into_iter().map(|(Program { context, instances }, replicas)| match replicas {
        None => Program { context, instances },
        Some(replicas) => {
            output::print_error(&format!(
                "--replicate takes {replicas} of memory for {} files of {}",
                replicas.file_count(),
                context.program_path().to_string_lossy()
            ));
            Program { context: context.set_replicas(replicas), instances }
        }
    });
    Ok(given.collect())
}

/// Determines which files of `program` need replicas (copies for each NUMA node), and on which NUMA nodes. Loads the
/// program once to find its libraries. Returns the program, with `None` if no instance has all its CPUs on one NUMA
/// node. Prints a message if some instances can't use replicas.
///
/// # Errors
/// If the program can't be loaded, or if its files can't be read.
fn with_own_replicas(program: Program) -> anyhow::Result<(Program, Option<Replicas>)> {
    let instances = &program.instances;
    let nodes: BTreeSet<u32> =
        instances.iter().filter_map(|instance| instance.placement.preferred_numa_node).collect();
    let without =
        instances.iter().filter(|instance| instance.placement.preferred_numa_node.is_none()).count();
    if without > 0 {
        output::print_error(&format!(
            "--replicate: {without} instances have no replicas: their parts are on several NUMA nodes, or on a node whose \
             memory pjwctl may not use; choose parts inside one node with --map numa, and nodes with memory"
        ));
    }
    let Some(first) = instances.first().filter(|_| !nodes.is_empty()) else { return Ok((program, None)) };
    match Template::load_until_main(&program.context, first) {
        Ok(template) => Ok((program, Some(Replicas::of_process(template.pid(), nodes)?))),
        Err(refusal) => Err(load_error(refusal, program.context.program_path(), LoadOption::Replicate)),
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;
    use std::sync::Arc;

    use pjw_spawn::{Arguments, Instance, Placement, SpawnContext, Stdio};

    use super::super::refusal::exit_code;
    use super::*;

    #[test]
    fn a_script_without_its_interpreter_has_the_exit_code_and_the_message_that_it_has_without_replicas() {
        if !cfg!(target_arch = "x86_64") {
            eprintln!("skipped: templates exist for x86_64 only");
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let script = dir.path().join("script");
        // A shell writes the file: one that a child of this process has open for writing can't be executed.
        let write = "printf '#!/no/such/interpreter\n' >\"$0\" && chmod 755 \"$0\"";
        assert!(Command::new("sh").args(["-c", write]).arg(&script).status().unwrap().success());
        let placement = Placement { preferred_numa_node: Some(0), ..Placement::default() };
        let instance = Instance {
            rank: 0,
            size: 1,
            arguments: Arc::new(Arguments::parse(&["script"]).unwrap()),
            variables: Vec::new(),
            placement: Arc::new(placement),
            stdio: Stdio::default(),
        };
        let program = Program { context: SpawnContext::new(&script).unwrap(), instances: vec![instance] };
        let error = with_own_replicas(program).map(drop).unwrap_err();
        assert_eq!(exit_code(&error), 127);
        assert_eq!(
            error.to_string(),
            format!(
                "{0}: step exec failed: No such file or directory; the interpreter /no/such/interpreter in the first line \
                 of {0} is missing: install it, or correct that line",
                script.display()
            )
        );
    }
}
