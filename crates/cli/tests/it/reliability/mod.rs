//! Readers' results while Lazuli's processes die, are replaced, or are overloaded.
//!
//! Each test has a short form for every run and, with `LAZULI_SOAK=1`, a long one. With
//! `LAZULI_RESULTS=DIR` the figures are written to `DIR/<name>.json`.

mod both;
mod fairness;
pub(crate) mod forge;
mod image;
mod kill;
mod many_chunks;
mod mutation;
pub(crate) mod processes;
mod readers;
mod round;
mod scale;
mod takeover;
mod trust;
mod upstream;

use std::{
    collections::BTreeMap,
    path::PathBuf,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use serde_json::{Value, json};

/// Returns whether to run the long forms.
pub(crate) fn soak() -> bool {
    std::env::var_os("LAZULI_SOAK").is_some_and(|value| value == "1")
}

/// Serialises these tests: each loads the machine, and its stalls are measured.
pub(crate) fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Shows figures, and keeps them on request.
pub(crate) fn report(name: &str, figures: &Value) {
    eprintln!("{name}: {figures:#}");
    if let Some(directory) = std::env::var_os("LAZULI_RESULTS") {
        let path = PathBuf::from(directory).join(format!("{name}.json"));
        std::fs::write(&path, format!("{figures:#}\n")).unwrap();
    }
}

/// Adds a row to a table of several tests, and writes the rows so far, in the order of the lines
/// that check them.
pub(crate) fn report_row(name: &'static str, line: u32, row: Value) {
    static TABLES: Mutex<BTreeMap<&str, BTreeMap<u32, Value>>> = Mutex::new(BTreeMap::new());
    let mut tables = TABLES.lock().unwrap();
    let rows = tables.entry(name).or_default();
    rows.insert(line, row);
    report(name, &rows.values().cloned().collect());
}

/// With two digits after the point.
pub(crate) fn round_seconds(seconds: f64) -> f64 {
    (seconds * 100.0).round() / 100.0
}

/// Median, 99th percentile and maximum in milliseconds, with a tenth.
pub(crate) fn percentiles(mut durations: Vec<Duration>) -> Value {
    durations.sort_unstable();
    let at = |percent: usize| {
        let index = (durations.len() * percent).div_ceil(100).max(1) - 1;
        durations.get(index).map(|duration| (duration.as_secs_f64() * 10_000.0).round() / 10.0)
    };
    json!({ "p50": at(50), "p99": at(99), "max": at(100) })
}

#[test]
fn percentiles_are_of_the_values() {
    let durations = (1..=200).rev().map(Duration::from_millis).collect();
    assert_eq!(percentiles(durations), json!({ "p50": 100.0, "p99": 198.0, "max": 200.0 }));
    assert_eq!(percentiles(vec![]), json!({ "p50": null, "p99": null, "max": null }));
}
