//! The registry that a client named.

use std::{
    io::{self, BufReader, Read as _, Write as _},
    net::TcpStream,
    ops::Range,
};

use crate::http::{self, Headers};

/// Redirects that are followed for one request.
const REDIRECTS: usize = 4;

/// Why there is no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// A registry said so.
    Backend(u16),
    /// The daemon itself.
    Own(u16),
}

/// A blob at its registry, with the client's headers for it.
#[derive(Clone, Debug)]
pub(super) struct Origin {
    /// `http://127.0.0.1:5000/v2/app/blobs/sha256:…`.
    pub(super) url: String,
    pub(super) authorization: Option<String>,
}

/// An answer that was read to its end.
struct Answer {
    status: u16,
    headers: Headers,
    body: Vec<u8>,
}

impl Origin {
    /// Some bytes of the blob, and how many it has.
    pub(super) fn read(&self, range: Range<u64>) -> Result<(Vec<u8>, u64), Refusal> {
        let wanted = format!("bytes={}-{}", range.start, range.end - 1);
        let (mut url, mut authorization) = (self.url.clone(), self.authorization.as_deref());
        for _ in 0..=REDIRECTS {
            let answer = get(&url, &wanted, authorization).map_err(|_| Refusal::Own(500))?;
            match (answer.status, answer.headers.get("location")) {
                (206, _) => {
                    let total =
                        answer.headers.get("content-range").and_then(|it| it.rsplit('/').next());
                    let size = total.and_then(|it| it.parse().ok()).ok_or(Refusal::Own(500))?;
                    return Ok((answer.body, size));
                }
                (300..400, Some(location)) => (url, authorization) = (location.clone(), None),
                (status, _) => return Err(Refusal::Backend(status)),
            }
        }
        Err(Refusal::Own(500))
    }
}

fn get(url: &str, range: &str, authorization: Option<&str>) -> io::Result<Answer> {
    let invalid = || io::Error::new(io::ErrorKind::InvalidData, url.to_owned());
    let rest = url.strip_prefix("http://").ok_or_else(invalid)?;
    let (host, path) = rest.split_once('/').ok_or_else(invalid)?;
    let mut head =
        format!("GET /{path} HTTP/1.1\r\nhost: {host}\r\nrange: {range}\r\nconnection: close\r\n");
    if let Some(authorization) = authorization {
        head.push_str(&format!("authorization: {authorization}\r\n"));
    }
    let mut stream = TcpStream::connect(host)?;
    stream.write_all(format!("{head}\r\n").as_bytes())?;
    let mut reader = BufReader::new(stream);
    let (first, headers) = http::read_head(&mut reader)?.ok_or_else(invalid)?;
    let status = first.split(' ').nth(1).and_then(|text| text.parse().ok()).ok_or_else(invalid)?;
    let length = headers.get("content-length").and_then(|text| text.parse().ok());
    let mut body = vec![0; length.ok_or_else(invalid)?];
    reader.read_exact(&mut body)?;
    Ok(Answer { status, headers, body })
}
