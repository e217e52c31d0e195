//! Many containers of one image.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use lazuli_testkit::{cri::Pod, registry::FakeRegistry};
use serde_json::{Value, json};

use super::{
    programs::{Containerd, on_both},
    rig::Rig,
};
use crate::{
    lazuli::corpus,
    reliability::{alone, report, soak},
};

on_both!(a_crowd_from_a_cold_image_fetches_every_chunk_once);

/// Latency of a request to a nearby registry.
const LATENCY: Duration = Duration::from_millis(5);

/// Starts at the same time after the first ones: as many as a node that is busy anyway can do
/// something for.
const WAVE: usize = 10;

/// The work of a container until it is ready: it starts an interpreter and reads some megabytes.
const GET_READY: [&str; 3] = ["sh", "-c", "perl -e 'print 1' && cat /usr/bin/[a-p]* | wc -c"];

fn a_crowd_from_a_cold_image_fetches_every_chunk_once(containerd: Containerd) {
    let Some(rig) = Rig::new(containerd, "debian-slim") else { return };
    let layout = corpus("debian-slim").unwrap();
    let _alone = alone();
    let (at_once, in_all) = if soak() { (50, 200) } else { (10, 20) };
    let registry = FakeRegistry::start().unwrap();
    rig.plain_http(&registry.host());
    let image = format!("{}/app:lazy", registry.host());
    rig.lazuli.ok(["convert", &format!("oci:{}", layout.display()), &image]);
    registry.set_latency(LATENCY);
    registry.reset_stats();

    let crowd =
        Crowd { rig: &rig, image: &image, pods: Mutex::default(), started: AtomicUsize::new(0) };
    let idle = rss(&rig);
    let cold = crowd.start(at_once, at_once);
    let fetched = fetched(&registry);
    assert!(fetched.bytes > 1 << 20, "{fetched:?}");
    fetched.has_every_chunk_once();
    assert_eq!(rig.mounts().len(), 1);
    let after_cold = rss(&rig);
    let rest = crowd.start(in_all - at_once, WAVE);
    // Unread chunks arrive in the background, between those present.
    let in_all_fetched = self::fetched(&registry);
    in_all_fetched.has_every_chunk_once();
    let up = rss(&rig);
    let name = format!("containerd-crowd-{containerd:?}").to_lowercase();
    report(
        &name,
        &json!({
            "at_once": at_once,
            "ready_ms": milliseconds(&cold),
            "bytes": fetched.bytes,
            "bytes_twice": fetched.twice,
            "bytes_in_all": in_all_fetched.bytes,
            "bytes_in_all_twice": in_all_fetched.twice,
            "requests": fetched.requests,
            "image_bytes": rig.mounts()[0]["bytes_total"],
            "containers": in_all,
            "rest_ready_ms": milliseconds(&rest),
            "idle": idle,
            "after_cold": after_cold,
            "up": up,
        }),
    );

    let pods: Vec<Pod> = crowd.pods.into_inner().unwrap();
    assert_eq!(pods.len(), in_all);
    for wave in pods.chunks(WAVE) {
        thread::scope(|scope| {
            for pod in wave {
                scope.spawn(|| rig.cri.remove(&pod.sandbox).unwrap());
            }
        });
    }
    rig.remove_images(&[&image]);
    rig.nothing_left();
}

struct Crowd<'a> {
    rig: &'a Rig,
    image: &'a str,
    pods: Mutex<Vec<Pod>>,
    started: AtomicUsize,
}

impl Crowd<'_> {
    /// Pulls the image and starts a pod, `count` times, at most `parallel` at the same time. The
    /// result is when each was ready, from the begin of all.
    fn start(&self, count: usize, parallel: usize) -> Vec<Duration> {
        let (began, ready) = (Instant::now(), Mutex::new(Vec::new()));
        let left = AtomicUsize::new(count);
        let take =
            || left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
        thread::scope(|scope| {
            for _ in 0..parallel {
                scope.spawn(|| {
                    while take().is_ok() {
                        self.start_one();
                        ready.lock().unwrap().push(began.elapsed());
                    }
                });
            }
        });
        ready.into_inner().unwrap()
    }

    fn start_one(&self) {
        let name = format!("crowd-{}", self.started.fetch_add(1, Ordering::Relaxed));
        self.rig.cri.pull(self.image, None).unwrap();
        let pod = self.rig.cri.start(&name, self.image, &["sleep", "1000000"]).unwrap();
        let output = self.rig.cri.exec(&pod.container, &GET_READY).unwrap();
        let read = String::from_utf8_lossy(&output.stdout).into_owned();
        let size = read.strip_prefix('1').and_then(|size| size.trim().parse::<u64>().ok());
        assert!(size.is_some_and(|size| size > 1 << 20), "{output:?}");
        self.pods.lock().unwrap().push(pod);
    }
}

/// The registry's requests for the image's data.
#[derive(Debug)]
struct Asked {
    requests: usize,
    bytes: u64,
    /// Bytes that were asked for again.
    twice: u64,
    /// Requests that begin, or end, where another one does.
    same_border: usize,
}

impl Asked {
    /// A request begins and ends with a missing chunk, so no two requests share a border. In
    /// between it may cover small chunks that are present or in flight, if that is cheaper than
    /// another request.
    #[track_caller]
    fn has_every_chunk_once(&self) {
        assert_eq!(self.same_border, 0, "{self:?}");
        // Escalation fetches scattered files, and a request covers present chunks in between: 12 to
        // 16 % of the bytes.
        assert!(self.twice * 4 < self.bytes, "{self:?}");
    }
}

fn fetched(registry: &FakeRegistry) -> Asked {
    let mut ranges: BTreeMap<String, Vec<(u64, u64)>> = BTreeMap::new();
    for asked in registry.log() {
        let Some(bytes) = asked.bytes() else { continue };
        ranges.entry(asked.target).or_default().push((bytes.start, bytes.end));
    }
    let mut asked = Asked { requests: 0, bytes: 0, twice: 0, same_border: 0 };
    for ranges in ranges.values_mut() {
        ranges.sort_unstable();
        let [starts, ends]: [BTreeSet<u64>; 2] =
            [ranges.iter().map(|r| r.0).collect(), ranges.iter().map(|r| r.1).collect()];
        asked.same_border += 2 * ranges.len() - starts.len() - ends.len();
        let mut end = 0;
        for (from, to) in ranges {
            asked.requests += 1;
            asked.bytes += *to - *from;
            asked.twice += end.min(*to).saturating_sub(*from);
            end = end.max(*to);
        }
    }
    asked
}

/// Resident memory of keeper and worker.
fn rss(rig: &Rig) -> Value {
    let pids = rig.wait_for(|pids| pids.keeper != 0 && pids.worker != 0);
    let of = |pid: u32| -> u64 {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.trim().trim_end_matches(" kB").parse().unwrap()
    };
    json!({ "keeper_rss_kib": of(pids.keeper), "worker_rss_kib": of(pids.worker) })
}

fn milliseconds(times: &[Duration]) -> Value {
    let mut times: Vec<_> = times.iter().map(|time| time.as_millis() as u64).collect();
    times.sort_unstable();
    json!({ "first": times.first(), "p50": times.get(times.len() / 2), "last": times.last() })
}
