//! The names of metrics. Dashboards and alerts depend on them: they are added over time, never
//! renamed or removed.

use std::time::UNIX_EPOCH;

use lazuli_metrics::{Family, Kind, Sample, Unit, Value};
use lazuli_registry::{Failure, ServerKind};
use lazuli_runtime::{
    daemon::Measurements,
    metrics::{BOUNDS, Driver, HistogramCounts, Origin, ReadFailure, StartFailure},
};

/// All of them.
pub(super) fn of(measured: &Measurements) -> Vec<Family> {
    let mut families = daemon(measured);
    families.extend(starts(measured));
    families.extend(reads(measured));
    families.extend(servers(measured));
    families.extend(cache(measured));
    families.extend(prefetch(measured));
    families.extend(mirror(measured));
    families
}

fn daemon(measured: &Measurements) -> Vec<Family> {
    let keeper = &measured.keeper;
    let started = measured.started_at.duration_since(UNIX_EPOCH).unwrap_or_default();
    let version =
        Sample { labels: vec![("version", env!("CARGO_PKG_VERSION"))], value: Value::Info };
    vec![
        Family {
            name: "lazuli_build",
            help: "The version of the daemon.",
            kind: Kind::Info,
            unit: None,
            samples: vec![version],
        },
        gauge(
            "lazuli_worker_start_time",
            "Start time of the worker, since 1970. Most counters start again from 0 then.",
            Some(Unit::Seconds),
            vec![plain(Value::Level(started.as_secs_f64()))],
        ),
        counter(
            "lazuli_deaths",
            "Processes that died and were restarted, since the daemon was started.",
            None,
            vec![
                labelled("process", "worker", keeper.restarts),
                labelled("process", "keeper", keeper.keeper_restarts),
            ],
        ),
        counter(
            "lazuli_takeovers",
            "Takeovers by another program, or by the same one, since the daemon was started.",
            None,
            vec![count(keeper.takeovers)],
        ),
    ]
}

fn starts(measured: &Measurements) -> Vec<Family> {
    let counts = &measured.counts;
    let mounts = Driver::ALL.iter().map(|driver| Sample {
        labels: vec![("driver", driver.name())],
        value: level(measured.mounts[*driver as usize]),
    });
    vec![
        gauge("lazuli_mounts", "Mounted images.", None, mounts.collect()),
        counter(
            "lazuli_starts",
            "Mounts: one for each image of containerd, however many containers run it.",
            None,
            each("driver", &Driver::ALL, Driver::name, &counts.starts),
        ),
        counter(
            "lazuli_failed_starts",
            "Failed mounts.",
            None,
            each("cause", &StartFailure::ALL, StartFailure::name, &counts.failed_starts),
        ),
        histogram(
            "lazuli_start_duration",
            "Time from mount request to mounted.",
            &counts.start_times,
        ),
    ]
}

fn reads(measured: &Measurements) -> Vec<Family> {
    let counts = &measured.counts;
    vec![
        gauge(
            "lazuli_missing",
            "Bytes of mounted images that are not on this node, as stored.",
            Some(Unit::Bytes),
            vec![plain(level(measured.missing))],
        ),
        gauge(
            "lazuli_waiting_readers",
            "Readers waiting for data.",
            None,
            vec![plain(level(counts.waiting))],
        ),
        histogram(
            "lazuli_read_wait",
            "Waits of readers for missing data, including those that got an error.",
            &counts.waits,
        ),
        counter(
            "lazuli_failed_reads",
            "Requests of the kernel answered with an error. One read of a program may cause several.",
            None,
            each("cause", &ReadFailure::ALL, ReadFailure::name, &counts.failed_reads),
        ),
        counter(
            "lazuli_wrong_digests",
            "Answers, and chunks on the disk, that did not match their digest. None reached a reader.",
            None,
            each("source", &Origin::ALL, Origin::name, &counts.wrong),
        ),
    ]
}

fn servers(measured: &Measurements) -> Vec<Family> {
    let bytes = ServerKind::ALL
        .iter()
        .map(|kind| labelled("source", kind.name(), measured.traffic[*kind as usize].bytes));
    let errors = ServerKind::ALL.iter().flat_map(|kind| {
        Failure::ALL.iter().map(|failure| Sample {
            labels: vec![("source", kind.name()), ("cause", failure.name())],
            value: Value::Count(measured.traffic[*kind as usize].failures[*failure as usize]),
        })
    });
    vec![
        counter(
            "lazuli_fetched",
            "Bytes of blobs fetched, as stored, including interrupted answers.",
            Some(Unit::Bytes),
            bytes.collect(),
        ),
        counter(
            "lazuli_copied",
            "Decoded bytes copied from other blobs on this node instead of being fetched.",
            Some(Unit::Bytes),
            vec![count(measured.counts.copied)],
        ),
        counter("lazuli_registry_errors", "Failed requests to servers.", None, errors.collect()),
    ]
}

