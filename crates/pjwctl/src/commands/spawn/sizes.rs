//! The variables that tell each instance the size of its part, such as `OMP_NUM_THREADS`.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::sync::Arc;

use pjw_core::cpu_count_variables::{CpuCountVariable, CpuCounts, cpu_count_environment};
use pjw_core::topology::Topology;
use pjw_spawn::{Placement, SpawnContext};

use crate::commands::run::environment_variable;

/// The variable with the number of cores of an instance's part.
const CORES_VARIABLE: &str = "PJW_NCORES";
/// A value that removes a variable from a [`SpawnContext`].
const REMOVED: &str = "\0";

/// The environment variables that tell each instance (process) the number of its cores or PUs (logical CPUs), such as
/// `OMP_NUM_THREADS`. `pjwctl spawn` divides the cores of the job into parts, and each instance runs on one part.
/// Variables that the user has set are left out.
pub(super) struct SizeVariables {
    /// The variables of each part, with their values, in the order of the placements.
    by_part: Vec<Vec<(String, String)>>,
    /// Whether all instances that are started with the same [`SpawnContext`] have the same variables. The variables are
    /// then set in the context, and not for each instance.
    are_common: bool,
}

impl SizeVariables {
    /// Computes the environment variables with the size for the instances on each part of the cores. The size of a
    /// part is its number of cores and its number of PUs (logical CPUs).
    ///
    /// - `placements` contains the parts into which `pjwctl spawn` divides the cores of the job.
    /// - `variables` contains the definitions of the variables.
    /// - `has_templates` says whether instances are forked from templates (processes that have loaded the program).
    ///   The variables must then be the same for all instances of a template.
    pub(super) fn new(
        topology: &Topology,
        placements: &[Arc<Placement>],
        variables: &[CpuCountVariable],
        has_templates: bool,
    ) -> Self {
        let counts_of = |placement: &Arc<Placement>| {
            CpuCounts::from_cpus(topology, placement.cpus.as_ref().unwrap_or(topology.cpus()))
        };
        let counts: Vec<CpuCounts> = placements.iter().map(counts_of).collect();
        let have_same_cores = counts.windows(2).all(|pair| pair[0].cores == pair[1].cores);
        let of_part = |counts: &CpuCounts| {
            let mut set = cpu_count_environment(variables, *counts, environment_variable);
            // An inherited value belongs to the job in which pjwctl was started. No library reads the variable when it
            // is loaded, so different values are no reason against templates. The instances of a template then have no
            // such variable.
            let cores = counts.cores.to_string();
            let can_be_set = have_same_cores || !has_templates;
            set.push((CORES_VARIABLE.to_owned(), if can_be_set { cores } else { REMOVED.to_owned() }));
            set
        };
        let by_part: Vec<_> = counts.iter().map(of_part).collect();
        let are_equal = by_part.windows(2).all(|pair| pair[0] == pair[1]);
        Self { by_part, are_common: are_equal || has_templates }
    }

    /// Divides `ranks`, the ranks of the instances of one program, into groups that can be started with the same
    /// context (the settings for the start). Returns the ranks of each group, and the index of a part of the cores.
    /// The group is started with the variables of this part. `parts` is the number of parts.
    ///
    /// If instances are forked from templates (processes that have loaded the program), all parts of a group have the
    /// same size, because libraries read the variables when the template is loaded. The same holds if the parts of
    /// all instances have the same size. Otherwise, returns one group with all ranks, and each instance gets its own
    /// variables.
    pub(super) fn divide_into_groups(&self, ranks: Vec<u32>, parts: usize) -> Vec<(usize, Vec<u32>)> {
        if !self.are_common {
            return vec![(0, ranks)];
        }
        let mut groups: BTreeMap<usize, Vec<u32>> = BTreeMap::new();
        for rank in ranks {
            let own = self.by_part.get(rank as usize % parts);
            let first = self.by_part.iter().position(|other| Some(other) == own);
            groups.entry(first.unwrap_or(0)).or_default().push(rank);
        }
        groups.into_iter().collect()
    }

