//! The answer to `explain` about a provision of the configuration that pjwd refused. Such a provision is no job, so
//! only the status names it, in a warning.

use std::sync::Arc;

use pjw_core::job::JobId;
use pjw_ipc::call::ExplainJobReply;
use pjw_ipc::wire;

/// The code of the warning about a refused provision.
const CODE: &str = "provision";

/// Returns the sentences about the provision `id` of the configuration, if pjwd refused to give it the cores that the
/// configuration promises: the reason and the remedy. `warnings` are those of the status. Empty if `id` is not refused.
pub(super) fn refused_provision_reasons(id: &JobId, warnings: &[Arc<wire::Warning>]) -> Vec<String> {
    let name = id.to_string();
    let refusals = warnings.iter().filter(|warning| warning.code == CODE && warning.job == name);
    refusals
        .flat_map(|warning| [warning.text.clone(), format!("to change that: {}", warning.remedy)])
        .collect()
}

/// Returns the explanation of the refused provision `id`, which is no job and has no cores. `reasons` has the sentences
/// of [`refused_provision_reasons`].
pub(super) fn explain_refused_provision(id: &JobId, reasons: Vec<String>) -> ExplainJobReply {
    ExplainJobReply {
        job: id.to_string(),
        cpus: String::new(),
        grant_reasons: reasons,
        second_best: String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_refused_provision_of_this_name_has_reasons() {
        let warning = |code: &str, job: &str| {
            Arc::new(wire::Warning {
                code: code.to_owned(),
                job: job.to_owned(),
                text: format!("{job} does not get its cores"),
                remedy: "change its table".to_owned(),
            })
        };
        let warnings = [
            warning("provision", ""),
            warning("provision", "manual:svc"),
            warning("provision", "manual:other"),
            warning("short", "manual:web"),
        ];
        let reasons = |id: &str| refused_provision_reasons(&id.parse().unwrap(), &warnings);
        assert_eq!(reasons("svc"), ["manual:svc does not get its cores", "to change that: change its table"]);
        assert!(reasons("web").is_empty() && reasons("none").is_empty());
    }
}
