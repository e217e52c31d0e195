//! The distribution API, and the storage behind it.

use std::{
    io::{self, BufReader, Read as _, Write as _},
    net::{IpAddr, Shutdown, TcpStream},
    sync::Arc,
    thread,
};

use lazuli_image::{Algorithm, Digest};
use serde_json::Value;

use super::{
    Logged, Login, Shared, State, StoredManifest, fault, fault::Fault, referrers, uploads::upload,
};
use crate::http::{self, Body, Request, Response};

/// Serves one connection until either side closes it.
pub(super) fn serve(shared: &Shared, mut stream: TcpStream, storage: bool) {
    let (Ok(clone), Ok(peer)) = (stream.try_clone(), stream.peer_addr()) else { return };
    let _ = stream.set_nodelay(true);
    let mut reader = BufReader::new(clone);
    while let Ok(Some(request)) = Request::read(&mut reader) {
        shared.lock().begin(&request, storage, peer.ip());
        let alive = exchange(shared, &request, &mut reader, &mut stream, storage);
        shared.lock().in_flight -= u64::from(!is_ping(&request));
        if !alive.unwrap_or(false) {
            break;
        }
    }
    let _ = stream.shutdown(Shutdown::Both);
}

/// Returns whether the request only opens a connection.
fn is_ping(request: &Request) -> bool {
    request.method == "GET" && request.path() == "/v2/"
}

/// Answers one request; whether the connection can go on.
fn exchange(
    shared: &Shared,
    request: &Request,
    reader: &mut BufReader<TcpStream>,
    stream: &mut TcpStream,
    storage: bool,
) -> io::Result<bool> {
    let (fault, latency) = {
        let mut state = shared.lock();
        let fault = (!is_ping(request))
            .then(|| fault::take(&mut state.faults, &request.method, request.path()));
        (fault.flatten(), state.latency)
    };
    thread::sleep(latency);
    let length = request.length();
    let kept = match &fault {
        Some(Fault::ResetAfter(limit)) if length > 0 => length.min(*limit),
        _ => length,
    };
    let mut body = vec![0; kept as usize];
    reader.read_exact(&mut body)?;
    match &fault {
        Some(Fault::Hang(duration)) => {
            thread::sleep(*duration);
            return Ok(false);
        }
        Some(Fault::Latency(duration)) => thread::sleep(*duration),
        Some(Fault::ResetAfter(_)) if length > 0 => {
            shared.lock().keep(request, &body);
            http::reset(stream);
            return Ok(false);
        }
        _ => {}
    }
    let mut response = match &fault {
        Some(Fault::Status(status)) => Response::error(*status, "FAULT"),
        Some(Fault::Coded(status, code)) => Response::error(*status, code),
        Some(Fault::Busy(status, seconds)) => {
            Response::error(*status, "TOOMANYREQUESTS").with("retry-after", seconds)
        }
        _ if storage => from_storage(&mut shared.lock(), request),
        _ => answer(shared, request, body),
    };
    // Also a refusal has no body then.
    response.head_only |= request.method == "HEAD";
    match &fault {
        Some(Fault::LoseAnswer) => return Ok(false),
        Some(Fault::IgnoreRange) if response.status == 206 => {
            response.status = 200;
            response.headers.retain(|(name, _)| *name != "content-range");
            response.body = response.body.content.into();
        }
        Some(Fault::WrongContentRange) => {
            for (name, value) in &mut response.headers {
                if *name == "content-range" {
                    *value = format!("bytes {}-{}/*", response.body.start + 1, response.body.end);
                }
            }
        }
        Some(Fault::WrongBytes) => {
            response.body =
                response.body.bytes().iter().map(|byte| !byte).collect::<Vec<_>>().into();
        }
        Some(Fault::Header(name, value)) => {
            response.headers.retain(|(known, _)| known != name);
            response.headers.push((*name, value.clone()));
        }
        Some(Fault::Instead(body)) if response.status < 300 => {
            response.body = body.clone().into();
        }
        _ => {}
    }
    if let Some(Fault::Drip(pause)) = fault {
        let body = std::mem::take(&mut response.body);
        let length = body.bytes().len();
        response.write_head(stream, length)?;
        for byte in body.bytes() {
            thread::sleep(pause);
            stream.write_all(&[*byte])?;
            shared.lock().stats.bytes += 1;
        }
        return Ok(true);
    }
    let limit = match fault {
        Some(Fault::ResetAfter(limit) | Fault::TruncateAfter(limit)) => Some(limit),
        _ => None,
    };
    shared.lock().stats.bytes += response.write(stream, limit)?;
    if matches!(fault, Some(Fault::ResetAfter(_))) {
        http::reset(stream);
    }
    Ok(limit.is_none())
}

