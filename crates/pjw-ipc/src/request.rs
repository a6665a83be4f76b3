//! The requests of clients: their content, and the thread on which they are parsed.
//!
//! One thread serves all clients. Parsing a request of 64 KiB takes some milliseconds, and a user can send such a
//! request on each of many connections. So a large request is parsed on another thread.

use std::io;

use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::Semaphore;
use tokio::task::spawn_blocking;

use crate::call::{self, Call, CallError};

/// The largest size of a request that is parsed on the thread that serves all clients, in bytes. Larger requests are
/// rare: they name hundreds of processes.
const MAX_BYTES_PARSED_INLINE: usize = 4 * 1024;

/// The JSON object of a request.
#[derive(Deserialize)]
struct Message {
    method: String,
    #[serde(default)]
    parameters: Option<Value>,
    #[serde(default)]
    more: bool,
    #[serde(default)]
    oneway: bool,
}

/// A request of a client.
pub(crate) struct Request {
    /// The full name of the method.
    pub(crate) method: String,
    /// Whether the client expects a series of replies.
    pub(crate) more: bool,
    /// Whether the client expects no reply.
    pub(crate) oneway: bool,
    /// The call, or the error for the client.
    pub(crate) content: Result<Content, CallError>,
}

/// The call in a request.
pub(crate) enum Content {
    /// `GetInfo` of the interface `org.varlink.service`.
    Info,
    /// `GetInterfaceDescription` of the interface `org.varlink.service`.
    Description(DescriptionParameters),
    /// A call of our own interface.
    Own(Call),
}

/// The parameters of `GetInterfaceDescription`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct DescriptionParameters {
    pub(crate) interface: String,
}

impl Request {
    /// Parses the JSON text of a request. For an unknown method or a wrong parameter, the function does not fail:
    /// [`Request::content`] then has the error for the client.
    ///
    /// # Errors
    /// A syntax error if the bytes are not JSON. A data error if they are JSON, but not a call.
    fn parse(bytes: &[u8]) -> Result<Self, serde_json::Error> {
        let request: Value = serde_json::from_slice(bytes)?;
        // Serde would accept a list as an object without names.
        if !request.is_object() {
            return Err(serde::de::Error::custom("a call is a JSON object"));
        }
        let Message { method, parameters, more, oneway } = serde_json::from_value(request)?;
        let parameters = parameters.unwrap_or_else(|| json!({}));
        let content = match method.strip_prefix("org.varlink.service.") {
            Some("GetInfo") => call::check_no_parameters(&parameters).map(|()| Content::Info),
            Some("GetInterfaceDescription") => call::parse_parameters(&parameters).map(Content::Description),
            Some(_) => Err(CallError::MethodNotFound(method.clone())),
            None => Call::parse(&method, Some(parameters)).map(Content::Own),
        };
        Ok(Self { method, more, oneway, content })
    }
}

/// Parses the requests of all connections.
pub(crate) struct RequestParser {
    /// Has one permit: the large requests of users are parsed one after the other, so that they take one CPU at most.
    turn: Semaphore,
}

impl RequestParser {
    pub(crate) fn new() -> Self {
        Self { turn: Semaphore::new(1) }
    }

    /// Parses a request. A request of more than [`MAX_BYTES_PARSED_INLINE`] bytes is large: another thread parses
    /// it, while the server goes on with other clients. Large requests of users are parsed one after the other. A
    /// large request of an administrator (`is_administrator`) does not wait for the others.
    ///
    /// # Errors
    /// The outer error if the other thread has ended without a result. The inner error is a syntax error if the bytes
    /// are not JSON, and a data error if they are JSON, but not a call.
    pub(crate) async fn parse(
        &self,
        bytes: Box<[u8]>,
        is_administrator: bool,
    ) -> io::Result<Result<Request, serde_json::Error>> {
        if bytes.len() <= MAX_BYTES_PARSED_INLINE {
            return Ok(Request::parse(&bytes));
        }
        // The semaphore is never closed.
        let turn = if is_administrator { None } else { self.turn.acquire().await.ok() };
        let parsed = spawn_blocking(move || Request::parse(&bytes)).await;
        drop(turn);
        parsed.map_err(io::Error::other)
    }
}

#[cfg(test)]
mod tests {
    use std::future::ready;

    use super::*;

    /// A call of `GetStatus` of this size in bytes.
    fn request(size: usize) -> Box<[u8]> {
        let call = r#"{"method":"org.pjw.Warden.GetStatus"}"#;
        format!("{call}{}", " ".repeat(size - call.len())).into_bytes().into()
    }

    fn is_status(parsed: io::Result<Result<Request, serde_json::Error>>) -> bool {
        matches!(parsed.unwrap().unwrap().content, Ok(Content::Own(Call::GetStatus)))
    }

    #[test]
    fn while_large_requests_wait_small_ones_and_those_of_administrators_are_parsed() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let parser = RequestParser::new();
            let large = || request(MAX_BYTES_PARSED_INLINE + 1);
            let other_turn = parser.turn.acquire().await.unwrap();
            let waiting = parser.parse(large(), false);
            tokio::pin!(waiting);
            tokio::select! {
                biased;
                _ = &mut waiting => panic!("two large requests are parsed at once"),
                () = ready(()) => {}
            }
            assert!(is_status(parser.parse(request(MAX_BYTES_PARSED_INLINE), false).await));
            assert!(is_status(parser.parse(large(), true).await));
            drop(other_turn);
            assert!(is_status(waiting.await));
        });
    }
}
