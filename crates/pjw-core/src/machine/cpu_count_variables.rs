//! The environment variables that tell a program how many cores or PUs it has, such as `OMP_NUM_THREADS`.
//!
//! A program that counts the PUs of the whole machine starts too many threads in a job. Most libraries for parallel
//! programs read their number of threads from a variable. pjw sets these variables to the size of the job, except those
//! that the user set.

use core::fmt;
use core::str::FromStr;

use thiserror::Error;

use crate::basics::{CpuSet, prelude::*};
use crate::machine::topology::Topology;

/// The name of the environment variable in which pjw records the variables that it set for a job, with their
/// values. Example of a value: `OMP_NUM_THREADS=4:GOMAXPROCS=8`.
///
/// A job that is started inside another job inherits the variables of the outer job. The record tells pjw which
/// inherited variables pjw itself set. pjw replaces these, and keeps the variables that the user set.
const RECORD_VARIABLE: &str = "PJW_VARIABLES";
/// The maximum number of entries in the configured list of CPU count variables. A CPU count variable is an environment
/// variable that tells a program on how many cores or PUs (logical CPUs) it may run, such as `OMP_NUM_THREADS`.
pub const MAX_CPU_COUNT_VARIABLES: usize = 64;
/// The maximum number of characters in the name of a variable.
const MAX_NAME_LENGTH: usize = 128;

/// What the value of an environment variable such as `OMP_NUM_THREADS` counts: the cores or the PUs (logical
/// CPUs) on which a program may run. See [`CpuCountVariable`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CpuCountUnit {
    /// Physical cores. For libraries that start one thread per core.
    Cores,
    /// PUs (logical CPUs). For programs that start one thread per PU.
    Pus,
}

impl CpuCountUnit {
    /// Returns the word for the unit in the configuration: `cores` or `pus`. Example: `OMP_NUM_THREADS=cores`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Cores => "cores",
            Self::Pus => "pus",
        }
    }
}

/// The number of cores and the number of PUs (logical CPUs) on which a program may run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CpuCounts {
    /// The number of cores with at least one PU of the program.
    pub cores: u32,
    /// The number of PUs (logical CPUs).
    pub pus: u32,
}

impl CpuCounts {
    /// Counts the PUs (logical CPUs) in `cpus`, and the cores that have at least one PU in `cpus`. `topology` is the
    /// topology of the machine.
    #[must_use]
    pub fn from_cpus(topology: &Topology, cpus: &CpuSet) -> Self {
        let pus = u32::try_from(cpus.len()).unwrap_or(u32::MAX);
        Self { cores: topology.overlapping_core_count(cpus), pus }
    }
}

/// An environment variable that tells a program on how many cores or PUs (logical CPUs) it may run, such as
/// `OMP_NUM_THREADS`. In the configuration, the variable is written `NAME=cores` or `NAME=pus`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CpuCountVariable {
    name: String,
    unit: CpuCountUnit,
}

/// The reason why the setting `run.variables` of pjwd is not valid. The setting lists environment variables, such as
/// `OMP_NUM_THREADS`, that tell a program on how many cores or PUs (logical CPUs) it may run. Each entry of the list
/// must be `NAME=cores` or `NAME=pus`, such as `OMP_NUM_THREADS=cores`. No variable may be listed twice.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum CpuCountVariableError {
    /// The text contains no equals sign.
    #[error("{text:?} has no unit: write NAME=cores or NAME=pus, such as \"OMP_NUM_THREADS=cores\"")]
    NoUnit {
        /// The whole text.
        text: String,
    },
    /// The text after the equals sign is not a unit.
    #[error("{unit:?} is no unit of {name}: write cores or pus")]
    UnknownUnit {
        /// The name of the variable.
        name: String,
        /// The text after the equals sign.
        unit: String,
    },
    /// The text before the equals sign can't be the name of a variable.
    #[error(
        "{name:?} is not the name of a variable: use letters, digits and _, no digit first, at most {MAX_NAME_LENGTH}"
    )]
    InvalidName {
        /// The text before the equals sign.
        name: String,
    },
    /// pjw, the dynamic linker or the shell gives this variable another meaning.
    #[error("{name} has another meaning for pjw, the dynamic linker or the shell: name another variable")]
    ReservedName {
        /// The name of the variable.
        name: String,
    },
    /// The name occurs twice in a list.
    #[error("{name} is listed twice: list each variable once")]
    Twice {
        /// The name of the variable.
        name: String,
    },
}

