//! The variables that tell each instance the size of its part, such as `OMP_NUM_THREADS`.

use std::ffi::CString;
use std::sync::Arc;

use pjw_core::cpu_count_variables::{CpuCountVariable, CpuCounts, cpu_count_environment};
use pjw_core::topology::Topology;
use pjw_spawn::{Context, Placement};

use crate::commands::run::own_variable;

/// A value that removes a variable from a [`Context`].
const REMOVED: &str = "\0";

/// The variables of the instances. Variables that the user set are not among them.
pub(super) struct InstanceSizes {
    /// The variables of each part, with their values, in the order of the placements.
    of_parts: Vec<Vec<(String, String)>>,
    /// Whether all parts have the same variables.
    are_equal: bool,
}

impl InstanceSizes {
    /// Counts the cores and PUs of each part.
    pub(super) fn new(
        topology: &Topology,
        placements: &[Arc<Placement>],
        variables: &[CpuCountVariable],
    ) -> Self {
        let of_part = |placement: &Arc<Placement>| {
            let counts = CpuCounts::from_cpus(topology, placement.cpus.as_ref().unwrap_or(topology.cpus()));
            cpu_count_environment(variables, counts, own_variable)
        };
        let of_parts: Vec<_> = placements.iter().map(of_part).collect();
        let are_equal = of_parts.windows(2).all(|pair| pair[0] == pair[1]);
        Self { of_parts, are_equal }
    }

    /// Sets the variables in the context if all parts have the same ones. Then a template has them too: the constructors of
    /// libraries read such variables once, when the template is loaded. Otherwise removes inherited values.
    pub(super) fn set_common_variables(&self, context: Context) -> Context {
        let first = self.of_parts.first().into_iter().flatten();
        first.fold(context, |context, (name, value)| {
            context.set_variable(name, if self.are_equal { value } else { REMOVED })
        })
    }

    /// The name of a variable that has other values on some parts than on others. `None` if all parts have the same variables.
    pub(super) fn unequal_variable(&self) -> Option<&str> {
        let mut pairs = self.of_parts.windows(2).flat_map(|pair| pair[0].iter().zip(&pair[1]));
        pairs.find(|(one, other)| one != other).map(|((name, _), _)| name.as_str())
    }

    /// The variables of an instance on this part that its context does not have.
    pub(super) fn own_variables(&self, part: usize) -> Vec<CString> {
        let own = self.of_parts.get(part).filter(|_| !self.are_equal).into_iter().flatten();
        own.filter_map(|(name, value)| CString::new(format!("{name}={value}")).ok()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pjw_core::testing::regular_topology;

    fn sizes(parts: &[&str]) -> InstanceSizes {
        let placements: Vec<_> =
            parts.iter().map(|part| Arc::new(Placement::on_cpus(part.parse().unwrap()))).collect();
        let variables = ["PJWTEST_A=cores".parse().unwrap()];
        // Four cores of two PUs each: N and N + 4.
        InstanceSizes::new(&regular_topology(1, 1, 1, 4, 2), &placements, &variables)
    }

    fn texts(variables: Vec<CString>) -> Vec<String> {
        variables.into_iter().map(|variable| variable.into_string().unwrap()).collect()
    }

    #[test]
    fn instances_on_parts_of_the_same_size_share_their_variables() {
        let sizes = sizes(&["0,4", "1,5"]);
        assert!(sizes.are_equal);
        assert_eq!(sizes.unequal_variable(), None);
        assert!(sizes.own_variables(0).is_empty());
    }

    #[test]
    fn instances_on_parts_of_other_sizes_have_variables_of_their_own() {
        let sizes = sizes(&["0-1,4-5", "2,6"]);
        assert!(!sizes.are_equal);
        assert_eq!(sizes.unequal_variable(), Some("PJWTEST_A"));
        let values = |part| texts(sizes.own_variables(part));
        assert_eq!(values(0)[0], "PJWTEST_A=2");
        assert_eq!(values(1)[0], "PJWTEST_A=1");
        assert_eq!(values(1)[1], "PJW_VARIABLES=PJWTEST_A=1");
    }
}
