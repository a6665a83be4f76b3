//! The files of `/proc`, parsed from texts and read for real processes.

use super::*;

const REST: &str = "S 7 8 9 0 -1 4194560 1 2 3 4 150 50 0 0 20 0 3 0 4711 1000 200 \
                    18446744073709551615 1 1 0 0 0 0 0 0 0 0 0 0 17 5 0 0 0 0 0 0 0 0 0 0 0 0 0\n";

#[test]
fn a_stat_line_is_read_from_its_last_parenthesis() {
    for comm in ["sh", "a b", "a) S 1 2", "(((", "x\n) R 0"] {
        let stat = parse_stat(format!("42 ({comm}) {REST}").as_bytes()).unwrap();
        assert_eq!(stat.comm, Comm::from(comm));
        assert_eq!(
            (stat.state, stat.parent, stat.process_group, stat.session),
            ('S', Pid(7), Pid(8), Pid(9))
        );
        assert_eq!((stat.run_ticks, stat.start, stat.last_cpu), (200, StartTime(4711), Pu(5)));
        assert!(!stat.is_kernel_thread);
    }
}

#[test]
fn a_truncated_or_malformed_stat_line_is_none() {
    let whole = format!("42 (sh) {REST}");
    for end in 0..whole.len() - 30 {
        assert_eq!(parse_stat(&whole.as_bytes()[..end]), None, "{end}");
    }
    for text in ["", ")(", "1 () ", "1 (a) S x x x"] {
        assert_eq!(parse_stat(text.as_bytes()), None, "{text}");
    }
}

#[test]
fn a_process_group_of_minus_one_is_zero() {
    let text = format!("2 (kthreadd) {}", REST.replace("7 8 9", "0 -1 0"));
    assert_eq!(parse_stat(text.as_bytes()).unwrap().process_group, Pid(0));
}

#[test]
fn only_wanted_variables_are_kept_and_the_first_of_a_name_counts() {
    let wanted = BTreeSet::from(["SLURM_JOB_ID", "LSB_MCPU_HOSTS"]);
    let text = b"HOME=/root\0SLURM_JOB_ID=1\0LSB_MCPU_HOSTS=vm 2 \0SLURM_JOB_ID=2\0junk\0\xff\xff=1\0";
    let found = parse_environ(text, &wanted);
    assert_eq!(found["SLURM_JOB_ID"], "1");
    assert_eq!(found["LSB_MCPU_HOSTS"], "vm 2 ");
    assert_eq!(found.len(), 2);
    let long = [b"SLURM_JOB_ID=".as_slice(), &[b'9'; 100_000]].concat();
    assert_eq!(parse_environ(&long, &wanted)["SLURM_JOB_ID"].len(), MAX_VALUE_BYTES);
}

#[test]
fn a_cgroup_path_may_contain_colons() {
    let ProcessCgroups { lines } = parse_cgroups(b"4:memory:/a:b\n1:name=systemd:/x\n0::/y\nnonsense\n");
    let lines: Vec<_> = lines.iter().map(|(c, p)| (c.as_str(), p.as_str())).collect();
    assert_eq!(lines, [("memory", "/a:b"), ("name=systemd", "/x"), ("", "/y")]);
}

#[test]
fn this_process_reads_as_the_procfs_crate_reads_it() {
    let mut proc = ProcDir::open(Path::new("/proc")).unwrap();
    let me = ::procfs::process::Process::myself().unwrap();
    let pid = Pid(std::process::id());
    let (ours, theirs) = (proc.stat(pid).unwrap(), me.stat().unwrap());
    assert_eq!(ours.start.0, theirs.starttime);
    assert_eq!(
        (ours.parent.0, ours.process_group.0),
        (theirs.ppid.cast_unsigned(), theirs.pgrp.cast_unsigned())
    );
    assert_eq!(ours.session.0, theirs.session.cast_unsigned());
    assert_eq!(ours.comm, Comm::from(theirs.comm.as_str()));
    let status = me.status().unwrap();
    let ours = proc.status(pid).unwrap();
    assert_eq!(ours.uid, status.ruid);
    assert_eq!(ours.groups.len(), status.groups.len());
    let path = me.environ().unwrap().get(std::ffi::OsStr::new("PATH")).cloned().unwrap();
    assert_eq!(proc.environ(pid, &BTreeSet::from(["PATH"])).unwrap()["PATH"], path.to_string_lossy());
    assert!(proc.pids().unwrap().contains(&pid));
    let tids = proc.tids(pid).unwrap();
    assert!(tids.contains(&Tid(pid.0)));
    assert!(proc.thread_stat(pid, Tid(pid.0)).is_ok());
}

#[test]
fn an_ended_process_gives_enoent() {
    let mut child = std::process::Command::new("true").spawn().unwrap();
    let pid = Pid(child.id());
    child.wait().unwrap();
    let mut proc = ProcDir::open(Path::new("/proc")).unwrap();
    assert_eq!(proc.stat(pid), Err(Errno::ENOENT));
    assert_eq!(proc.tids(pid), Err(Errno::ENOENT));
}
