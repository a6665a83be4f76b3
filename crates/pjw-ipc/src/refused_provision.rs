//! Sentences about a provision of the configuration that pjwd refused. Such a provision is no job, so only the status
//! names it, in a warning.

use std::borrow::Borrow;

use crate::wire::Warning;

/// The code of the warning about a refused provision.
const CODE: &str = "provision";

/// Returns the sentences about the provision `id` of the configuration, if pjwd refused to give it the cores that the
/// configuration promises: the reason and the remedy. `warnings` are those of the status. Empty if `id` is not refused.
#[must_use]
pub fn refused_provision_reasons(id: &str, warnings: &[impl Borrow<Warning>]) -> Vec<String> {
    let refusals =
        warnings.iter().map(Borrow::borrow).filter(|warning| warning.code == CODE && warning.job == id);
    refusals
        .flat_map(|warning| [warning.text.clone(), format!("to change that: {}", warning.remedy)])
        .collect()
}

/// Returns the error text for the job `id`, which does not exist because pjwd refused the provision of this name in its
/// configuration. The text has the reason and the remedy. `warnings` are those of the status. `None` if `id` is not
/// refused.
#[must_use]
pub fn refused_provision_error(id: &str, warnings: &[impl Borrow<Warning>]) -> Option<String> {
    let reasons = refused_provision_reasons(id, warnings);
    (!reasons.is_empty()).then(|| {
        format!(
            "there is no job {id}, because pjwd refused the provision of this name in its configuration: {}",
            reasons.join("; ")
        )
    })
}
