//! Sentences about a provision of the configuration that pjwd refused. Such a provision is no job, so only the status
//! names it, in a warning.

use std::borrow::Borrow;

use crate::wire::Warning;

/// The code of the warning about a refused provision.
const CODE: &str = "provision";

/// Returns sentences for the user with the reason why pjwd refused the provision `id`, and with the remedy. A provision
/// is a section of the configuration that lets pjwd keep cores for a service. `warnings` must be the warnings in the
/// status of pjwd, which name the refused provisions. The result is empty if pjwd did not refuse the provision.
#[must_use]
pub fn refused_provision_reasons(id: &str, warnings: &[impl Borrow<Warning>]) -> Vec<String> {
    let refusals =
        warnings.iter().map(Borrow::borrow).filter(|warning| warning.code == CODE && warning.job == id);
    refusals
        .flat_map(|warning| [warning.text.clone(), format!("to change that: {}", warning.remedy)])
        .collect()
}

/// Returns the error text for the job `id`, which does not exist because pjwd refused the provision with the same id. A
/// provision is a section of the configuration that lets pjwd keep cores for a service. The text contains the reason
/// and the remedy. `warnings` must be the warnings in the status of pjwd, which name the refused provisions. `None` if
/// pjwd did not refuse such a provision.
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
