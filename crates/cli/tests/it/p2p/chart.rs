//! `dist/dragonfly/seed-peers`, which patches the output of Dragonfly's Helm chart where the chart
//! has no value for a setting.

use std::{
    io::Write as _,
    process::{Command, Output, Stdio},
};

/// The relevant parts of one configuration of the chart.
fn configuration(name: &str, parts: &str) -> String {
    format!(
        "---\nkind: ConfigMap\nmetadata:\n  name: {name}\ndata:\n  dfdaemon.yaml: |-\n    host:\n      idc: \"\"\n{parts}"
    )
}

const SEED: &str = "    seedPeer:\n      enable: true\n      type: super\n";
const REST: &str = "    dynconfig:\n      refreshInterval: 1m\n";

fn seed_peers(text: &str) -> Output {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../dist/dragonfly/seed-peers");
    let mut command = Command::new(script);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    child.wait_with_output().unwrap()
}

#[test]
fn every_client_of_the_chart_becomes_a_seed_peer() {
    let seed = configuration("dragonfly-seed-client", &format!("{SEED}{REST}"));
    let before = seed.clone() + &configuration("dragonfly-client", REST);
    let after = seed + &configuration("dragonfly-client", &format!("{SEED}{REST}"));
    let made = seed_peers(&before);
    assert!(made.status.success(), "{made:?}");
    assert_eq!(String::from_utf8(made.stdout).unwrap(), after);
}

#[test]
fn an_unknown_chart_is_not_changed() {
    let done = configuration("dragonfly-client", &format!("{SEED}{REST}"));
    let without = configuration("dragonfly-seed-client", REST);
    let two = configuration("a-client", REST) + &configuration("b-client", REST);
    for (text, why) in [(done, "already"), (without, "found 0"), (two, "found 2")] {
        let made = seed_peers(&text);
        let problem = String::from_utf8(made.stderr).unwrap();
        assert!(!made.status.success() && made.stdout.is_empty(), "{text}");
        assert!(problem.contains(why), "{problem}");
    }
}
