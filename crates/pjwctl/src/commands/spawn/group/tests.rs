//! Groups of instances that can't be watched, or whose start fails.

use std::fs::File;
use std::sync::Arc;

use pjw_spawn::{Arguments, Placement, SpawnContext, Stdio};

use super::*;

/// The processes with this command line.
fn processes(command: &str) -> usize {
    let is_it = |entry: &std::fs::DirEntry| {
        let text = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        text == command.as_bytes()
    };
    std::fs::read_dir("/proc").unwrap().flatten().filter(is_it).count()
}

#[test]
fn an_instance_whose_exit_status_another_has_taken_counts_as_ended_and_as_failed() {
    let instance = Instance {
        rank: 0,
        size: 1,
        arguments: Arc::new(Arguments::parse(&["true"]).unwrap()),
        variables: Vec::new(),
        placement: Arc::new(Placement::default()),
        stdio: Stdio::default(),
    };
    let program = Program { context: SpawnContext::new("true").unwrap(), instances: vec![instance] };
    let mut group = InstanceGroup::start(vec![program], LabelledPipes::default(), None).unwrap();
    while group.states[0].child.is_none() {
        group.collect_results(0).unwrap();
    }
    let pid = Pid::from_raw(group.states[0].pid.unwrap().cast_signed());
    nix::sys::wait::waitpid(pid, None).unwrap();
    group.wait_until_begun().unwrap();
    group.wait_until_ended().unwrap();
    assert_eq!((group.running, group.states[0].exit_code(None, None), group.failure_lines), (0, 1, 1));
}

#[test]
fn a_signal_after_the_start_is_not_the_reason_why_instances_were_not_started() {
    let (instances, _) = sleeping(1002, 1);
    let program = Program { context: SpawnContext::new("sleep").unwrap(), instances };
    let mut group = InstanceGroup::start(vec![program], LabelledPipes::default(), None).unwrap();
    // An instance whose start has no result, as after a cancelled start.
    group.states.push(InstanceState::default());
    let signal =
        |signal: Signal| ReceivedSignal { number: signal as i32, is_from_terminal: false, is_ending: true };
    group.forward_signal(signal(Signal::SIGINT));
    group.wait_until_begun().unwrap();
    group.forward_signal(signal(Signal::SIGTERM));
    group.wait_until_ended().unwrap();
    let message = group.not_started_message().unwrap();
    assert!(message.ends_with("not started after signal 2"), "{message}");
    assert_eq!(group.states[1].exit_code(group.start_cancelled_by, group.ending_signal), 130);
}

/// `sleep` for a time that no other process sleeps. Returns its instances, and the command line of each.
fn sleeping(seconds: u32, size: u32) -> (Vec<Instance>, String) {
    let time = format!("{seconds}.{}", std::process::id());
    let arguments = Arc::new(Arguments::parse(&["sleep", &time]).unwrap());
    let instance = |rank| Instance {
        rank,
        size,
        arguments: Arc::clone(&arguments),
        variables: Vec::new(),
        placement: Arc::new(Placement::default()),
        stdio: Stdio::default(),
    };
    ((0..size).map(instance).collect(), format!("sleep\0{time}\0"))
}

#[test]
fn instances_whose_results_were_not_read_are_killed_with_those_that_are_known() {
    let (instances, command) = sleeping(1001, 3);
    let program = Program { context: SpawnContext::new("sleep").unwrap(), instances };
    let mut group = InstanceGroup::start(vec![program], LabelledPipes::default(), None).unwrap();
    // No child can be watched.
    group.epoll = Epoll(File::open("/dev/null").unwrap().into());
    while group.collect_results(0).is_ok() {}
    group.abort();
    assert_eq!(processes(&command), 0);
}

#[test]
fn instances_are_killed_if_another_program_of_their_group_cannot_be_started() {
    let (instances, command) = sleeping(1000, 3);
    let program = |instances| Program { context: SpawnContext::new("sleep").unwrap(), instances };
    let programs = vec![program(instances), program(Vec::new())];
    let error = InstanceGroup::start(programs, LabelledPipes::default(), None).map(drop).unwrap_err();
    assert!(error.is::<StartFailure>(), "{error}");
    assert!(error.to_string().ends_with("the instances that had begun were killed"), "{error}");
    assert_eq!(processes(&command), 0);
    let error = InstanceGroup::start(vec![program(Vec::new())], LabelledPipes::default(), None)
        .map(drop)
        .unwrap_err();
    assert!(!error.is::<StartFailure>(), "nothing was started: {error}");
}
