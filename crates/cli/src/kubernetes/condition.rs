//! The node's condition `LazyPulls`, and the taint that keeps pods away until it is true.

use std::fmt;

use anyhow::Result;
use jiff::{SignedDuration, Timestamp};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{observe::Row, text::plain};

/// The condition's type.
const TYPE: &str = "LazyPulls";

/// The key of the taint with which a node may join.
pub(super) const TAINT: &str = "lazuli/not-ready";

/// Time after which an unchanged condition is written again, so that a stale one can be told. As
/// often as the kubelet writes an unchanged status.
const HEARTBEAT: SignedDuration = SignedDuration::from_mins(5);

/// Whether lazy pods can start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Condition {
    pub(super) status: ConditionStatus,
    /// In CamelCase.
    pub(super) reason: String,
    pub(super) message: String,
}

/// The status of a condition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ConditionStatus {
    True,
    False,
    Unknown,
}

impl fmt::Display for ConditionStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// The parts of a node that matter here.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Node {
    spec: Spec,
    status: Status,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Spec {
    taints: Vec<Value>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Status {
    conditions: Vec<Written>,
}

/// A condition as the API server has it.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Written {
    #[serde(rename = "type")]
    kind: String,
    status: String,
    reason: String,
    message: String,
    last_heartbeat_time: String,
}

impl Condition {
    /// The condition that follows from `doctor`.
    pub(super) fn of(rows: &Result<Vec<Row>>) -> Self {
        let (status, reason, message) = match rows {
            Err(error) => {
                (ConditionStatus::Unknown, "DoctorFailed".to_owned(), format!("{error:#}"))
            }
            Ok(rows) => match rows.iter().find(|row| row.verdict == "lacking") {
                Some(row) => (ConditionStatus::False, reason(&row.check), message(row)),
                None => {
                    (ConditionStatus::True, "Ready".to_owned(), "lazy pods can start".to_owned())
                }
            },
        };
        Condition { status, reason, message: plain(&message) }
    }

    /// A patch of the node's status, unless the node has the condition already.
    pub(super) fn patch(&self, node: &Node) -> Option<Value> {
        let now = Timestamp::now();
        let time = format!("{now:.0}");
        let written = node.status.conditions.iter().find(|written| written.kind == TYPE);
        let status = self.status.to_string();
        let mut patch = json!({
            "type": TYPE, "status": status, "reason": self.reason, "message": self.message,
            "lastHeartbeatTime": time,
        });
        let is_same = |written: &&Written| written.status == status;
        if written.filter(is_same).is_none() {
            patch["lastTransitionTime"] = json!(time);
        }
        let is_fresh = |time: Timestamp| now.duration_since(time) < HEARTBEAT;
        let is_told = written.is_some_and(|written| {
            written.status == status
                && written.reason == self.reason
                && written.message == self.message
                && written.last_heartbeat_time.parse().is_ok_and(is_fresh)
        });
        (!is_told).then(|| json!({ "status": { "conditions": [patch] } }))
    }

    /// A JSON patch that removes the start-up taint, if the node has it and lazy pods can start. It
    /// fails if the node's taints change meanwhile.
    pub(super) fn untaint(&self, node: &Node) -> Option<Value> {
        let taints = node.spec.taints.iter();
        let mut ours = taints.enumerate().filter(|(_, taint)| taint["key"] == TAINT);
        let (at, taint) = ours.next().filter(|_| self.status == ConditionStatus::True)?;
        let path = format!("/spec/taints/{at}");
        Some(json!([
            { "op": "test", "path": path, "value": taint },
            { "op": "remove", "path": path },
        ]))
    }
}

/// `user-namespaces` becomes `UserNamespacesLacking`.
fn reason(check: &str) -> String {
    let mut reason = String::new();
    for word in check.split(|c: char| !c.is_ascii_alphanumeric()) {
        let mut letters = word.chars();
        reason.extend(letters.next().map(|first| first.to_ascii_uppercase()));
        reason.extend(letters);
    }
    format!("{reason}Lacking")
}

fn message(row: &Row) -> String {
    let fix = row.fix.as_ref().map(|fix| format!("; on the node: {fix}"));
    format!("{}{}", row.found, fix.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(check: &str, verdict: &str) -> Row {
        Row {
            check: check.to_owned(),
            verdict: verdict.to_owned(),
            found: "found".to_owned(),
            fix: Some("fix".to_owned()),
        }
    }

    fn node(value: Value) -> Node {
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn only_what_is_lacking_makes_it_false() {
        let fine = Condition::of(&Ok(vec![row("daemon", "fine"), row("disk", "advice")]));
        assert_eq!((fine.status, fine.reason.as_str()), (ConditionStatus::True, "Ready"));
        let rows = vec![row("daemon", "fine"), row("user-namespaces", "lacking")];
        let lacking = Condition::of(&Ok(rows));
        assert_eq!(lacking.status, ConditionStatus::False);
        assert_eq!(lacking.reason, "UserNamespacesLacking");
        assert_eq!(lacking.message, "found; on the node: fix");
        assert_eq!(Condition::of(&Err(anyhow::anyhow!("gone"))).status, ConditionStatus::Unknown);
    }

    #[test]
    fn the_condition_is_written_when_it_changes_and_every_five_minutes() {
        let condition = Condition::of(&Ok(Vec::new()));
        let first = condition.patch(&Node::default()).unwrap();
        let written = first["status"]["conditions"][0].clone();
        assert_eq!(written["status"], "True");
        assert!(written["lastTransitionTime"].is_string());
        let told = |written: &Value| {
            node(json!({ "status": { "conditions": [
            { "type": "Ready", "status": "False" }, written ] } }))
        };
        assert_eq!(
            written["lastTransitionTime"].as_str().unwrap().len(),
            "2026-11-25T09:24:12Z".len()
        );
        assert_eq!(condition.patch(&told(&written)), None);
        let mut old = written.clone();
        old["lastHeartbeatTime"] = json!(format!("{:.0}", Timestamp::now() - HEARTBEAT));
        let again = condition.patch(&told(&old)).unwrap();
        assert_eq!(again["status"]["conditions"][0]["lastTransitionTime"], Value::Null);
        let other = Condition::of(&Ok(vec![row("plugin", "lacking")]));
        let patch = other.patch(&told(&written)).unwrap();
        assert!(patch["status"]["conditions"][0]["lastTransitionTime"].is_string());
    }

    #[test]
    fn the_taint_goes_when_lazy_pods_can_start_and_others_stay() {
        let other = json!({ "key": "other", "effect": "NoSchedule" });
        let ours = json!({ "key": TAINT, "effect": "NoSchedule" });
        let tainted = node(json!({ "spec": { "taints": [other, ours] } }));
        let ready = Condition::of(&Ok(Vec::new()));
        let expected = json!([
            { "op": "test", "path": "/spec/taints/1", "value": ours },
            { "op": "remove", "path": "/spec/taints/1" },
        ]);
        assert_eq!(ready.untaint(&tainted), Some(expected));
        assert_eq!(ready.untaint(&node(json!({ "spec": { "taints": [other] } }))), None);
        assert_eq!(ready.untaint(&node(json!({}))), None);
        for rows in [Ok(vec![row("daemon", "lacking")]), Err(anyhow::anyhow!("gone"))] {
            assert_eq!(Condition::of(&rows).untaint(&tainted), None);
        }
    }
}