    /// Sets the variables for the number of CPUs (such as `OMP_NUM_THREADS`) in `context`, with which a group of
    /// instances is started. `part` is the index of the part of the CPUs on which these instances run. If the instances
    /// of a group can have different values, removes the inherited variables from `context` instead.
    pub(super) fn apply_to_context(&self, context: SpawnContext, part: usize) -> SpawnContext {
        let variables = self.by_part.get(part).into_iter().flatten();
        variables.fold(context, |context, (name, value)| {
            context.set_variable(name, if self.are_common { value } else { REMOVED })
        })
    }

    /// Returns the name of an environment variable whose value differs between parts of the cores. `None` if there is
    /// no such variable.
    pub(super) fn unequal_variable(&self) -> Option<&str> {
        let mut pairs = self.by_part.windows(2).flat_map(|pair| pair[0].iter().zip(&pair[1]));
        pairs.find(|(one, other)| one != other).map(|((name, _), _)| name.as_str())
    }

    /// Returns the environment variables (`NAME=value`) for an instance on the part with the index `part`. Empty if
    /// [`SizeVariables::apply_to_context`] sets the variables in the context of the instance.
    pub(super) fn own_variables(&self, part: usize) -> Vec<CString> {
        let own = self.by_part.get(part).filter(|_| !self.are_common).into_iter().flatten();
        own.filter_map(|(name, value)| CString::new(format!("{name}={value}")).ok()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pjw_core::testing::regular_topology;

    fn sizes(parts: &[&str], has_templates: bool) -> SizeVariables {
        let placements: Vec<_> =
            parts.iter().map(|part| Arc::new(Placement::on_cpus(part.parse().unwrap()))).collect();
        let variables = ["PJWTEST_A=cores".parse().unwrap()];
        // Four cores of two PUs each: N and N + 4.
        SizeVariables::new(&regular_topology(1, 1, 1, 4, 2), &placements, &variables, has_templates)
    }

    fn texts(variables: Vec<CString>) -> Vec<String> {
        variables.into_iter().map(|variable| variable.into_string().unwrap()).collect()
    }

    #[test]
    fn instances_on_parts_of_the_same_size_share_their_variables() {
        for has_templates in [false, true] {
            let sizes = sizes(&["0,4", "1,5"], has_templates);
            assert_eq!(sizes.unequal_variable(), None);
            assert!(sizes.own_variables(0).is_empty());
            assert_eq!(sizes.divide_into_groups(vec![0, 1, 2], 2), [(0, vec![0, 1, 2])]);
        }
    }

    #[test]
    fn instances_that_execute_their_program_have_the_variables_of_their_parts() {
        let sizes = sizes(&["0-1,4-5", "2,6"], false);
        assert_eq!(sizes.unequal_variable(), Some("PJWTEST_A"));
        let values = |part| texts(sizes.own_variables(part));
        assert_eq!(values(0)[0], "PJWTEST_A=2");
        assert_eq!(values(1)[0], "PJWTEST_A=1");
        assert_eq!(values(1)[1..], ["PJW_VARIABLES=PJWTEST_A=1", "PJW_NCORES=1"]);
        assert_eq!(sizes.divide_into_groups(vec![0, 1, 2], 2), [(0, vec![0, 1, 2])]);
    }

    #[test]
    fn instances_of_a_template_have_parts_of_the_same_size() {
        let sizes = sizes(&["0-1,4-5", "2,6", "3,7"], true);
        assert_eq!(sizes.unequal_variable(), Some("PJWTEST_A"));
        assert!((0..3).all(|part| sizes.own_variables(part).is_empty()));
        let groups = sizes.divide_into_groups((0..7).collect(), 3);
        assert_eq!(groups, [(0, vec![0, 3, 6]), (1, vec![1, 2, 4, 5])]);
    }

    #[test]
    fn the_number_of_cores_alone_is_no_reason_against_a_template() {
        let placements: Vec<_> =
            ["0-1,4-5", "2,6"].map(|part| Arc::new(Placement::on_cpus(part.parse().unwrap()))).into();
        let sizes = |has_templates| {
            SizeVariables::new(&regular_topology(1, 1, 1, 4, 2), &placements, &[], has_templates)
        };
        assert_eq!(sizes(true).unequal_variable(), None);
        assert_eq!(sizes(true).divide_into_groups(vec![0, 1], 2), [(0, vec![0, 1])]);
        assert_eq!(texts(sizes(false).own_variables(1)).last().map(String::as_str), Some("PJW_NCORES=1"));
    }
}
