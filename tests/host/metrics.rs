//! Metrics of the real daemon: they are in every output that the configuration names, as long as it names it, and
//! delay no other client.

use std::fs;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::sys::signal::Signal;
use pjw_tests::daemon::Daemon;
use pjw_tests::waiting::{wait_for, wait_until};

use crate::processes::{Shell, has_two_cores};

/// Returns a free address. If another program takes the address before the daemon does, the daemon tries again.
pub fn free_address() -> SocketAddr {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap()
}

/// Sends a request and returns the response. `None` if no server listens, or the connection fails.
fn send_request(address: SocketAddr, request: &str) -> Option<String> {
    let mut stream = TcpStream::connect(address).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    stream.write_all(request.as_bytes()).ok()?;
    let mut text = String::new();
    stream.read_to_string(&mut text).ok()?;
    Some(text)
}

/// Returns the text of the metrics, by HTTP. `None` if no daemon answers.
pub fn scrape(address: SocketAddr) -> Option<String> {
    let response = send_request(address, "GET /metrics HTTP/1.1\r\nHost: here\r\n\r\n")?;
    let body = response.strip_prefix("HTTP/1.1 200 OK\r\n")?.split_once("\r\n\r\n")?.1;
    Some(body.to_owned())
}

/// Returns the value of a sample. `None` if the text does not have the sample.
pub fn sample_value(text: &str, sample: &str) -> Option<f64> {
    text.lines().find_map(|line| line.strip_prefix(sample)?.strip_prefix(' ')?.parse().ok())
}

fn textfile_path(daemon: &Daemon) -> PathBuf {
    daemon.dir().join("pjw.prom")
}

fn file_config(path: &Path, more: &str) -> String {
    format!("interval = \"50ms\"\n[metrics]\ninterval = \"1s\"\ntextfile = {path:?}\n{more}")
}

#[test]
fn a_job_is_in_both_outputs_and_the_number_of_job_names_is_bounded() {
    if !has_two_cores() {
        return;
    }
    let address = free_address();
    let mut daemon = Daemon::start("");
    let file = textfile_path(&daemon);
    daemon.configure(&file_config(&file, &format!("listen = [\"{}\"]\nmax_jobs = 1\n", address.port())));
    daemon.signal(Signal::SIGHUP);
    let shell = Shell::start();
    daemon.assign("a", 1, &[shell.pid()]).unwrap();
    let cores = format!("pjw_job_cores{{jobid=\"{}\"}}", daemon.job_id("a"));
    // The reload switches the counters on, and causes a full cycle. The first answers can be earlier than this cycle.
    let by_http = wait_for("the metrics by HTTP have the job and a full cycle", || {
        scrape(address).filter(|text| {
            text.contains(&cores) && sample_value(text, "pjw_cycles_total{cause=\"full\"}") >= Some(1.0)
        })
    });
    assert_eq!(sample_value(&by_http, &cores), Some(1.0));
    assert!(sample_value(&by_http, "pjw_process_resident_memory_bytes").unwrap() > 0.0);
    let all_pus: f64 = ["free", "allocated", "housekeeping", "offline"]
        .iter()
        .map(|by| sample_value(&by_http, &format!("pjw_pool_pus{{use=\"{by}\"}}")).unwrap())
        .sum();
    assert!(all_pus >= 2.0, "{by_http}");

    wait_until("the file has the job", || fs::read_to_string(&file).is_ok_and(|text| text.contains(&cores)));
    assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o7777, 0o644);

    daemon.assign("b", 1, &[]).unwrap();
    let folded = wait_for("one job is folded", || {
        scrape(address).filter(|text| sample_value(text, "pjw_jobs_folded") == Some(1.0))
    });
    assert_eq!(sample_value(&folded, "pjw_job_cores{jobid=\"other\"}"), Some(1.0));
    assert_eq!(sample_value(&folded, &cores), Some(1.0), "the older job has samples of its own");
    daemon.stop();
    assert!(!file.exists(), "a clean stop removes the file");
    assert!(scrape(address).is_none());
}

#[test]
fn the_wait_for_a_core_is_measured() {
    if !has_two_cores() {
        return;
    }
    let address = free_address();
    let daemon = Daemon::start(&format!("interval = \"100ms\"\n[metrics]\nlisten = [\"{address}\"]\n"));
    let mut shell = Shell::start();
    daemon.assign("a", 1, &[shell.pid()]).unwrap();
    let _spinning =
        [(); 2].map(|()| crate::processes::KillOnDrop(shell.background("sh -c 'while :; do :; done'")));
    let sample = |name: &str| format!("pjw_job_{name}{{jobid=\"{}\"}}", daemon.job_id("a"));
    // Two threads spin on one core with one or two PUs: the PUs on which they run and the PUs for which they wait add
    // up to their demand.
    wait_until("both are hot", || {
        scrape(address).is_some_and(|text| sample_value(&text, &sample("hot_threads")) == Some(2.0))
    });
    let text = wait_for("the run time is measured", || {
        scrape(address).filter(|text| sample_value(text, &sample("running_pus")).is_some_and(|pus| pus > 0.2))
    });
    let pus = sample_value(&text, &sample("pus")).unwrap();
    if pus < 2.0 {
        wait_until("the wait time is measured", || {
            scrape(address)
                .is_some_and(|text| sample_value(&text, &sample("waiting_pus")).is_some_and(|pus| pus > 0.2))
        });
    }
}

