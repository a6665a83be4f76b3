//! `plan`: the actions of the next cycle, the skipped actions, and the reasons.

use pjw_ipc::call::PlanReply;
use pjw_ipc::wire::{Abstained, Action};

use super::text::{cpus_phrase, escape_control_characters, remedy_lines, wrap_text};
use super::{Terminal, style};

/// Returns the text of `pjwctl plan`: the changes of affinity masks and cpusets that the daemon would make now. The
/// text also lists the warnings of the daemon. Most warnings name a change that is needed, and the reason why the
/// daemon would not make this change.
#[must_use]
pub fn plan_text(plan: &PlanReply, term: Terminal) -> String {
    let mut parts = vec![if plan.actions.is_empty() {
        "nothing to change\n".to_owned()
    } else {
        plan.actions.iter().map(|action| action_text(action, term)).collect()
    }];
    if !plan.warnings.is_empty() {
        let heading = style::apply_style("left as it is", style::HEADING, term);
        let lines = plan.warnings.iter().map(|abstained| abstained_text(abstained, term));
        parts.push(heading + "\n" + &lines.collect::<String>());
    }
    parts.join("\n")
}

fn action_text(action: &Action, term: Terminal) -> String {
    let job = if action.job.is_empty() { String::new() } else { format!("{}: ", action.job) };
    let change = escape_control_characters(&format!("{job}{}", change_text(action)));
    wrap_text(&change, term.width, "", "  ") + &wrap_text(&action.why, term.width, "    ", "    ")
}

/// Returns a sentence about the planned change `action`, of a cpuset or of an affinity mask. A daemon of a later
/// version may have a kind of change that this program does not know: the sentence then has the name of the kind.
fn change_text(action: &Action) -> String {
    let Action { pid, from, to, .. } = action;
    match action.action.as_str() {
        "raise" => format!("create the cpuset {from} with {}, or change it", cpus_phrase(to, usize::MAX)),
        "admit" => format!("move process {pid} from cgroup {from} to the cpuset {to}"),
        "return" => format!("move process {pid} from the cpuset {from} back to cgroup {to}"),
        "open" => format!("remove the limits of the cpuset {from}"),
        "raze" => format!("remove the cpuset {from}"),
        kind => mask_change_text(kind, action),
    }
}

/// Returns a sentence about a planned change of a thread's affinity mask. `kind` is the kind of the change in the
/// protocol, such as `confine`.
fn mask_change_text(kind: &str, action: &Action) -> String {
    let thread = format!("thread {} of process {}", action.tid, action.pid);
    let (from, to) = (cpus_phrase(&action.from, usize::MAX), cpus_phrase(&action.to, usize::MAX));
    match kind {
        "confine" => format!("restrict {thread} from {from} to {to}"),
        "repair" => format!("restrict {thread} again, from {from} to {to}"),
        "pin" => format!("pin {thread} to {to}; it may use {from} now"),
        "float" => format!("let {thread} use {to}; it is pinned to {from} now"),
        "unbind" => format!("move {thread} from {from}, to which its program bound it, to {to}"),
        "override" => format!("lift the binding of {thread} to {from}: it may use {to} then"),
        "rebind" => format!("bind {thread} to {to} again; it may use {from} now"),
        "keep-off" => format!("keep {thread} off the cores of jobs: from {from} to {to}"),
        "restore" => format!("give {thread} its own mask back: from {from} to {to}"),
        kind => format!("{kind} {thread}: {from} → {to}"),
    }
}

fn abstained_text(abstained: &Abstained, term: Terminal) -> String {
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
        manual:a: restrict thread 101 of process 100 from CPUs 0-15 to CPUs 2-3
            the thread is allowed outside its job's cores

        left as it is
        - slurm:7: the number of its cores is unknown
          → pjwctl assign slurm:7 --cores N
        - process 9: belongs to no job
        ");
    }

    /// The line about a change from `from` to `to`, without the reason.
    fn line(kind: &str, (pid, tid): (u32, u32), from: &str, to: &str) -> String {
        let (job, why) = ("manual:a".into(), "because".into());
        let action = Action { action: kind.into(), job, pid, tid, from: from.into(), to: to.into(), why };
        let wide = Terminal { width: 400, has_colours: false };
        let text = plan_text(&PlanReply { actions: vec![action], warnings: vec![] }, wide);
        let (line, why) = text.split_once("\n    ").unwrap();
        assert_eq!(why, "because\n");
        line.to_owned()
    }

    #[test]
    fn each_change_of_a_mask_is_a_sentence_with_the_thread_and_its_cpus() {
        for (kind, from, to, expected) in [
            ("repair", "0-7", "2-3", "restrict thread 101 of process 100 again, from CPUs 0-7 to CPUs 2-3"),
            ("pin", "2-3", "2", "pin thread 101 of process 100 to CPU 2; it may use CPUs 2-3 now"),
            ("float", "2", "2-3", "let thread 101 of process 100 use CPUs 2-3; it is pinned to CPU 2 now"),
            (
                "override",
                "2",
                "2-3",
                "lift the binding of thread 101 of process 100 to CPU 2: it may use CPUs 2-3 then",
            ),
            ("rebind", "3", "2", "bind thread 101 of process 100 to CPU 2 again; it may use CPU 3 now"),
            (
                "restore",
                "2-3",
                "0-7",
                "give thread 101 of process 100 its own mask back: from CPUs 2-3 to CPUs 0-7",
            ),
            ("new-kind", "2", "3", "new-kind thread 101 of process 100: CPU 2 → CPU 3"),
        ] {
            assert_eq!(line(kind, (100, 101), from, to), format!("manual:a: {expected}"));
        }
    }

    #[test]
    fn each_change_of_a_cpuset_is_a_sentence_with_its_cgroup_and_has_no_thread() {
        let moved = (100, 100);
        for (kind, (pid, tid), from, to, expected) in [
            ("raise", (0, 0), "/pjw/a", "2-3", "create the cpuset /pjw/a with CPUs 2-3, or change it"),
            ("admit", moved, "/user", "/pjw/a", "move process 100 from cgroup /user to the cpuset /pjw/a"),
            (
                "return",
                moved,
                "/pjw/a",
                "/user",
                "move process 100 from the cpuset /pjw/a back to cgroup /user",
            ),
            ("open", (0, 0), "/pjw/a", "", "remove the limits of the cpuset /pjw/a"),
            ("raze", (0, 0), "/pjw/a", "", "remove the cpuset /pjw/a"),
        ] {
            assert_eq!(line(kind, (pid, tid), from, to), format!("manual:a: {expected}"));
        }
    }
}