/// The variables that pjw sets if the configuration does not name others. The unit of each variable is what the program
/// counts if the variable is not set.
const DEFAULTS: [(&str, CpuCountUnit); 10] = [
    ("OMP_NUM_THREADS", CpuCountUnit::Cores),
    ("MKL_NUM_THREADS", CpuCountUnit::Cores),
    ("OPENBLAS_NUM_THREADS", CpuCountUnit::Cores),
    ("NUMEXPR_NUM_THREADS", CpuCountUnit::Cores),
    ("GOMAXPROCS", CpuCountUnit::Pus),
    ("RAYON_NUM_THREADS", CpuCountUnit::Pus),
    ("JULIA_NUM_THREADS", CpuCountUnit::Cores),
    ("PYTHON_CPU_COUNT", CpuCountUnit::Pus),
    ("ATHENA_PROC_NUMBER", CpuCountUnit::Cores),
    ("ATHENA_CORE_NUMBER", CpuCountUnit::Cores),
];

impl CpuCountVariable {
    /// Returns the default list of the variables that pjw sets for each job, such as `OMP_NUM_THREADS=cores`
    /// and `GOMAXPROCS=pus`. The list in the configuration replaces this list.
    #[must_use]
    pub fn defaults() -> Vec<Self> {
        DEFAULTS.iter().map(|&(name, unit)| Self { name: name.to_owned(), unit }).collect()
    }

    /// Returns the name of the environment variable, such as `OMP_NUM_THREADS`.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the value of this environment variable for a program that may run on the cores and PUs (logical CPUs)
    /// counted in `counts`. The value is the number of cores or the number of PUs, depending on the variable, and at
    /// least 1.
    #[must_use]
    pub fn value(&self, counts: CpuCounts) -> u32 {
        match self.unit {
            CpuCountUnit::Cores => counts.cores,
            CpuCountUnit::Pus => counts.pus,
        }
        .max(1)
    }
}

impl fmt::Display for CpuCountVariable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.name, self.unit.name())
    }
}

impl FromStr for CpuCountVariable {
    type Err = CpuCountVariableError;

    /// Parses `NAME=cores` or `NAME=pus`.
    fn from_str(text: &str) -> Result<Self, CpuCountVariableError> {
        let Some((name, unit)) = text.split_once('=') else {
            return Err(CpuCountVariableError::NoUnit { text: text.to_owned() });
        };
        let is_allowed = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let has_valid_length = !name.is_empty() && name.len() <= MAX_NAME_LENGTH;
        let begins_with_digit = name.starts_with(|c: char| c.is_ascii_digit());
        if !has_valid_length || begins_with_digit || !name.chars().all(is_allowed) {
            return Err(CpuCountVariableError::InvalidName { name: name.to_owned() });
        }
        let reserved = ["PJW_", "LD_"].iter().any(|prefix| name.starts_with(prefix));
        if reserved || ["PATH", "HOME", "IFS", "SHELL", "USER", "PWD"].contains(&name) {
            return Err(CpuCountVariableError::ReservedName { name: name.to_owned() });
        }
        let unit = match unit {
            "cores" => CpuCountUnit::Cores,
            "pus" => CpuCountUnit::Pus,
            _ => {
                return Err(CpuCountVariableError::UnknownUnit {
                    name: name.to_owned(),
                    unit: unit.to_owned(),
                });
            }
        };
        Ok(Self { name: name.to_owned(), unit })
    }
}

