//! The argument list and the environment of instances, as the arrays of pointers that execve(2) reads.
//!
//! What all instances of a spawner have in common is laid out once. Before the start of an instance, only its own
//! arguments and variables are written. The memory with those of the previous instance is used again, because execve(2)
//! has copied them.

use std::ffi::{CString, c_char};
use std::fmt::Write as _;
use std::ptr;
use std::sync::Arc;

use crate::arguments::{Argument, Arguments};
use crate::instance::Instance;
use crate::placement::Placement;

/// The names of the environment variables that describe an instance (one process of a group): its rank, the number of
/// instances, and its CPUs.
pub(crate) const RANK_VARIABLES: [&str; 3] = ["PJW_RANK", "PJW_SIZE", "PJW_CPUS"];

/// The argument array and the environment array for execve(2). A spawner thread fills the same arrays for one instance
/// (process) after the other.
pub(crate) struct ExecArrays {
    arguments: Vec<*const c_char>,
    /// The arguments that differ between instances, each with its index in `arguments`.
    own_arguments: Vec<(usize, Vec<u8>)>,
    /// The list that is laid out in `arguments`.
    current_list: Option<Arc<Arguments>>,
    environment: Vec<*const c_char>,
    /// How many variables of `environment` all instances have.
    shared_variables: usize,
    has_rank_variables: bool,
    /// The texts of the variables in [`RANK_VARIABLES`], each ended by a NUL byte.
    rank_variables: [String; 3],
    /// The placement for which `PJW_CPUS` is written.
    current_placement: Option<Arc<Placement>>,
}

impl ExecArrays {
    /// Prepares the arrays for instances that have the variables `environment` in common. If `has_rank_variables` is
    /// true, each instance also gets the variables [`RANK_VARIABLES`]. `environment` must outlive the returned value.
    pub(crate) fn new(environment: &[CString], has_rank_variables: bool) -> Self {
        let environment: Vec<_> = environment.iter().map(|variable| variable.as_ptr()).collect();
        Self {
            arguments: Vec::new(),
            own_arguments: Vec::new(),
            current_list: None,
            shared_variables: environment.len(),
            environment,
            has_rank_variables,
            rank_variables: Default::default(),
            current_placement: None,
        }
    }

    /// Fills the arrays for `instance`, and returns its argument array and its environment array. Both arrays end with
    /// a null pointer. The arrays are valid until the next call, and only as long as `instance` exists.
    pub(crate) fn fill(&mut self, instance: &Instance) -> (*const *const c_char, *const *const c_char) {
        self.lay_out_arguments(instance);
        self.lay_out_variables(instance);
        (self.arguments.as_ptr(), self.environment.as_ptr())
    }

    /// Fills the argument array for `instance`. If the last instance had the same list of arguments, writes only the
    /// arguments that contain the rank or the number of instances.
    fn lay_out_arguments(&mut self, instance: &Instance) {
        let is_laid_out =
            self.current_list.as_ref().is_some_and(|list| Arc::ptr_eq(list, &instance.arguments));
        if !is_laid_out {
            self.arguments.clear();
            self.own_arguments.clear();
            for (index, argument) in instance.arguments.list.iter().enumerate() {
                self.arguments.push(match argument {
                    Argument::Fixed(fixed) => fixed.as_ptr(),
                    Argument::PerInstance(_) => {
                        self.own_arguments.push((index, Vec::new()));
                        ptr::null()
                    }
                });
            }
            self.arguments.push(ptr::null());
            self.current_list = Some(Arc::clone(&instance.arguments));
        }
        for (index, bytes) in &mut self.own_arguments {
            if let Argument::PerInstance(pieces) = &instance.arguments.list[*index] {
                bytes.clear();
                pieces.iter().for_each(|piece| piece.append(instance.rank, instance.size, bytes));
                bytes.push(0);
                self.arguments[*index] = bytes.as_ptr().cast();
            }
        }
    }

