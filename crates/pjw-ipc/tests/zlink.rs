//! A client of zlink, which does not know pjw: a typed reply and a typed error.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // a test may fail
#![allow(missing_docs)]

use std::rc::Rc;
use std::sync::Arc;

use pjw_ipc::bind::bind;
use pjw_ipc::call::{Call, CallError, Reply};
use pjw_ipc::server::{Peer, Replies, ServerLimits, Service, serve};
use pjw_ipc::wire;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

/// A service with a fixed reply to `GetStatus` and an error for each other call.
struct FixedService;

impl Service for FixedService {
    async fn call(&self, _peer: Peer, call: Call, _more: bool) -> Result<Replies, CallError> {
        match call {
            Call::GetStatus => {
                let status = wire::Status {
                    schema: wire::SCHEMA_VERSION,
                    mode: "enforce".to_owned(),
                    ..Default::default()
                };
                Ok(Replies::Single(Box::new(Reply::Status { status: Arc::new(status) })))
            }
            Call::Release(request) => Err(CallError::Refused(format!("there is no job {}", request.job))),
            other => Err(CallError::Refused(format!("not for this test: {other:?}"))),
        }
    }
}

#[zlink::proxy("org.pjw.Warden")]
trait Warden {
    async fn get_status(&mut self) -> zlink::Result<Result<Status, Failure>>;
    async fn release(&mut self, job: &str) -> zlink::Result<Result<Released, Failure>>;
}

#[derive(Debug, Serialize, Deserialize)]
struct Status {
    status: wire::Status,
}

#[derive(Debug, Serialize, Deserialize)]
struct Released {
    released: Vec<String>,
}

#[derive(Debug, PartialEq, zlink::ReplyError)]
#[zlink(interface = "org.pjw.Warden")]
enum Failure {
    Refused { message: String },
}

#[test]
fn zlink_parses_a_reply_and_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let owned = bind(&path).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    tokio::task::LocalSet::new().block_on(&runtime, async {
        let (stop, stopped) = watch::channel(false);
        let serving =
            serve(owned.dup_listener().unwrap(), Rc::new(FixedService), ServerLimits::default(), stopped);
        let serving = tokio::task::spawn_local(serving);
        let mut connection = zlink::tokio::unix::connect(&path).await.unwrap();
        let status = connection.get_status().await.unwrap().unwrap().status;
        assert_eq!((status.schema, status.mode.as_str()), (wire::SCHEMA_VERSION, "enforce"));
        let refused = connection.release("manual:a").await.unwrap().unwrap_err();
        assert_eq!(refused, Failure::Refused { message: "there is no job manual:a".to_owned() });
        stop.send(true).unwrap();
        serving.await.unwrap().unwrap();
    });
}