impl State {
    fn begin(&mut self, request: &Request, storage: bool, peer: IpAddr) {
        if is_ping(request) {
            self.stats.pings += 1;
            return;
        }
        self.stats.requests += 1;
        *self.stats.by_path.entry(request.path().to_owned()).or_default() += 1;
        self.in_flight += 1;
        self.stats.max_concurrency = self.stats.max_concurrency.max(self.in_flight);
        self.log.push(Logged {
            method: request.method.clone(),
            target: request.target.clone(),
            range: request.header("range").map(str::to_owned),
            authorized: request.header("authorization").is_some(),
            storage,
            peer,
        });
    }

    pub(super) fn next(&mut self) -> u64 {
        self.counter += 1;
        self.counter
    }

    /// Refuses a request that no careful client sends.
    fn violation(&mut self, request: &Request, problem: &str) -> Response {
        self.violations.push(format!("{} {}: {problem}", request.method, request.target));
        Response::error(400, "VIOLATION")
    }

    /// Keeps the part of an upload that arrived before the connection broke.
    fn keep(&mut self, request: &Request, body: &[u8]) {
        let id = request.path().rsplit('/').next().and_then(|id| id.parse().ok());
        if let Some((_, content)) = id.and_then(|id: u64| self.uploads.get_mut(&id)) {
            content.extend_from_slice(body);
        }
    }
}

/// The storage behind a redirect, which checks signatures instead of logins.
fn from_storage(state: &mut State, request: &Request) -> Response {
    if request.header("authorization").is_some() {
        return state.violation(request, "credentials of the registry were sent to the storage");
    }
    let signature = request.query("signature").first().and_then(|text| text.parse().ok());
    if !signature.is_some_and(|signature: u64| state.signatures.contains(&signature)) {
        return Response::error(403, "EXPIRED");
    }
    match request.path().trim_start_matches('/').rsplit_once('/') {
        Some((repository, digest)) => blob(state, request, repository, digest),
        None => Response::error(404, "NOT_FOUND"),
    }
}

