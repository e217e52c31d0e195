//! Events for an operator or a pod's owner, limited in rate.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use indicatif::BinaryBytes;
use jiff::Timestamp;
use lazuli_runtime::daemon::{DriverChoice, FailedReadStatus, ServerStatus, Status};
use serde_json::{Value, json};

use super::text::plain;

/// How long the same is not said again of the same object. The API server keeps events for an hour.
const AGAIN: Duration = Duration::from_secs(600);

/// Events within that time.
const MOST: usize = 100;

/// Failures that mean that a server is away or not well. The others are about one image or login.
const OUTAGES: &[&str] =
    &["unreachable", "untrusted", "interrupted", "silent", "throttled", "server"];

/// An event for the API server.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Event {
    pub(super) namespace: String,
    pub(super) body: Value,
}

/// The previous observation, and recent events.
#[derive(Debug, Default)]
pub(super) struct Events {
    before: Option<Seen>,
    said: HashMap<String, Instant>,
}

#[derive(Debug)]
struct Seen {
    worker_pid: u32,
    servers: Vec<ServerStatus>,
    last_read: u64,
    is_full: bool,
    is_fuse: bool,
}

/// An event to report, about the node or a pod.
struct News<'a> {
    reason: &'static str,
    message: String,
    /// The read of a pod that failed.
    read: Option<&'a FailedReadStatus>,
}

impl Events {
    /// The events that follow from the node's status. The first call only reports persisting
    /// states: earlier incidents have been reported already, or are old.
    pub(super) fn of(&mut self, node: &str, status: &Status) -> Vec<Event> {
        let now = Instant::now();
        self.said.retain(|_, when| now.duration_since(*when) < AGAIN);
        let news = news(self.before.as_ref(), status);
        self.before = Some(Seen {
            worker_pid: status.daemon.worker_pid,
            servers: status.servers.clone(),
            last_read: status.failed_reads.last().map_or(0, |read| read.number),
            is_full: status.daemon.cache.over_budget,
            is_fuse: fuse(status).is_some(),
        });
        news.into_iter().filter_map(|news| self.event(node, &news, now)).collect()
    }

    fn event(&mut self, node: &str, news: &News<'_>, now: Instant) -> Option<Event> {
        let News { reason, message, read } = news;
        let (namespace, object) = object(node, *read);
        let subject = format!("{reason} {}", object["uid"]);
        if self.said.contains_key(&subject) || self.said.len() >= MOST {
            return None;
        }
        self.said.insert(subject, now);
        let time = format!("{:.0}", Timestamp::now());
        let body = json!({
            "apiVersion": "v1", "kind": "Event",
            "metadata": { "generateName": "lazuli-", "namespace": namespace },
            "involvedObject": object, "type": "Warning",
            "reason": reason, "message": plain(message),
            "source": { "component": "lazuli", "host": node },
            "firstTimestamp": time, "lastTimestamp": time, "count": 1,
        });
        Some(Event { namespace, body })
    }
}

/// The namespace and the object of an event: the reader's pod if known, or the node, whose events
/// are in `default` and have its name as uid, as the kubelet's have.
fn object(node: &str, read: Option<&FailedReadStatus>) -> (String, Value) {
    let pod = read.and_then(|read| {
        let (namespace, name) = read.pod.as_ref()?.split_once('/')?;
        Some((namespace, name, read.pod_uid.as_ref()?))
    });
    match pod {
        Some((namespace, name, uid)) => {
            let object = json!({ "apiVersion": "v1", "kind": "Pod", "namespace": namespace, "name": name, "uid": uid });
            (namespace.to_owned(), object)
        }
        None => {
            let object = json!({ "apiVersion": "v1", "kind": "Node", "name": node, "uid": node });
            ("default".to_owned(), object)
        }
    }
}