/// Parses one entry of a list of environment variables in the configuration. Such a variable tells a program on how
/// many cores or PUs (logical CPUs) it may run. The entry is written `NAME=cores` or `NAME=pus`. `earlier` has the
/// preceding entries of the list.
///
/// # Errors
/// If the entry is invalid, or if an earlier entry has the same variable.
pub fn parse_cpu_count_variable(
    entry: &str,
    earlier: &[CpuCountVariable],
) -> Result<CpuCountVariable, CpuCountVariableError> {
    let variable: CpuCountVariable = entry.parse()?;
    if earlier.iter().any(|known| known.name == variable.name) {
        return Err(CpuCountVariableError::Twice { name: variable.name });
    }
    Ok(variable)
}

/// Returns the names and values of the environment variables that pjw sets for a program, such as the name
/// `OMP_NUM_THREADS` and the value `4`. pjw sets each variable in `variables` that the user has not set.
///
/// - `counts` has the numbers of cores and PUs (logical CPUs) on which the program may run.
/// - `inherited` returns the value of a variable in the environment that the program inherits. `None` means that the
///   variable is not set there.
///
/// The last variable in the result is `PJW_VARIABLES`, which lists the names and values that pjw set. If the program
/// starts another job with pjw, pjw sees from this list which variables the user did not set, and sets them anew.
///
/// If pjw sets none of `variables`, the list is empty. `PJW_VARIABLES` is then in the result only if it replaces an
/// inherited `PJW_VARIABLES`.
#[must_use]
pub fn cpu_count_environment(
    variables: &[CpuCountVariable],
    counts: CpuCounts,
    inherited: impl Fn(&str) -> Option<String>,
) -> Vec<(String, String)> {
    let values = variables.iter().map(|variable| (variable.name.clone(), variable.value(counts).to_string()));
    with_record(values, inherited)
}

/// Returns the variables in `values` (names and values) that the user has not set, and `PJW_VARIABLES`, which lists
/// them. If the list is empty and the program did not inherit `PJW_VARIABLES`, the result is empty. `inherited` returns
/// the value of a variable in the environment that the program inherits, and `None` if the variable is not set.
#[must_use]
fn with_record(
    values: impl IntoIterator<Item = (String, String)>,
    inherited: impl Fn(&str) -> Option<String>,
) -> Vec<(String, String)> {
    let earlier = inherited(RECORD_VARIABLE);
    let is_set_by_pjw = |name: &str, value: &str| {
        let entries = earlier.iter().flat_map(|record| record.split(':'));
        entries.filter_map(|entry| entry.split_once('=')).any(|entry| entry == (name, value))
    };
    let is_set_by_user = |name: &str| inherited(name).is_some_and(|value| !is_set_by_pjw(name, &value));
    let mut variables: Vec<(String, String)> =
        values.into_iter().filter(|(name, _)| !is_set_by_user(name)).collect();
    let record: Vec<String> = variables.iter().map(|(name, value)| format!("{name}={value}")).collect();
    if !record.is_empty() || earlier.is_some() {
        variables.push((RECORD_VARIABLE.to_owned(), record.join(":")));
    }
    variables
}

#[cfg(test)]
mod tests {
    use super::*;

    const FOUR_CORES: CpuCounts = CpuCounts { cores: 4, pus: 8 };

    fn environment_of(counts: CpuCounts, inherited: &[(&str, &str)]) -> BTreeMap<String, String> {
        let get = |name: &str| {
            inherited.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        };
        cpu_count_environment(&CpuCountVariable::defaults(), counts, get).into_iter().collect()
    }