fn answer(shared: &Shared, request: &Request, body: Vec<u8>) -> Response {
    let mut state = shared.lock();
    if request.path() == "/token" {
        return state.token(request, &body);
    }
    let Some(path) = request.path().strip_prefix("/v2/") else {
        return Response::error(404, "NOT_FOUND");
    };
    let split = |kind: &str| path.split_once(kind).map(|(a, b)| (a.to_owned(), b.to_owned()));
    let found = ["/blobs/uploads/", "/blobs/", "/manifests/", "/referrers/", "/tags/"]
        .into_iter()
        .find_map(|k| Some((k, split(k)?)));
    let repository = found.as_ref().map_or("", |(_, (repository, _))| repository.as_str());
    let writes = matches!(found, Some(("/blobs/uploads/", _))) || request.method == "PUT";
    let action = match request.method.as_str() {
        "DELETE" if !writes => "delete",
        _ if writes => "push",
        _ => "pull",
    };
    let mut wanted = vec![(repository.to_owned(), action)];
    wanted.extend(request.query("from").into_iter().map(|from| (from, "pull")));
    if !wanted.iter().all(|(repository, action)| state.allows(request, repository, action)) {
        let scheme = match &state.login {
            Login::Basic(..) => r#"Basic realm="fake""#.to_owned(),
            _ => format!(r#"Bearer realm="http://{}/token",service="fake""#, shared.address()),
        };
        return Response::error(401, "UNAUTHORIZED").with("www-authenticate", scheme);
    }
    match found {
        Some(("/blobs/uploads/", (repository, id))) => {
            upload(&mut state, request, &repository, &id, body)
        }
        Some(("/blobs/", (repository, digest))) => {
            if state.redirect && request.method == "GET" {
                let signature = state.next();
                state.signatures.insert(signature);
                let storage = shared.storage();
                let url = format!("http://{storage}/{repository}/{digest}?signature={signature}");
                return Response::new(307).with("location", url);
            }
            blob(&mut state, request, &repository, &digest)
        }
        Some(("/referrers/", (repository, subject))) => {
            referrers::list(&state, request, &repository, &subject)
        }
        Some(("/tags/", (repository, _))) => tags(&state, request, &repository),
        Some((_, (repository, name))) => manifest(&mut state, request, &repository, &name, body),
        None => Response::new(200),
    }
}

fn blob(state: &mut State, request: &Request, repository: &str, digest: &str) -> Response {
    let head_only = request.method == "HEAD";
    let content = digest
        .parse()
        .ok()
        .and_then(|digest: Digest| state.blobs.get(&(repository.to_owned(), digest)).cloned());
    let Some(content) = content else {
        return Response { head_only, ..Response::error(404, "BLOB_UNKNOWN") };
    };
    let size = content.len();
    let Some(range) = request.header("range") else {
        return Response { head_only, ..Response::new(200).body(content) };
    };
    let parsed = range.strip_prefix("bytes=").and_then(|text| text.split_once('-'));
    let parsed =
        parsed.and_then(|(a, b)| Some((a.parse::<usize>().ok()?, b.parse::<usize>().ok()?)));
    let Some((first, last)) = parsed.filter(|(first, last)| first <= last) else {
        return state.violation(request, "the range is no pair of numbers");
    };
    if first >= size {
        return Response::error(416, "RANGE_INVALID")
            .with("content-range", format!("bytes */{size}"));
    }
    let end = size.min(last.saturating_add(1));
    let header = format!("bytes {first}-{}/{size}", end - 1);
    Response::new(206).with("content-range", header).body(Body { content, start: first, end })
}

/// Tags on a page, however many are asked for: some registries send fewer.
const PAGE: usize = 4;

fn tags(state: &State, request: &Request, repository: &str) -> Response {
    let names = state.manifests.keys().filter(|(owner, _)| owner == repository);
    let mut tags: Vec<_> = names.map(|(_, name)| name).filter(|name| !name.contains(':')).collect();
    if tags.is_empty() {
        return Response::error(404, "NAME_UNKNOWN");
    }
    tags.sort();
    let last = request.query("last");
    tags.retain(|tag| last.first().is_none_or(|last| *tag > last));
    let has_more = tags.len() > PAGE;
    tags.truncate(PAGE);
    let body = serde_json::json!({"name": repository, "tags": tags});
    let response = Response::new(200).body(body.to_string().into_bytes());
    match tags.last().filter(|_| has_more) {
        Some(last) => {
            let next = format!("</v2/{repository}/tags/list?n={PAGE}&last={last}>; rel=\"next\"");
            response.with("link", next)
        }
        None => response,
    }
}

fn manifest(
    state: &mut State,
    request: &Request,
    repository: &str,
    name: &str,
    body: Vec<u8>,
) -> Response {
    if request.method == "DELETE" {
        return referrers::delete(state, repository, name);
    }
    if request.method != "PUT" {
        let head_only = request.method == "HEAD";
        let response = match state.manifests.get(&(repository.to_owned(), name.to_owned())) {
            Some(StoredManifest { media_type, content }) => Response::new(200)
                .body(content.clone())
                .with("content-type", media_type)
                .with("docker-content-digest", Algorithm::Sha256.digest(content)),
            None => Response::error(404, "MANIFEST_UNKNOWN"),
        };
        return Response { head_only, ..response };
    }
    let Some(media_type) = request.header("content-type").map(str::to_owned) else {
        return state.violation(request, "a manifest without Content-Type");
    };
    let json: Value = serde_json::from_slice(&body).unwrap_or_default();
    let layers = json["layers"].as_array().into_iter().flatten();
    for descriptor in layers.chain(json.get("config")) {
        let digest = descriptor["digest"].as_str().and_then(|text| text.parse().ok());
        let known =
            digest.is_some_and(|d: Digest| state.blobs.contains_key(&(repository.to_owned(), d)));
        if !known {
            return Response::error(400, "MANIFEST_BLOB_UNKNOWN");
        }
    }
    if let Some(problem) = referrers::problem(state, repository, name, &json) {
        return state.violation(request, problem);
    }
    let subject = referrers::subject(state, &json);
    let digest = Algorithm::Sha256.digest(&body);
    let content = Arc::new(body);
    for name in [name.to_owned(), digest.to_string()] {
        state.manifests.insert(
            (repository.to_owned(), name),
            StoredManifest { media_type: media_type.clone(), content: content.clone() },
        );
    }
    let response = Response::new(201)
        .with("location", format!("/v2/{repository}/manifests/{digest}"))
        .with("docker-content-digest", digest);
    match subject {
        Some(subject) => response.with("oci-subject", subject),
        None => response,
    }
}