fn news<'a>(before: Option<&Seen>, status: &'a Status) -> Vec<News<'a>> {
    let mut news = Vec::new();
    let mut node = |reason, message| news.push(News { reason, message, read: None });
    let cache = &status.daemon.cache;
    if cache.over_budget && !before.is_some_and(|before| before.is_full) {
        let (used, most) = (BinaryBytes(cache.bytes_used), cache.max_bytes.map(BinaryBytes));
        let most = most.map(|most| format!(" of {most} ([cache] max_bytes)")).unwrap_or_default();
        node(
            "CacheFull",
            format!("the cache takes {used}{most}, and images in use have all of it"),
        );
    }
    if let Some(why) = fuse(status).filter(|_| !before.is_some_and(|before| before.is_fuse)) {
        node("FuseFallback", format!("images are served by FUSE: {why}"));
    }
    let Some(before) = before else { return news };
    // A worker counts anew.
    let is_same = before.worker_pid == status.daemon.worker_pid;
    for server in &status.servers {
        let known = before.servers.iter().find(|known| is_same && known.kind == server.kind);
        if let Some(message) = outage(known, server) {
            node("RegistryUnavailable", message);
        }
    }
    let last_read = if is_same { before.last_read } else { 0 };
    for read in status.failed_reads.iter().filter(|read| read.number > last_read) {
        news.push(News { reason: "ReadFailed", message: failed_read(read), read: Some(read) });
    }
    news
}

/// The reason why an image is served by FUSE, if one is or the next one would be.
fn fuse(status: &Status) -> Option<&str> {
    let daemon = [(status.daemon.driver, &status.daemon.driver_reason)];
    let mounts = status.mounts.iter().map(|mount| (mount.driver, &mount.driver_reason));
    let mut all = daemon.into_iter().chain(mounts);
    all.find(|(driver, _)| *driver == DriverChoice::Fuse).map(|(_, why)| why.as_str())
}

/// The text for requests that failed since `before` without any data arriving.
fn outage(before: Option<&ServerStatus>, now: &ServerStatus) -> Option<String> {
    if now.bytes > before.map_or(0, |before| before.bytes) {
        return None;
    }
    let mut causes = Vec::new();
    for (cause, count) in &now.failures {
        let known = before.and_then(|before| before.failures.get(cause)).copied().unwrap_or(0);
        if *count > known && OUTAGES.contains(&cause.as_str()) {
            causes.push(format!("{} {cause}", count - known));
        }
    }
    (!causes.is_empty()).then(|| {
        let (kind, causes) = (&now.kind, causes.join(", "));
        format!("requests to a {kind} failed and no data arrives: {causes}; `journalctl -u lazuli` on the node has details")
    })
}

