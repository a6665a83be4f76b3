//! The answers to calls about a provision of the configuration that pjwd refused. Such a provision is no job, so only
//! the status names it, in a warning.

use pjw_core::job::JobId;
use pjw_core::refusal::Refusal;
use pjw_ipc::call::ExplainJobReply;
use pjw_ipc::refused_provision::refused_provision_error;

use crate::view::status::PublishedStatus;

/// Returns the explanation of the refused provision `id`, which is no job and has no cores. `reasons` has the sentences
/// of [`refused_provision_reasons`](pjw_ipc::refused_provision::refused_provision_reasons).
pub(super) fn explain_refused_provision(id: &JobId, reasons: Vec<String>) -> ExplainJobReply {
    ExplainJobReply {
        job: id.to_string(),
        cpus: String::new(),
        grant_reasons: reasons,
        second_best: String::new(),
    }
}

/// Returns the text of `refusal` for the client. The refused command may name a provision of the configuration that
/// pjwd refused. If `status` has no job of this name, the text then has the reason for the refusal of the provision,
/// and the remedy.
pub(super) fn refusal_text(refusal: &Refusal, status: &PublishedStatus) -> String {
    let has_job = |id: &JobId| {
        let name = id.to_string();
        status.jobs.iter().any(|job| job.id == name)
    };
    let missing = match refusal {
        Refusal::NoSuchJob { job } => job,
        // The command makes a job, and names neither a number of cores nor CPUs.
        Refusal::NoCpuRequest { job } if !has_job(job) => job,
        _ => return refusal.to_string(),
    };
    refused_provision_error(&missing.to_string(), &status.warnings).unwrap_or_else(|| refusal.to_string())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use pjw_ipc::refused_provision::refused_provision_reasons;
    use pjw_ipc::wire;

    use super::*;

    fn warning(code: &str, job: &str) -> wire::Warning {
        wire::Warning {
            code: code.to_owned(),
            job: job.to_owned(),
            text: format!("{job} does not get its cores"),
            remedy: "change its table".to_owned(),
        }
    }

    #[test]
    fn only_a_refused_provision_of_this_name_has_reasons() {
        let warnings = [
            warning("provision", ""),
            warning("provision", "manual:svc"),
            warning("provision", "manual:other"),
            warning("short", "manual:web"),
        ]
        .map(Arc::new);
        let reasons = |id: &str| refused_provision_reasons(&format!("manual:{id}"), &warnings);
        assert_eq!(reasons("svc"), ["manual:svc does not get its cores", "to change that: change its table"]);
        assert!(reasons("web").is_empty() && reasons("none").is_empty());
    }

    #[test]
    fn a_refused_call_about_a_refused_provision_has_the_reason_and_the_remedy() {
        let status = PublishedStatus::from(wire::Status {
            jobs: vec![wire::Job { id: "manual:taken".to_owned(), ..wire::Job::default() }],
            warnings: vec![warning("provision", "manual:svc"), warning("provision", "manual:taken")],
            ..wire::Status::default()
        });
        let id = |name: &str| name.parse::<JobId>().unwrap();
        let text = |refusal: Refusal| refusal_text(&refusal, &status);
        let of_svc = "there is no job manual:svc, because pjwd refused the provision of this name in its \
                      configuration: manual:svc does not get its cores; to change that: change its table";
        assert_eq!(text(Refusal::NoSuchJob { job: id("svc") }), of_svc);
        assert_eq!(text(Refusal::NoCpuRequest { job: id("svc") }), of_svc);
        let unchanged = [
            Refusal::NoSuchJob { job: id("gone") },
            Refusal::NoCpuRequest { job: id("new") },
            // A job that has the name of the provision is the reason why pjwd refused it.
            Refusal::NoCpuRequest { job: id("taken") },
            Refusal::ProvisionOfAdmin { job: id("svc") },
        ];
        for refusal in unchanged {
            assert_eq!(text(refusal.clone()), refusal.to_string());
        }
    }
}