#[test]
fn a_reload_opens_and_closes_listeners_and_a_bad_configuration_changes_nothing() {
    // Both are in use at the same time, so that they differ.
    let listeners = [(); 2].map(|()| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap());
    let [first, second] = listeners.each_ref().map(|listener| listener.local_addr().unwrap());
    drop(listeners);
    let daemon = Daemon::start(&format!("[metrics]\nlisten = [\"{first}\"]\n"));
    wait_until("the daemon listens at the first address", || scrape(first).is_some());
    let reload = || daemon.call::<serde_json::Value>("Reload", &serde_json::json!({}));
    daemon.configure("[metrics]\nlisten = [\"localhost:80\"]\n");
    let refusal = reload().unwrap_err().to_string();
    assert!(refusal.contains("the old configuration stays in force"), "{refusal}");
    assert!(
        refusal.contains("pjwd.toml:2:11: metrics.listen: \"localhost:80\" is not an address"),
        "{refusal}"
    );
    wait_until("the log names the line and column", || {
        daemon.log().contains("pjwd.toml:2:11: metrics.listen: ")
    });
    assert!(scrape(first).is_some(), "the old configuration stays in force");
    let refused = |address| {
        let text = scrape(address)?;
        Some(sample_value(&text, "pjw_warnings{code=\"configuration\"}").is_some())
    };
    wait_until("the metrics have the warning", || refused(first) == Some(true));
    daemon.configure(&format!("[metrics]\nlisten = [\"{second}\"]\n"));
    reload().unwrap();
    wait_until("the daemon listens at the second address", || scrape(second).is_some());
    wait_until("the first address is closed", || TcpStream::connect(first).is_err());
    wait_until("the warning ends", || refused(second) == Some(false));
    daemon.configure("");
    reload().unwrap();
    wait_until("the second address is closed", || TcpStream::connect(second).is_err());
}

#[test]
fn an_address_in_use_does_not_prevent_the_start() {
    let taken = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = taken.local_addr().unwrap();
    let daemon = Daemon::start(&format!(
        "[metrics]\nlisten = [\"{address}\"]\ntextfile = \"/nowhere/at/all/x.prom\"\n"
    ));
    wait_until("the log has the remedies", || {
        let log = daemon.log();
        log.contains("set another in metrics.listen")
            && log.contains("can't be written to /nowhere/at/all/x.prom")
    });
    drop(taken);
    wait_until("the daemon listens after another attempt", || scrape(address).is_some());
}

/// Connects more clients than the daemon serves at a time. Each sends a part of a request.
fn slow_clients(address: SocketAddr) -> Vec<TcpStream> {
    let slow_client = |_| {
        let mut stream = TcpStream::connect(address).unwrap();
        // The daemon closes some connections before the request is written.
        let _ = stream.write_all(b"GET /metrics HTTP/1.1\r\nHo");
        stream
    };
    (0..40).map(slow_client).collect()
}

#[test]
fn many_slow_clients_delay_neither_the_event_loop_nor_the_control_socket() {
    let address = free_address();
    let daemon = Daemon::start(&format!("interval = \"50ms\"\n[metrics]\nlisten = [\"{address}\"]\n"));
    wait_until("the daemon listens", || scrape(address).is_some());
    let mut slow = slow_clients(address);
    let refused = wait_for("a connection beyond the limit is refused", || {
        let response = send_request(address, "GET /metrics HTTP/1.1\r\nHost: here\r\n\r\n")?;
        // On a busy machine, the daemon may have disconnected the slow clients for their time limit already.
        if response.starts_with("HTTP/1.1 200 ") {
            slow.extend(slow_clients(address));
        }
        Some(response).filter(|text| text.contains("503"))
    });
    assert!(refused.starts_with("HTTP/1.1 503 "), "{refused}");
    assert_eq!(daemon.status().mode, "enforce", "the control socket answers");
    daemon.assign("a", 1, &[]).unwrap();
    drop(slow);
    wait_until("a connection is accepted again", || scrape(address).is_some());
}

#[test]
fn a_killed_daemon_leaves_a_complete_file_which_the_next_daemon_replaces() {
    let mut daemon = Daemon::start("");
    let file = textfile_path(&daemon);
    daemon.configure(&file_config(&file, ""));
    daemon.signal(Signal::SIGHUP);
    wait_until("the file exists", || file.exists());
    let started = |text: &str| sample_value(text, "pjw_process_start_time_seconds");
    for _ in 0..3 {
        daemon.kill();
        let old = fs::read_to_string(&file).unwrap();
        assert!(old.starts_with("# HELP pjw_build_info ") && old.ends_with('\n'), "{old}");
        assert!(old.contains("\npjw_jobs_folded 0\n"));
        daemon.spawn();
        wait_until("the file is of the new daemon", || {
            fs::read_to_string(&file).is_ok_and(|text| started(&text) > started(&old))
        });
    }
    daemon.configure("");
    daemon.signal(Signal::SIGHUP);
    wait_until("the daemon removes the file", || !file.exists());
}