fn failed_read(read: &FailedReadStatus) -> String {
    let FailedReadStatus { container, image, file, cause, .. } = read;
    let part = |name: &str, value: &Option<String>| {
        value.as_ref().map(|value| format!(" {name} {value}")).unwrap_or_default()
    };
    format!(
        "a read failed:{}{}{} (cause: {cause})",
        part("container", container),
        part("file", file),
        part("of image", image)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(change: impl FnOnce(&mut Value)) -> Status {
        let mut status = json!({
            "daemon": {
                "keeper_pid": 1, "worker_pid": 2, "restarts": 0, "version": "1", "root": "/",
                "uptime_seconds": 3, "driver": "fanotify", "driver_reason": "",
                "cache": { "directory": "/", "blobs": 0, "bytes_used": 2048 },
            },
            "mounts": [],
            "servers": [{ "kind": "registry", "bytes": 10, "failures": { "denied": 1 } }],
        });
        change(&mut status);
        serde_json::from_value(status).unwrap()
    }

    fn reasons(events: &[Event]) -> Vec<&str> {
        events.iter().map(|event| event.body["reason"].as_str().unwrap()).collect()
    }

    fn read(number: u64, uid: &str) -> Value {
        json!({ "number": number, "pod": "shop/web", "pod_uid": uid, "container": "main",
            "image": "example/web:1", "file": "/lib\u{1b}[2J", "cause": "timeout" })
    }

    #[test]
    fn an_outage_is_requests_that_fail_while_nothing_arrives() {
        let mut events = Events::default();
        let seen = |bytes: u64, failures: Value| {
            status(|status| {
                status["servers"][0] =
                    json!({ "kind": "registry", "bytes": bytes, "failures": failures });
            })
        };
        let old = json!({ "unreachable": 5 });
        assert_eq!(events.of("node1", &seen(10, old.clone())), [], "before the first look");
        assert_eq!(events.of("node1", &seen(10, old)), []);
        let some = json!({ "unreachable": 6 });
        assert_eq!(events.of("node1", &seen(11, some)), [], "data arrives");
        let denied = json!({ "unreachable": 6, "denied": 9 });
        assert_eq!(events.of("node1", &seen(11, denied)), [], "one login");
        let away = events.of("node1", &seen(11, json!({ "unreachable": 8, "denied": 9 })));
        assert_eq!(reasons(&away), ["RegistryUnavailable"]);
        assert_eq!(away[0].namespace, "default");
        assert_eq!(away[0].body["involvedObject"]["name"], "node1");
        let message = away[0].body["message"].as_str().unwrap();
        assert!(message.contains("a registry failed") && message.contains("2 unreachable"));
        let again = events.of("node1", &seen(11, json!({ "unreachable": 99 })));
        assert_eq!(again, [], "said already");
    }

    #[test]
    fn states_are_said_when_they_begin() {
        let mut events = Events::default();
        let full = || status(|status| status["daemon"]["cache"]["over_budget"] = json!(true));
        let first = events.of("node1", &full());
        assert_eq!(reasons(&first), ["CacheFull"]);
        let fuse = status(|status| {
            status["daemon"]["driver"] = json!("fuse");
            status["daemon"]["driver_reason"] = json!("no fanotify");
        });
        let second = events.of("node1", &fuse);
        assert_eq!(reasons(&second), ["FuseFallback"]);
        assert_eq!(second[0].body["message"], "images are served by FUSE: no fanotify");
        assert_eq!(events.of("node1", &full()), [], "said already");
    }

    #[test]
    fn a_failed_read_is_an_event_of_its_pod() {
        let mut events = Events::default();
        let seen = |reads: Value| status(|status| status["failed_reads"] = reads);
        assert_eq!(events.of("node1", &seen(json!([read(1, "u1")]))), [], "before the first look");
        let reads = json!([read(1, "u1"), read(2, "u1"), read(3, "u1")]);
        let found = events.of("node1", &seen(reads));
        assert_eq!(reasons(&found), ["ReadFailed"], "once for the pod");
        let Event { namespace, body } = &found[0];
        assert_eq!((namespace.as_str(), &body["involvedObject"]["uid"]), ("shop", &json!("u1")));
        assert_eq!(
            body["message"],
            "a read failed: container main file /lib\u{fffd}[2J of image example/web:1 (cause: timeout)"
        );
        let other = seen(json!([read(4, "u2")]));
        assert_eq!(reasons(&events.of("node1", &other)), ["ReadFailed"], "another pod");
        // Another worker numbers from 1.
        let mut other = seen(json!([read(1, "u3")]));
        other.daemon.worker_pid = 9;
        assert_eq!(reasons(&events.of("node1", &other)), ["ReadFailed"]);
        let unknown = seen(json!([{ "number": 5, "pod_uid": "u4", "cause": "timeout" }]));
        let found = events.of("node1", &unknown);
        assert_eq!(found[0].body["involvedObject"]["kind"], "Node");
    }

    #[test]
    fn one_status_makes_a_bounded_number_of_events() {
        let mut events = Events::default();
        events.of("node1", &status(|_| ()));
        let reads: Vec<_> = (1..=300).map(|number| read(number, &number.to_string())).collect();
        let seen = status(|status| status["failed_reads"] = json!(reads));
        assert_eq!(events.of("node1", &seen).len(), MOST);
    }
}
