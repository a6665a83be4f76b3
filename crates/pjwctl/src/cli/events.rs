//! The remarks below the help of `pjwctl events`.

/// The examples and remarks below the help of `pjwctl events`.
pub(super) const EXAMPLES: &str = "Examples:\n  \
    pjwctl events                      the latest events\n  \
    pjwctl events --follow             these, and each new one\n  \
    pjwctl events --json --follow | jq 'select(.event == \"violation\")'\n\n\
    Events of jobs: assigned, queued, recovered, resized, released and ended; confined, violation, stray and repaired; refused; \
    lent, revoked and returned; rebalanced. Others: hotplug, overrun (kernel events were lost, or this reader was too slow), started, \
    stopped and reloaded. docs/contract.md has their fields.";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_help_names_each_event_of_the_contract() {
        let contract = include_str!("../../../../docs/contract.md");
        let (_, list) = contract.split_once("Events are `").unwrap();
        let (list, _) = list.split_once("`.").unwrap();
        let names: Vec<&str> = list.split('`').step_by(2).collect();
        assert!(names.len() >= 19, "{names:?}");
        for name in names {
            assert!(EXAMPLES.contains(name), "{name}");
        }
    }
}
