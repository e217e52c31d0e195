//! Just enough of HTTP/1.1: heads, bodies with a Content-Length, and ways to break off.

use std::{
    collections::HashMap,
    io::{self, BufRead, Read, Write},
    net::TcpStream,
    sync::Arc,
    time::Duration,
};

/// Biggest head of a message, in bytes.
const HEAD_LIMIT: u64 = 64 << 10;

/// Header names, in lower case, and their values.
pub(crate) type Headers = HashMap<String, String>;

/// Reads the first line and the headers of a message; `None` at the end of the connection.
pub(crate) fn read_head(stream: &mut impl BufRead) -> io::Result<Option<(String, Headers)>> {
    let mut lines = Vec::new();
    let mut head = stream.take(HEAD_LIMIT);
    loop {
        let mut line = String::new();
        if head.read_line(&mut line)? == 0 {
            return Ok(None);
        }
        match line.trim_end() {
            "" => break,
            text => lines.push(text.to_owned()),
        }
    }
    let mut lines = lines.into_iter();
    let first = lines.next().ok_or_else(invalid)?;
    let header = |line: String| {
        let (name, value) = line.split_once(':')?;
        Some((name.to_ascii_lowercase(), value.trim().to_owned()))
    };
    let headers: Option<_> = lines.map(header).collect();
    Ok(Some((first, headers.ok_or_else(invalid)?)))
}

fn invalid() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "not HTTP/1.1")
}

/// A request without its body.
#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) method: String,
    pub(crate) target: String,
    pub(crate) headers: Headers,
}

impl Request {
    /// Reads the next head; `None` at the end of the connection.
    pub(crate) fn read(stream: &mut impl BufRead) -> io::Result<Option<Self>> {
        let Some((first, headers)) = read_head(stream)? else { return Ok(None) };
        let mut first = first.split(' ');
        let (Some(method), Some(target), Some("HTTP/1.1")) =
            (first.next(), first.next(), first.next())
        else {
            return Err(invalid());
        };
        Ok(Some(Request { method: method.to_owned(), target: target.to_owned(), headers }))
    }

    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(String::as_str)
    }

    /// Length of the body in bytes.
    pub(crate) fn length(&self) -> u64 {
        self.header("content-length").and_then(|text| text.parse().ok()).unwrap_or(0)
    }

    pub(crate) fn path(&self) -> &str {
        self.target.split('?').next().unwrap_or_default()
    }

    /// All values of a query parameter.
    pub(crate) fn query(&self, name: &str) -> Vec<String> {
        let query = self.target.split_once('?').map_or("", |(_, query)| query);
        parameters(query, name)
    }
}

/// All values of `name` in a query or a form.
pub(crate) fn parameters(query: &str, name: &str) -> Vec<String> {
    let pairs = query.split('&').filter_map(|pair| pair.split_once('='));
    pairs.filter(|(key, _)| *key == name).map(|(_, value)| decode(value)).collect()
}

fn decode(text: &str) -> String {
    let mut bytes = text.bytes();
    let mut decoded = Vec::new();
    while let Some(byte) = bytes.next() {
        decoded.push(match byte {
            b'+' => b' ',
            b'%' => {
                let hex: Vec<u8> = bytes.by_ref().take(2).collect();
                let hex = String::from_utf8_lossy(&hex).into_owned();
                u8::from_str_radix(&hex, 16).unwrap_or(b'?')
            }
            other => other,
        });
    }
    String::from_utf8_lossy(&decoded).into_owned()
}

/// An answer.
#[derive(Debug, Default)]
pub(crate) struct Response {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(&'static str, String)>,
    pub(crate) body: Body,
    /// Only the head is sent, with the body's length.
    pub(crate) head_only: bool,
}

/// The body of an answer: a part of a blob, which is not copied.
#[derive(Debug, Default)]
pub(crate) struct Body {
    pub(crate) content: Arc<Vec<u8>>,
    pub(crate) start: usize,
    pub(crate) end: usize,
}

impl Body {
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.content[self.start..self.end]
    }
}

impl From<Vec<u8>> for Body {
    fn from(content: Vec<u8>) -> Self {
        Arc::new(content).into()
    }
}

impl From<Arc<Vec<u8>>> for Body {
    fn from(content: Arc<Vec<u8>>) -> Self {
        let end = content.len();
        Body { content, start: 0, end }
    }
}

impl Response {
    pub(crate) fn new(status: u16) -> Self {
        Response { status, ..Response::default() }
    }

    /// An error as registries spell it.
    pub(crate) fn error(status: u16, code: &str) -> Self {
        let body =
            format!(r#"{{"errors":[{{"code":"{code}","message":"said the fake registry"}}]}}"#);
        Response::new(status).with("content-type", "application/json").body(body.into_bytes())
    }

    pub(crate) fn with(mut self, name: &'static str, value: impl ToString) -> Self {
        self.headers.push((name, value.to_string()));
        self
    }

    pub(crate) fn body(mut self, body: impl Into<Body>) -> Self {
        self.body = body.into();
        self
    }

    /// Sends the answer, or the first `limit` bytes of its body. Returns the bytes of body sent.
    pub(crate) fn write(&self, stream: &mut TcpStream, limit: Option<u64>) -> io::Result<u64> {
        let body = self.body.bytes();
        self.write_head(stream, body.len())?;
        if self.head_only {
            return Ok(0);
        }
        let shown = limit.map_or(body.len(), |limit| body.len().min(limit as usize));
        stream.write_all(&body[..shown])?;
        Ok(shown as u64)
    }

    /// Sends everything but the body, which will have `length` bytes.
    pub(crate) fn write_head(&self, stream: &mut TcpStream, length: usize) -> io::Result<()> {
        let mut head = format!("HTTP/1.1 {} -\r\n", self.status);
        for (name, value) in &self.headers {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        // 204 must not have one.
        if self.status != 204 {
            head.push_str(&format!("content-length: {length}\r\n"));
        }
        head.push_str("\r\n");
        stream.write_all(head.as_bytes())
    }
}

/// Resets the connection, so that the other end sees "connection reset by peer". The pause lets it
/// read data sent before, which a reset discards.
pub(crate) fn reset(stream: &TcpStream) {
    std::thread::sleep(Duration::from_millis(20));
    let _ = rustix::net::sockopt::set_socket_linger(stream, Some(Duration::ZERO));
}