    #[test]
    fn each_default_variable_has_the_number_of_cores_or_pus() {
        let set = environment_of(FOUR_CORES, &[]);
        assert_eq!(set.len(), DEFAULTS.len() + 1);
        for (name, unit) in DEFAULTS {
            let expected = if unit == CpuCountUnit::Cores { "4" } else { "8" };
            assert_eq!(set[name], expected, "{name}");
        }
        assert!(set[RECORD_VARIABLE].starts_with("OMP_NUM_THREADS=4:MKL_NUM_THREADS=4:"), "{set:?}");
    }

    #[test]
    fn each_variable_that_the_user_set_is_kept() {
        for (name, _) in DEFAULTS {
            for value in ["7", "4", ""] {
                let set = environment_of(FOUR_CORES, &[(name, value)]);
                assert!(!set.contains_key(name), "{name}={value}");
                assert_eq!(set.len(), DEFAULTS.len(), "the others are set");
                assert!(!set[RECORD_VARIABLE].contains(name), "{set:?}");
            }
        }
    }

    #[test]
    fn a_job_in_a_job_has_its_own_size_and_keeps_what_the_user_changed() {
        let outer: Vec<(String, String)> = environment_of(FOUR_CORES, &[]).into_iter().collect();
        let mut inherited: Vec<(&str, &str)> =
            outer.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        let inner = CpuCounts { cores: 1, pus: 2 };
        let set = environment_of(inner, &inherited);
        assert_eq!((set["OMP_NUM_THREADS"].as_str(), set["GOMAXPROCS"].as_str()), ("1", "2"));
        for entry in inherited.iter_mut().filter(|(name, _)| *name == "OMP_NUM_THREADS") {
            entry.1 = "3";
        }
        let set = environment_of(inner, &inherited);
        assert!(!set.contains_key("OMP_NUM_THREADS"), "{set:?}");
        assert!(!set[RECORD_VARIABLE].contains("OMP_NUM_THREADS"), "{set:?}");
        assert_eq!(set["GOMAXPROCS"], "2");
    }

    #[test]
    fn an_inherited_record_is_replaced_also_if_nothing_is_set() {
        let get = |name: &str| (name == RECORD_VARIABLE).then(|| "OMP_NUM_THREADS=4".to_owned());
        assert_eq!(
            cpu_count_environment(&[], FOUR_CORES, get),
            [(RECORD_VARIABLE.to_owned(), String::new())]
        );
        assert!(cpu_count_environment(&[], FOUR_CORES, |_| None).is_empty());
    }

    #[test]
    fn a_value_is_at_least_one() {
        let variable: CpuCountVariable = "N=cores".parse().unwrap();
        assert_eq!(variable.value(CpuCounts { cores: 0, pus: 0 }), 1);
    }

    #[test]
    fn a_malformed_variable_is_refused_with_what_is_allowed() {
        let error = |text: &str| text.parse::<CpuCountVariable>().unwrap_err().to_string();
        assert!(error("OMP_NUM_THREADS").contains("write NAME=cores or NAME=pus"));
        assert_eq!(error("N=threads"), "\"threads\" is no unit of N: write cores or pus");
        assert!(error("N=Cores").contains("write cores or pus"));
        assert!(error("N=").contains("write cores or pus"));
        let long = "x".repeat(MAX_NAME_LENGTH + 1);
        for name in ["", "1N", "A B", "A-B", "\u{e9}", long.as_str()] {
            assert!(error(&format!("{name}=cores")).contains("is not the name of a variable"), "{name}");
        }
        for name in ["PJW_NCORES", "LD_PRELOAD", "PATH"] {
            assert!(error(&format!("{name}=cores")).contains("another meaning"), "{name}");
        }
        let first = parse_cpu_count_variable("A=cores", &[]).unwrap();
        assert_eq!(first.to_string(), "A=cores");
        let twice = parse_cpu_count_variable("A=pus", &[first]).unwrap_err();
        assert_eq!(twice, CpuCountVariableError::Twice { name: "A".to_owned() });
    }
}
