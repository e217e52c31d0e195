//! Checks the policy file.

use lazuli_policy::Gate;

use super::{Node, Row};

pub(super) fn rules(node: &Node<'_>) -> Option<Row> {
    const CHECK: &str = "policy";
    match Gate::new(node.session.config.policy.clone(), None).policy() {
        Ok(Some(policy)) => Some(Row::fine(CHECK, format!("in force, {}", policy.hash()))),
        Ok(None) => Some(Row::fine(CHECK, "none: any image may run")),
        Err(error) => {
            Some(Row::lacking(CHECK, error.to_string(), "docs/policy.md says how it is written"))
        }
    }
}