    fn lay_out_variables(&mut self, instance: &Instance) {
        self.environment.truncate(self.shared_variables);
        if self.has_rank_variables {
            self.write_rank_variables(instance);
            self.environment.extend(self.rank_variables.iter().map(|text| text.as_ptr().cast()));
        }
        self.environment.extend(instance.variables.iter().map(|variable| variable.as_ptr()));
        self.environment.push(ptr::null());
    }

    /// Writes the texts of the variables [`RANK_VARIABLES`] for `instance`. Writes the text with the CPUs only if the
    /// placement differs from that of the last instance.
    fn write_rank_variables(&mut self, instance: &Instance) {
        let [rank, size, cpus] = &mut self.rank_variables;
        let [rank_name, size_name, cpus_name] = RANK_VARIABLES;
        rank.clear();
        size.clear();
        let _ = write!(rank, "{rank_name}={}\0", instance.rank);
        let _ = write!(size, "{size_name}={}\0", instance.size);
        let placement = &instance.placement;
        if !self.current_placement.as_ref().is_some_and(|written| Arc::ptr_eq(written, placement)) {
            cpus.clear();
            let _ = write!(cpus, "{cpus_name}={}\0", placement.cpus.clone().unwrap_or_default());
            self.current_placement = Some(Arc::clone(placement));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::instance::Stdio;
    use std::ffi::CStr;

    /// Reads an array that ends with a null pointer.
    fn texts(mut array: *const *const c_char) -> Vec<String> {
        let mut texts = Vec::new();
        // SAFETY: the layout ends both of its arrays with a null pointer, and each text with a NUL byte.
        unsafe {
            while !(*array).is_null() {
                texts.push(CStr::from_ptr(*array).to_str().unwrap().to_owned());
                array = array.add(1);
            }
        }
        texts
    }

    fn instance(rank: u32, arguments: &Arc<Arguments>, cpus: &str) -> Instance {
        Instance {
            rank,
            size: 3,
            arguments: Arc::clone(arguments),
            variables: vec![CString::new(format!("OWN={rank}")).unwrap()],
            placement: Arc::new(Placement::on_cpus(cpus.parse().unwrap())),
            stdio: Stdio::default(),
        }
    }

    #[test]
    fn each_instance_has_its_own_arguments_and_variables_after_the_shared_ones() {
        let shared = [c"PATH=/bin".to_owned()];
        let mut layout = ExecArrays::new(&shared, true);
        let arguments = Arc::new(Arguments::parse(&["prog", "-o", "out.%r.of.%n"]).unwrap());
        for rank in [2, 0, 1] {
            let instance = instance(rank, &arguments, &format!("{rank}-7"));
            let (argv, envp) = layout.fill(&instance);
            assert_eq!(texts(argv), ["prog", "-o", &format!("out.{rank}.of.3")]);
            let cpus = format!("PJW_CPUS={rank}-7");
            let expected =
                ["PATH=/bin", &format!("PJW_RANK={rank}"), "PJW_SIZE=3", &cpus, &format!("OWN={rank}")];
            assert_eq!(texts(envp), expected);
        }
    }

    #[test]
    fn instances_with_different_lists_follow_each_other() {
        let mut layout = ExecArrays::new(&[], false);
        let long = Arc::new(Arguments::parse(&["prog", "%r", "b", "c"]).unwrap());
        let short = Arc::new(Arguments::parse(&["prog"]).unwrap());
        for (rank, arguments, expected) in [
            (0, &long, vec!["prog", "0", "b", "c"]),
            (1, &short, vec!["prog"]),
            (2, &long, vec!["prog", "2", "b", "c"]),
        ] {
            let instance = instance(rank, arguments, "0");
            let (argv, envp) = layout.fill(&instance);
            assert_eq!(texts(argv), expected);
            assert_eq!(texts(envp), [format!("OWN={rank}")]);
        }
    }
}
