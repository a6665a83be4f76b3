//! `plan`: the actions of the next cycle, the skipped actions, and the reasons.

use pjw_ipc::call::PlanReply;
use pjw_ipc::wire::{Abstained, Action};

use super::text::{cpus_phrase, escape_control_characters, remedy_lines, wrap_text};
use super::{Terminal, style};

/// Returns the text of `pjwctl plan`: the changes of affinity masks and cpusets that the daemon would make next. The
/// text also lists the changes that are needed but that the daemon would not make, and why.
#[must_use]
pub fn plan_text(plan: &PlanReply, term: Terminal) -> String {
    let mut parts = vec![if plan.actions.is_empty() {
        "nothing to change\n".to_owned()
    } else {
        plan.actions.iter().map(|action| self::action(action, term)).collect()
    }];
    if !plan.warnings.is_empty() {
        let heading = style::apply_style("left as it is", style::HEADING, term);
        let lines = plan.warnings.iter().map(|abstained| self::abstained(abstained, term));
        parts.push(heading + "\n" + &lines.collect::<String>());
    }
    parts.join("\n")
}

fn action(action: &Action, term: Terminal) -> String {
    let what = format!(
        "{} {} thread {} of {}: {} → {}",
        escape_control_characters(&action.job),
        escape_control_characters(&action.action),
        action.tid,
        action.pid,
        cpus_phrase(&action.from, usize::MAX),
        cpus_phrase(&action.to, usize::MAX)
    );
    wrap_text(&what, term.width, "", "  ") + &wrap_text(&action.why, term.width, "    ", "    ")
}

fn abstained(abstained: &Abstained, term: Terminal) -> String {
    let mut who = abstained.job.clone();
    if let Some(pid) = abstained.pid {
        who += &format!(" process {pid}");
    }
    let lead = if who.is_empty() { String::new() } else { format!("{}: ", who.trim_start()) };
    let why = wrap_text(&format!("{lead}{}", abstained.why), term.width, "- ", "  ");
    why + &remedy_lines(&abstained.remedy, term.width)
}

#[cfg(test)]
mod tests {
    use insta::assert_snapshot;

    use super::super::samples;
    use super::*;

    #[test]
    fn an_empty_plan_has_a_message() {
        assert_eq!(
            plan_text(&PlanReply { actions: vec![], warnings: vec![] }, samples::PLAIN_TERMINAL),
            "nothing to change\n"
        );
    }

    #[test]
    fn actions_and_skipped_actions_are_shown_with_their_reasons() {
        let actions = vec![Action {
            action: "confine".into(),
            job: "manual:a".into(),
            pid: 100,
            tid: 101,
            from: "0-15".into(),
            to: "2-3".into(),
            why: "the thread is allowed outside its job's cores".into(),
        }];
        let warnings = vec![
            Abstained {
                code: "unknown-count".into(),
                job: "slurm:7".into(),
                pid: None,
                why: "the number of its cores is unknown".into(),
                remedy: "pjwctl assign slurm:7 --cores N".into(),
            },
            Abstained {
                code: "stray".into(),
                pid: Some(9),
                why: "belongs to no job".into(),
                ..Abstained::default()
            },
        ];
        assert_snapshot!(plan_text(&PlanReply { actions, warnings }, samples::PLAIN_TERMINAL), @r"
        manual:a confine thread 101 of 100: CPUs 0-15 → CPUs 2-3
            the thread is allowed outside its job's cores

        left as it is
        - slurm:7: the number of its cores is unknown
          → pjwctl assign slurm:7 --cores N
        - process 9: belongs to no job
        ");
    }
}
