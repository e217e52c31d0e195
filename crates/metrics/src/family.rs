//! Metrics at one moment, and their text.

use std::fmt;

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet, text},
    metrics::MetricType,
    registry::{Registry, Unit as ClientUnit},
};

/// The type of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Grows until the process ends.
    Counter,
    /// Goes up and down.
    Gauge,
    /// The distribution of durations.
    Histogram,
    /// Constant information, as labels.
    Info,
}

impl Kind {
    fn for_client(self) -> MetricType {
        match self {
            Kind::Counter => MetricType::Counter,
            Kind::Gauge => MetricType::Gauge,
            Kind::Histogram => MetricType::Histogram,
            Kind::Info => MetricType::Info,
        }
    }
}

/// The unit at the end of a metric's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// `_bytes`
    Bytes,
    /// `_seconds`
    Seconds,
}

/// Names and values of labels. Both are part of the program.
pub type Labels = Vec<(&'static str, &'static str)>;

/// One value of a metric.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// A counter's value.
    Count(u64),
    /// A gauge's value.
    Level(f64),
    /// A histogram's buckets: upper bounds, each with how many are in no earlier bucket; the last
    /// one, [`f64::INFINITY`], has the rest.
    Histogram {
        /// The buckets.
        buckets: Vec<(f64, u64)>,
        /// Their number.
        count: u64,
        /// All of them together.
        sum: f64,
    },
    /// An info, which only has labels.
    Info,
}

/// One value, and its labels.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// Its labels.
    pub labels: Labels,
    /// Its value.
    pub value: Value,
}

/// A metric: all of its values.
#[derive(Clone, Debug, PartialEq)]
pub struct Family {
    /// Its name without unit and suffix.
    pub name: &'static str,
    /// The description of the metric.
    pub help: &'static str,
    /// Its type.
    pub kind: Kind,
    /// Its unit.
    pub unit: Option<Unit>,
    /// Its values.
    pub samples: Vec<Sample>,
}

impl Family {
    /// The name that queries use: with the unit, and the suffix of its kind.
    pub fn full_name(&self) -> String {
        let unit = match self.unit {
            Some(Unit::Bytes) => "_bytes",
            Some(Unit::Seconds) => "_seconds",
            None => "",
        };
        let suffix = match self.kind {
            Kind::Counter => "_total",
            Kind::Info => "_info",
            Kind::Gauge | Kind::Histogram => "",
        };
        format!("{}{unit}{suffix}", self.name)
    }

    fn encode(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let unit = self.unit.map(|unit| match unit {
            Unit::Bytes => ClientUnit::Bytes,
            Unit::Seconds => ClientUnit::Seconds,
        });
        let kind = self.kind.for_client();
        let mut metric = encoder.encode_descriptor(self.name, self.help, unit.as_ref(), kind)?;
        for Sample { labels, value } in &self.samples {
            match value {
                Value::Info => metric.encode_info(labels)?,
                value if labels.is_empty() => encode_value(&mut metric, value)?,
                value => encode_value(&mut metric.encode_family(labels)?, value)?,
            }
        }
        Ok(())
    }
}

fn encode_value(metric: &mut MetricEncoder<'_>, value: &Value) -> fmt::Result {
    match value {
        Value::Count(count) => metric.encode_counter::<NoLabelSet, _, u64>(count, None),
        Value::Level(level) => metric.encode_gauge(level),
        Value::Histogram { buckets, count, sum } => {
            metric.encode_histogram::<NoLabelSet>(*sum, *count, buckets, None)
        }
        Value::Info => Ok(()),
    }
}

/// Families as a registry of the client library asks for them.
#[derive(Debug)]
struct Measured(Vec<Family>);

impl Collector for Measured {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let with_values = self.0.iter().filter(|family| !family.samples.is_empty());
        with_values.into_iter().try_for_each(|family| family.encode(&mut encoder))
    }
}

/// The text of some metrics, in OpenMetrics 1.0. Those without a value are left out.
pub fn encode(families: Vec<Family>) -> Result<String, fmt::Error> {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(Measured(families)));
    let mut page = String::new();
    text::encode(&mut page, &registry)?;
    Ok(page)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn family(name: &'static str, kind: Kind, unit: Option<Unit>, samples: Vec<Sample>) -> Family {
        Family { name, help: "What it means.", kind, unit, samples }
    }

    #[test]
    fn every_kind_of_metric_has_the_text_that_openmetrics_wants() {
        let plain = |value| vec![Sample { labels: Vec::new(), value }];
        let labelled = |label, value| Sample { labels: vec![("source", label)], value };
        let buckets = vec![(0.5, 1), (f64::INFINITY, 2)];
        let families = vec![
            family("a", Kind::Info, None, vec![labelled("x", Value::Info)]),
            family("b", Kind::Counter, Some(Unit::Bytes), plain(Value::Count(u64::MAX))),
            family(
                "c",
                Kind::Counter,
                None,
                vec![labelled("x", Value::Count(1)), labelled("y", Value::Count(2))],
            ),
            family("d", Kind::Gauge, None, plain(Value::Level(0.5))),
            family(
                "e",
                Kind::Histogram,
                Some(Unit::Seconds),
                plain(Value::Histogram { buckets, count: 3, sum: 7.5 }),
            ),
            family("f", Kind::Gauge, None, Vec::new()),
        ];
        let names: Vec<_> = families.iter().map(Family::full_name).collect();
        assert_eq!(names, ["a_info", "b_bytes_total", "c_total", "d", "e_seconds", "f"]);
        let page = encode(families).unwrap();
        let samples: Vec<_> = page.lines().filter(|line| !line.starts_with('#')).collect();
        assert_eq!(
            samples,
            [
                "a_info{source=\"x\"} 1",
                "b_bytes_total 18446744073709551615",
                "c_total{source=\"x\"} 1",
                "c_total{source=\"y\"} 2",
                "d 0.5",
                "e_seconds_sum 7.5",
                "e_seconds_count 3",
                "e_seconds_bucket{le=\"0.5\"} 1",
                "e_seconds_bucket{le=\"+Inf\"} 3",
            ]
        );
        assert!(page.contains("# UNIT b_bytes bytes\n") && page.ends_with("# EOF\n"), "{page}");
        assert!(!page.contains(" f "), "{page}");
    }
}
