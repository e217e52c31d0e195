//! `hosts.toml`, as containerd reads it.

use std::{path::Path, str, sync::Arc, time::Duration};

use reqwest::{
    Url,
    header::{HeaderMap, HeaderName, HeaderValue},
};
use toml::{Table, Value};

use super::{Configured, Settings, authorities, identity};
use crate::{
    error::HostsError,
    route::{api::api, mirror::MIRROR_LIMIT, server::Capabilities},
    transport::tls::Tls,
};

type Result<T> = std::result::Result<T, HostsError>;

/// Keys allowed in the table of a host, and in the file itself for the registry.
const KEYS: [&str; 7] =
    ["capabilities", "ca", "client", "skip_verify", "header", "override_path", "dial_timeout"];

/// Keys allowed only in the file itself.
const TOP: [&str; 2] = ["server", "host"];

/// Upper bound of `dial_timeout`: longer values are cut.
const DIAL_LIMIT: Duration = Duration::from_secs(300);

/// Parses the text of the file `path`. Also returns the keys that are ignored.
pub(super) fn parse(path: &Path, text: &[u8]) -> Result<(Configured, Vec<String>)> {
    let wrong = |problem: String| HostsError::new(path, problem);
    let text = str::from_utf8(text).map_err(|error| wrong(error.to_string()))?;
    let table: Table = text.parse().map_err(|error: toml::de::Error| {
        // Without the line itself, which may hold a password.
        let line = error.span().map_or(1, |span| 1 + text[..span.start].matches('\n').count());
        wrong(format!("line {line}: {}", error.message().replace('\n', ", ")))
    })?;
    let top = Scope { path, place: String::new(), table: &table };
    let mut unknown = top.unknown(&[&KEYS[..], &TOP[..]].concat());
    let mut hosts = Vec::new();
    for (url, value) in top.table_at("host")?.into_iter().flatten() {
        let place = format!("host.\"{url}\"");
        let table = value.as_table().ok_or_else(|| top.expected(&place, value, "a table"))?;
        let host = Scope { path, place: format!("{place}."), table };
        unknown.extend(host.unknown(&KEYS));
        let root = host.root(&place, url)?;
        hosts.push(host.settings()?.at(root));
    }
    if hosts.len() > MIRROR_LIMIT {
        let count = hosts.len();
        return Err(wrong(format!("{count} hosts are too many, expected at most {MIRROR_LIMIT}")));
    }
    let root = match top.string("server")?.filter(|server| !server.is_empty()) {
        Some(server) => Some(top.root("server", server)?),
        None => None,
    };
    let settings = top.settings()?;
    Ok((Configured { hosts, root, settings }, unknown))
}

/// A table, and where it is.
struct Scope<'a> {
    path: &'a Path,
    /// Prefix of the table's keys in messages.
    place: String,
    table: &'a Table,
}

impl<'a> Scope<'a> {
    fn wrong(&self, key: &str, problem: &str) -> HostsError {
        HostsError::new(self.path, format!("{}{key} {problem}", self.place))
    }

    fn expected(&self, key: &str, value: &Value, expected: &str) -> HostsError {
        // Not the value: it may be a password.
        self.wrong(key, &format!("is of type {}, expected {expected}", value.type_str()))
    }

    fn unknown(&self, known: &[&str]) -> Vec<String> {
        let unknown = self.table.keys().filter(|key| !known.contains(&key.as_str()));
        unknown.map(|key| format!("{}{key}", self.place)).collect()
    }