fn cache(measured: &Measurements) -> Vec<Family> {
    let evictions = &measured.evictions;
    let levels = |value: Option<u64>| value.map(|value| plain(level(value))).into_iter().collect();
    vec![
        gauge(
            "lazuli_cache",
            "Bytes of blobs and image metadata on the disk.",
            Some(Unit::Bytes),
            levels(measured.cache.map(|(_, bytes)| bytes)),
        ),
        gauge(
            "lazuli_cache_blobs",
            "Blobs with files in the cache.",
            None,
            levels(measured.cache.map(|(blobs, _)| blobs)),
        ),
        gauge(
            "lazuli_cache_max",
            "The limit of lazuli_cache_bytes, where the configuration sets one.",
            Some(Unit::Bytes),
            levels(evictions.max_bytes),
        ),
        gauge(
            "lazuli_cache_over_budget",
            "1 if the cache exceeds its limit because all of it is in use, else 0.",
            None,
            levels(Some(u64::from(evictions.is_over))),
        ),
        counter(
            "lazuli_evicted",
            "Evicted bytes.",
            Some(Unit::Bytes),
            vec![count(evictions.bytes)],
        ),
        counter(
            "lazuli_evicted_blobs",
            "Evicted blobs that no image in use had.",
            None,
            vec![count(evictions.blobs)],
        ),
        counter(
            "lazuli_evicted_chunks",
            "Evicted chunks of images in use.",
            None,
            vec![count(evictions.chunks)],
        ),
    ]
}

fn prefetch(measured: &Measurements) -> Vec<Family> {
    let counts = &measured.counts;
    vec![
        counter(
            "lazuli_prefetched",
            "Bytes requested before a start's readers needed them, as stored.",
            Some(Unit::Bytes),
            vec![count(counts.foreseen)],
        ),
        counter(
            "lazuli_prefetched_read",
            "The part of these that a reader asked for.",
            Some(Unit::Bytes),
            vec![count(counts.foreseen_read)],
        ),
        counter(
            "lazuli_prefetched_unseen",
            "The part of these in blobs that were complete before a reader could be seen.",
            Some(Unit::Bytes),
            vec![count(counts.foreseen_unseen)],
        ),
    ]
}

/// Empty without a mirror.
fn mirror(measured: &Measurements) -> Vec<Family> {
    let Some(mirror) = &measured.mirror else { return Vec::new() };
    vec![
        counter(
            "lazuli_mirror_questions",
            "Requests of containerd's pulls, by where they were answered.",
            None,
            vec![
                labelled("answer", "memory", mirror.hits),
                labelled("answer", "registry", mirror.misses),
                labelled("answer", "stale", mirror.stale),
            ],
        ),
        counter(
            "lazuli_mirror_passed",
            "Bytes of blobs passed on to containerd.",
            Some(Unit::Bytes),
            vec![count(mirror.bytes)],
        ),
    ]
}

fn counter(
    name: &'static str,
    help: &'static str,
    unit: Option<Unit>,
    samples: Vec<Sample>,
) -> Family {
    Family { name, help, kind: Kind::Counter, unit, samples }
}

fn gauge(
    name: &'static str,
    help: &'static str,
    unit: Option<Unit>,
    samples: Vec<Sample>,
) -> Family {
    Family { name, help, kind: Kind::Gauge, unit, samples }
}

fn histogram(name: &'static str, help: &'static str, counts: &HistogramCounts) -> Family {
    let bounds = BOUNDS.into_iter().chain([f64::INFINITY]);
    let value = Value::Histogram {
        buckets: bounds.zip(counts.buckets).collect(),
        count: counts.count,
        sum: counts.sum,
    };
    let (kind, unit) = (Kind::Histogram, Some(Unit::Seconds));
    Family { name, help, kind, unit, samples: vec![plain(value)] }
}

/// A sample for each of `all`; the counters are in the same order.
fn each<T: Copy>(
    label: &'static str,
    all: &[T],
    name: impl Fn(T) -> &'static str,
    counts: &[u64],
) -> Vec<Sample> {
    all.iter().zip(counts).map(|(one, count)| labelled(label, name(*one), *count)).collect()
}

