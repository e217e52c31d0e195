//! The daemon's HTTP proxy.

use std::{
    io::BufReader,
    net::{Shutdown, TcpStream},
    ops::Range,
    thread,
};

use super::{
    Fault, Logged, Shared,
    origin::{Origin, Refusal},
    pool::Task,
};
use crate::http::{Request, Response};

pub(super) type Serve = fn(&Shared, TcpStream);

/// Serves one connection to the proxy until either side closes it.
pub(super) fn serve(daemon: &Shared, stream: TcpStream) {
    let Shared { pool, number, .. } = daemon;
    let wait = || pool.wait_out(*number, &[Fault::Hung, Fault::Stuck]);
    let about_to_send = |bytes| pool.change(*number, |peer| peer.stats.served += bytes);
    let answer = |request: &Request| {
        pool.change(*number, |peer| {
            peer.stats.requests += 1;
            peer.log.push(Logged {
                method: request.method.clone(),
                target: request.target.clone(),
                headers: request.headers.clone(),
            });
        });
        wait();
        let response = answer(daemon, request).unwrap_or_else(|refusal| {
            let (status, kind) = match refusal {
                Refusal::Backend(status) => (status, "backend"),
                Refusal::Own(status) => (status, "dfdaemon"),
            };
            Response::new(status).with("x-dragonfly-error-type", kind)
        });
        wait();
        response
    };
    converse(stream, answer, about_to_send);
}

/// Serves the health probe.
pub(super) fn serve_health(daemon: &Shared, stream: TcpStream) {
    let answer = |request: &Request| {
        daemon.pool.wait_out(daemon.number, &[Fault::Hung]);
        Response::new(if request.path() == "/healthy" { 200 } else { 404 })
    };
    converse(stream, answer, |_| {});
}

/// Answers requests; `about_to_send` is told of each body.
fn converse(
    mut stream: TcpStream,
    answer: impl Fn(&Request) -> Response,
    about_to_send: impl Fn(u64),
) {
    let Ok(clone) = stream.try_clone() else { return };
    let _ = stream.set_nodelay(true);
    let mut reader = BufReader::new(clone);
    while let Ok(Some(request)) = Request::read(&mut reader) {
        let response = answer(&request);
        if has_ended(&stream) {
            break;
        }
        about_to_send(response.body.bytes().len() as u64);
        // Requests have no body here; data behind one would not be a request.
        if response.write(&mut stream, None).is_err() || request.length() > 0 {
            break;
        }
    }
    let _ = stream.shutdown(Shutdown::Both);
}

/// Returns whether the client closed the connection before the answer.
fn has_ended(stream: &TcpStream) -> bool {
    let _ = stream.set_nonblocking(true);
    let ended = stream.peek(&mut [0]).is_ok_and(|bytes| bytes == 0);
    let _ = stream.set_nonblocking(false);
    ended
}

fn answer(daemon: &Shared, request: &Request) -> Result<Response, Refusal> {
    let blob = request.path().rsplit_once("/blobs/sha256:").map(|(_, hex)| hex);
    let Some(blob) = blob.filter(|_| request.method == "GET") else {
        return Err(Refusal::Own(501));
    };
    let upstream = request.header("x-dragonfly-registry").map(str::to_owned);
    let named = || Some(format!("http://{}", request.query("ns").first()?));
    let upstream = upstream.or_else(named).ok_or(Refusal::Own(500))?;
    let task = Task {
        pool: daemon.pool.clone(),
        number: daemon.number,
        blob: blob.to_owned(),
        origin: Origin {
            url: format!("{upstream}{}", request.target),
            authorization: request.header("authorization").map(str::to_owned),
        },
        shared: request.header("x-dragonfly-scheduling-policy") == Some("always"),
    };
    task.begin();
    let size = task.size()?;
    let range = match request.header("range") {
        Some(text) => Some(parse(text, size).ok_or(Refusal::Own(500))?),
        None => None,
    };
    if range.is_some() && request.header("x-dragonfly-prefetch") == Some("true") {
        let task = task.clone();
        thread::spawn(move || task.expect_whole());
    }
    let wanted = range.clone().unwrap_or(0..size);
    let bytes = task.read(wanted)?;
    let bytes = daemon.pool.change(daemon.number, |peer| peer.hand_out(bytes));
    let response = match range {
        Some(Range { start, end }) => {
            Response::new(206).with("content-range", format!("bytes {start}-{}/{size}", end - 1))
        }
        None => Response::new(200),
    };
    Ok(response.with("x-dragonfly-task-id", blob).body(bytes))
}

/// `bytes=5-9`, as far as a blob of `size` bytes has it.
pub(super) fn parse(text: &str, size: u64) -> Option<Range<u64>> {
    let (first, last) = text.strip_prefix("bytes=")?.split_once('-')?;
    let (first, last): (u64, u64) = (first.parse().ok()?, last.parse().ok()?);
    let end = size.min(last.checked_add(1)?);
    (first < end).then_some(first..end)
}