    fn string(&self, key: &str) -> Result<Option<&'a str>> {
        let text = |v: &'a Value| v.as_str().ok_or_else(|| self.expected(key, v, "a string"));
        self.table.get(key).map(text).transpose()
    }

    fn boolean(&self, key: &str) -> Result<Option<bool>> {
        let truth = |v: &Value| v.as_bool().ok_or_else(|| self.expected(key, v, "true or false"));
        self.table.get(key).map(truth).transpose()
    }

    fn table_at(&self, key: &str) -> Result<Option<&'a Table>> {
        let table = |v: &'a Value| v.as_table().ok_or_else(|| self.expected(key, v, "a table"));
        self.table.get(key).map(table).transpose()
    }

    /// A string, or a list of them.
    fn strings(&self, key: &str, value: &'a Value) -> Result<Vec<&'a str>> {
        let wanted = "a string or a list of strings";
        let text = |v: &'a Value| v.as_str().ok_or_else(|| self.expected(key, v, wanted));
        match value {
            Value::Array(values) => values.iter().map(text).collect(),
            value => Ok(vec![text(value)?]),
        }
    }

    fn settings(&self) -> Result<Settings> {
        Ok(Settings {
            may: self.capabilities()?,
            tls: Arc::new(self.tls()?),
            headers: self.headers()?,
            connect: self.dial_timeout()?,
        })
    }

    fn capabilities(&self) -> Result<Capabilities> {
        let key = "capabilities";
        let named = self.table.get(key).map(|value| self.strings(key, value)).transpose()?;
        let named = named.unwrap_or_default();
        if named.is_empty() {
            return Ok(Capabilities::ALL);
        }
        let mut may = Capabilities::NONE;
        for name in named {
            match name.to_ascii_lowercase().as_str() {
                "pull" => may.pull = true,
                "resolve" => may.resolve = true,
                "push" => may.push = true,
                "referrers" => may.referrers = true,
                _ => {
                    let problem =
                        format!("has `{name}`, expected pull, resolve, push or referrers");
                    return Err(self.wrong(key, &problem));
                }
            }
        }
        Ok(may)
    }

    fn tls(&self) -> Result<Tls> {
        let directory = self.path.parent().unwrap_or(Path::new("/"));
        let named = |key: &str, error: HostsError| {
            let problem =
                format!("{} ({}{key} in {})", error.problem, self.place, self.path.display());
            HostsError { problem, ..error }
        };
        let mut tls =
            Tls { skip_verify: self.boolean("skip_verify")?.unwrap_or_default(), ..Tls::default() };
        if let Some(value) = self.table.get("ca") {
            for file in self.strings("ca", value)? {
                let certificates = authorities(&directory.join(file));
                tls.authorities.extend(certificates.map_err(|error| named("ca", error))?);
            }
        }
        for (certificate, key) in self.clients()? {
            let key = Some(key).filter(|key| !key.is_empty()).map(|key| directory.join(key));
            let identity = identity(&directory.join(certificate), key);
            tls.identities.push(identity.map_err(|error| named("client", error))?);
        }
        Ok(tls)
    }

    /// Files with certificates, and with their keys; the latter is empty when both are in one file.
    fn clients(&self) -> Result<Vec<(&'a str, &'a str)>> {
        let Some(value) = self.table.get("client") else { return Ok(Vec::new()) };
        let wanted = "a file, or a list of files or of pairs [certificate, key]";
        let wrong = |value: &Value| self.expected("client", value, wanted);
        let pair = |value: &'a Value| match value {
            Value::String(file) => Ok((file.as_str(), "")),
            Value::Array(pair) => match &pair[..] {
                [Value::String(certificate), Value::String(key)] => {
                    Ok((certificate.as_str(), key.as_str()))
                }
                _ => Err(wrong(value)),
            },
            value => Err(wrong(value)),
        };
        match value {
            Value::Array(values) => values.iter().map(pair).collect(),
            value => Ok(vec![pair(value)?]),
        }
    }

    fn headers(&self) -> Result<HeaderMap> {
        let mut headers = HeaderMap::new();
        for (name, value) in self.table_at("header")?.into_iter().flatten() {
            let key = format!("header.{name}");
            let header = HeaderName::try_from(name.as_str())
                .map_err(|_| self.wrong(&key, "is no name of a header"))?;
            for text in self.strings(&key, value)? {
                let mut value = HeaderValue::try_from(text)
                    .map_err(|_| self.wrong(&key, "is no value of a header"))?;
                value.set_sensitive(true);
                headers.append(header.clone(), value);
            }
        }
        Ok(headers)
    }

    fn dial_timeout(&self) -> Result<Option<Duration>> {
        let Some(text) = self.string("dial_timeout")?.filter(|text| !text.is_empty()) else {
            return Ok(None);
        };
        match duration(text) {
            Some(Duration::ZERO) => Ok(None),
            Some(time) => Ok(Some(time.min(DIAL_LIMIT))),
            None => {
                let problem = format!("is `{text}`, expected a time as in 1s or 500ms");
                Err(self.wrong("dial_timeout", &problem))
            }
        }
    }

    /// Returns the root of the API of the server that `text`, the value of `key`, names.
    fn root(&self, key: &str, text: &str) -> Result<Url> {
        let address =
            if text.contains("://") { text.to_owned() } else { format!("https://{text}") };
        let wrong = |problem: &str| {
            HostsError::new(self.path, format!("{key} is {problem}, expected https://HOST[:PORT]"))
        };
        let mut url = Url::parse(&address).map_err(|error| wrong(&format!("no URL: {error}")))?;
        if !matches!(url.scheme(), "http" | "https") || url.host_str().is_none() {
            return Err(wrong("no address of a server"));
        }
        if !url.username().is_empty() || url.password().is_some() {
            return Err(wrong("an address with a login"));
        }
        // `docker.io`, as users call Docker Hub, has no API.
        if url.host_str() == Some("docker.io") {
            return api(url.scheme(), "docker.io").map_err(|error| wrong(&error));
        }
        let parts: Vec<_> = url.path().split('/').filter(|part| !part.is_empty()).collect();
        let mut root = parts.iter().fold(String::from("/"), |path, part| path + part + "/");
        if parts.last() != Some(&"v2") && !self.boolean("override_path")?.unwrap_or_default() {
            root.push_str("v2/");
        }
        url.set_path(&root);
        url.set_query(None);
        url.set_fragment(None);
        Ok(url)
    }
}

/// A time as Go writes it: `1m30s`, `1.5s`.
fn duration(text: &str) -> Option<Duration> {
    let mut rest = text.strip_prefix('+').unwrap_or(text);
    if rest == "0" {
        return Some(Duration::ZERO);
    }
    let mut total = Duration::ZERO;
    while !rest.is_empty() {
        let number = rest.find(|c: char| !c.is_ascii_digit() && c != '.')?;
        let (amount, unit) = rest.split_at(number);
        let end = unit.find(|c: char| c.is_ascii_digit()).unwrap_or(unit.len());
        let (unit, next) = unit.split_at(end);
        let seconds = match unit {
            "ns" => 1e-9,
            "us" | "µs" | "μs" => 1e-6,
            "ms" => 1e-3,
            "s" => 1.0,
            "m" => 60.0,
            "h" => 3600.0,
            _ => return None,
        };
        let amount: f64 = amount.parse().ok()?;
        total = total.checked_add(Duration::try_from_secs_f64(amount * seconds).ok()?)?;
        rest = next;
    }
    (!text.is_empty()).then_some(total)
}
