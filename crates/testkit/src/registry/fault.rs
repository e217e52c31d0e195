//! Faults to inject.

use std::time::Duration;

/// A failure of one request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Another status, without doing anything.
    Status(u16),
    /// An error with another code, without doing anything.
    Coded(u16, &'static str),
    /// This status, and the seconds of Retry-After.
    Busy(u16, u64),
    /// The connection is reset after this many bytes of the body: the request's if it has one (they
    /// are kept), else the answer's.
    ResetAfter(u64),
    /// The connection is closed after this many bytes of the answer's body.
    TruncateAfter(u64),
    /// The whole blob with status 200, whatever range was asked for.
    IgnoreRange,
    /// The right bytes under a Content-Range that is off by one.
    WrongContentRange,
    /// Each byte of the answer's body inverted.
    WrongBytes,
    /// Another body under the right head.
    Instead(Vec<u8>),
    /// The right answer, but for this header; its name is in lower case.
    Header(&'static str, String),
    /// The right answer, with this pause before each byte of its body.
    Drip(Duration),
    /// Everything is done, but the connection is closed instead of an answer.
    LoseAnswer,
    /// Nothing happens for this long, then the connection is closed.
    Hang(Duration),
    /// The right answer, this much later.
    Latency(Duration),
}

/// A fault and the requests it is meant for.
#[derive(Clone, Debug)]
pub(super) struct Armed {
    pub(super) method: String,
    pub(super) path: String,
    pub(super) times: usize,
    pub(super) fault: Fault,
}

/// The fault for a request, used up once.
pub(super) fn take(armed: &mut [Armed], method: &str, path: &str) -> Option<Fault> {
    let meant = |armed: &&mut Armed| {
        armed.times > 0
            && (armed.method.is_empty() || armed.method == method)
            && path.contains(&armed.path)
    };
    let found = armed.iter_mut().find(meant)?;
    found.times -= 1;
    Some(found.fault.clone())
}