fn labelled(label: &'static str, name: &'static str, count: u64) -> Sample {
    Sample { labels: vec![(label, name)], value: Value::Count(count) }
}

fn count(count: u64) -> Sample {
    plain(Value::Count(count))
}

fn plain(value: Value) -> Sample {
    Sample { labels: Vec::new(), value }
}

#[expect(clippy::cast_precision_loss, reason = "exact up to 9 petabytes")]
fn level(value: u64) -> Value {
    Value::Level(value as f64)
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use lazuli_runtime::{cache::EvictionStats, daemon::MirrorStatus};

    use super::*;

    /// Everything that there can be.
    fn all() -> Vec<Family> {
        let listen = "127.0.0.1:5444".parse().unwrap();
        let evictions = EvictionStats { max_bytes: Some(1), ..EvictionStats::default() };
        of(&Measurements {
            started_at: UNIX_EPOCH,
            keeper: Default::default(),
            counts: Default::default(),
            traffic: Default::default(),
            mounts: Default::default(),
            cache: Some((1, 1)),
            missing: 0,
            evictions,
            mirror: Some(MirrorStatus { listen, hits: 0, misses: 0, stale: 0, bytes: 0 }),
        })
    }

    /// Every name that a query may use.
    fn names() -> BTreeSet<String> {
        let names = |family: Family| match family.kind {
            Kind::Histogram => ["_bucket", "_count", "_sum"]
                .map(|suffix| format!("{}{suffix}", family.full_name()))
                .to_vec(),
            _ => vec![family.full_name()],
        };
        all().into_iter().flat_map(names).collect()
    }

    /// Names of metrics in the lines of a text that begin with `key`.
    fn named<'a>(text: &'a str, key: &str) -> BTreeSet<&'a str> {
        let lines = text.lines().map(str::trim_start).filter(|line| line.starts_with(key));
        let words = lines.flat_map(|line| {
            line.split(|character: char| !character.is_ascii_alphanumeric() && character != '_')
        });
        words.filter(|word| word.starts_with("lazuli_")).collect()
    }

    #[test]
    fn every_metric_has_a_name_and_a_value_of_its_own() {
        let families = all();
        assert!(families.iter().all(|family| !family.samples.is_empty()));
        let names: BTreeSet<_> = families.iter().map(Family::full_name).collect();
        assert_eq!(names.len(), families.len());
        for family in &families {
            assert!(family.help.ends_with('.'), "{}", family.name);
            let labels: BTreeSet<_> = family.samples.iter().map(|sample| &sample.labels).collect();
            assert_eq!(labels.len(), family.samples.len(), "{}", family.name);
        }
    }

    #[test]
    fn alerts_and_dashboard_name_metrics_that_exist() {
        let known = names();
        let rules = include_str!("../../../../dist/prometheus/lazuli.rules.yml");
        let dashboard = include_str!("../../../../dist/grafana/lazuli.json");
        for (text, key, least) in [(rules, "expr:", 8), (dashboard, "\"expr\":", 20)] {
            let used = named(text, key);
            assert!(used.len() >= least, "{used:?}");
            let unknown: Vec<_> = used.iter().filter(|name| !known.contains(**name)).collect();
            assert!(unknown.is_empty(), "{unknown:?}");
        }
    }

    #[test]
    fn the_document_lists_every_metric_with_type_unit_and_labels() {
        let document = include_str!("../../../../docs/metrics.md");
        // "- `NAME` (TYPE, UNIT; `LABEL`, `LABEL`): meaning"
        let items = document.lines().filter_map(|line| line.strip_prefix("- `lazuli_"));
        let listed: BTreeMap<_, _> = items
            .filter_map(|item| item.split_once("):"))
            .filter_map(|(item, _)| item.split_once("` ("))
            .map(|(name, what)| (format!("lazuli_{name}"), what.replace('`', "")))
            .collect();
        let served: BTreeMap<_, _> = all()
            .iter()
            .map(|family| {
                let kind = format!("{:?}", family.kind).to_lowercase();
                let unit = family.unit.map(|unit| format!(", {unit:?}").to_lowercase());
                let labels = family.samples[0].labels.iter().map(|(label, _)| *label);
                let labels = labels.collect::<Vec<_>>().join(", ");
                let labels = if labels.is_empty() { labels } else { format!("; {labels}") };
                (family.full_name(), format!("{kind}{}{labels}", unit.unwrap_or_default()))
            })
            .collect();
        assert_eq!(listed, served);
    }
}
