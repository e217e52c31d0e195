//! Costs and results of reads from faulty sources. Time is simulated.

use std::{
    iter::repeat_n,
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering},
    },
};

use lazuli_image::{Digest, Stored};
use lazuli_registry::Health;

use super::*;
use crate::{
    sharing::{
        Account,
        priority_semaphore::{Claim, PrioritySemaphore},
    },
    source::{
        BlobSource, Memory, contract,
        faulty::{Fault, Faulty},
        request::Meter,
    },
};

const DEADLINE: Duration = Duration::from_secs(60);
const ALWAYS: usize = 1000;
const IMAGE: Account = Account::Image(Digest::sha256([1; 32]));

/// Places of one blob, each on its own server, and counters.
struct Scene {
    sources: Vec<Arc<Faulty>>,
    tracked: Vec<Arc<TrackedSource>>,
    requests: AtomicU64,
}

impl Meter for Scene {
    fn request(&self) {
        self.requests.fetch_add(1, Ordering::Relaxed);
    }

    fn arrived(&self, _: u64) {}
    fn was_held(&self, _: u64) {}
}

impl Scene {
    fn new<const N: usize>(faults: [Vec<Fault>; N]) -> Self {
        let source = |(number, faults): (usize, Vec<Fault>)| {
            let server = Arc::new(Health::new(format!("server {number}")));
            Arc::new(Faulty::new(Memory::new(contract::content()), faults).at(&server))
        };
        let sources: Vec<_> = faults.into_iter().enumerate().map(source).collect();
        let track = |source: &Arc<Faulty>| Arc::new(TrackedSource::new(source.clone()));
        Scene { tracked: sources.iter().map(track).collect(), sources, requests: AtomicU64::new(0) }
    }

    /// Another blob at the same servers.
    fn another_blob(&mut self) {
        let track = |source: &Arc<Faulty>| {
            let health = source.server_health().unwrap();
            let source = Faulty::new(Memory::new(contract::content()), []).at(health);
            Arc::new(source)
        };
        self.sources = self.sources.iter().map(track).collect();
        self.tracked =
            self.sources.iter().map(|s| Arc::new(TrackedSource::new(s.clone()))).collect();
    }

    async fn read(&self, deadline: Duration) -> Result<(), SourceError> {
        let request = RangeRequest {
            range: Stored(5)..Stored(100_000),
            part: u64::MAX,
            deadline: Instant::now() + deadline,
            memory: &PrioritySemaphore::new(1 << 20),
            claim: &Claim::new(IMAGE, || true),
            meter: self,
        };
        let answer = read(&self.tracked, &request).await?;
        assert!(answer.bytes == contract::content()[5..100_000]);
        Ok(())
    }

    /// Reads, and returns the duration.
    async fn timed(&self) -> (Duration, Result<(), SourceError>) {
        let started = Instant::now();
        let result = self.read(DEADLINE).await;
        (started.elapsed(), result)
    }

    fn asked(&self) -> Vec<usize> {
        self.sources.iter().map(|source| source.reads()).collect()
    }
}

fn always(fault: Fault) -> Vec<Fault> {
    repeat_n(fault, ALWAYS).collect()
}

#[tokio::test(start_paused = true)]
async fn each_fault_costs_the_expected_time_and_requests() {
    use Fault::{Busy, Drip, Final, Hang, Short, Slow, Transient};
    let busy = |seconds| Busy(Duration::from_secs(seconds));
    let slow = Slow(Duration::from_millis(3500));
    // Faults of up to two sources; whether bytes arrive; the minimum and maximum duration in
    // seconds; requests to each.
    type Case = (&'static str, Vec<Vec<Fault>>, bool, (f64, f64), &'static [usize]);
    let cases: Vec<Case> = vec![
        ("none", vec![vec![]], true, (0.0, 0.0), &[1]),
        ("one reset", vec![vec![Transient]], true, (0.05, 0.15), &[2]),
        ("five resets", vec![vec![Transient; 5]], true, (1.5, 4.7), &[6]),
        ("final", vec![vec![Final]], false, (0.0, 0.0), &[1]),
        ("short", vec![vec![Short]], false, (0.0, 0.0), &[1]),
        ("asks for 20 s", vec![vec![busy(20)]], true, (20.0, 20.1), &[2]),
        ("asks for more than there is", vec![vec![busy(3600)]], false, (0.0, 0.0), &[1]),
        ("a connection that died", vec![vec![Hang]], true, (5.0, 5.0), &[2]),
        ("slow", vec![vec![slow]], true, (3.5, 3.5), &[1]),
        ("drips once", vec![vec![Drip]], true, (5.0, 5.0), &[2]),
        ("drips twice", vec![vec![Drip, Drip]], true, (16.0, 21.3), &[3]),
        ("mirror drips", vec![vec![Drip], vec![]], true, (1.0, 1.0), &[1, 1]),
        ("mirror fails", vec![vec![Transient], vec![]], true, (0.0, 0.0), &[1, 1]),
        ("mirror has it not", vec![vec![Final], vec![]], true, (0.0, 0.0), &[1, 1]),
        ("mirror hangs", vec![vec![Hang], vec![]], true, (1.0, 1.0), &[1, 1]),
        ("mirror is short", vec![vec![Short], vec![]], true, (0.0, 0.0), &[1, 1]),
        ("mirror asks for 20 s", vec![vec![busy(20)], vec![]], true, (0.0, 0.0), &[1, 1]),
        ("mirror is slow", vec![vec![slow], vec![Hang]], true, (3.5, 3.5), &[1, 1]),
        ("both final", vec![vec![Final], vec![Final]], false, (0.0, 0.0), &[1, 1]),
        (
            "mirror has it not, registry stumbles",
            vec![vec![Final], vec![Transient]],
            true,
            (0.05, 0.15),
            &[1, 2],
        ),
        ("both stumble", vec![vec![Transient], vec![Transient]], true, (0.05, 0.15), &[2, 1]),
        (
            "mirror hangs, registry stumbles",
            vec![vec![Hang], vec![Transient]],
            true,
            (1.0, 1.2),
            &[1, 2],
        ),
    ];
    for (what, faults, good, (least, most), asked) in cases {
        let scene = match <[Vec<Fault>; 1]>::try_from(faults) {
            Ok(one) => Scene::new(one),
            Err(more) => Scene::new(<[Vec<Fault>; 2]>::try_from(more).unwrap()),
        };
        let (took, result) = scene.timed().await;
        assert_eq!(result.is_ok(), good, "{what}: {result:?}");
        let seconds = took.as_secs_f64();
        assert!((least..=most + 0.01).contains(&seconds), "{what} took {took:?}");
        assert_eq!(scene.asked(), asked, "{what}");
        let requests = scene.requests.load(Ordering::Relaxed);
        assert_eq!(requests, asked.iter().sum::<usize>() as u64, "{what}");
    }
}

#[tokio::test(start_paused = true)]
async fn gives_up_at_the_deadline_and_says_why() {
    for fault in [Fault::Transient, Fault::Hang, Fault::Drip] {
        let scene = Scene::new([always(fault), always(fault)]);
        let (took, error) = scene.timed().await;
        let error = error.unwrap_err();
        assert!(matches!(error, SourceError::TimedOut { .. }), "{fault:?}: {error}");
        assert!(took <= DEADLINE && took + LONGEST_PAUSE * 2 >= DEADLINE, "{fault:?}: {took:?}");
        let cause = std::error::Error::source(&error).unwrap().to_string();
        assert!(cause.contains("memory") || cause.contains("told to fail"), "{fault:?}: {cause}");
        assert!(scene.asked().iter().all(|reads| *reads < 40), "{fault:?}: {:?}", scene.asked());
    }
}

#[tokio::test(start_paused = true)]
async fn a_hanging_source_costs_one_reader_a_second() {
    for fault in [Fault::Hang, Fault::Transient] {
        let mut scene = Scene::new([always(fault), vec![]]);
        let mut costs = Vec::new();
        for _ in 0..20 {
            costs.push(scene.timed().await.0);
        }
        assert!(costs[0] <= Duration::from_secs(1), "{costs:?}");
        assert!(costs[1..].iter().all(|cost| cost.is_zero()), "{fault:?}: {costs:?}");
        // And it is known to other blobs.
        scene.another_blob();
        assert!(scene.timed().await.0.is_zero());
        assert_eq!(scene.asked(), [0, 1]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_source_without_one_blob_is_still_asked_for_others() {
    let mut scene = Scene::new([always(Fault::Final), vec![]]);
    scene.timed().await.1.unwrap();
    scene.timed().await.1.unwrap();
    assert_eq!(scene.asked(), [1, 2], "not asked for this blob again at once");
    scene.another_blob();
    scene.timed().await.1.unwrap();
    assert_eq!(scene.asked(), [1, 0]);
}

#[tokio::test(start_paused = true)]
async fn peer_without_the_blob_stays_preferred() {
    let scene = Scene::new([vec![Fault::AskOthers], vec![]]);
    let (took, result) = scene.timed().await;
    result.unwrap();
    assert!(took.is_zero() && scene.asked() == [0, 1], "{took:?}, {:?}", scene.asked());
    assert!(scene.tracked[0].is_well());
    scene.timed().await.1.unwrap();
    assert_eq!(scene.asked(), [1, 1], "asked first again");

    // When the others stumble a reader asks there once more: by then a peer may have it.
    let scene = Scene::new([vec![Fault::AskOthers], vec![Fault::Transient]]);
    scene.timed().await.1.unwrap();
    assert_eq!(scene.asked(), [1, 1]);
    assert!(scene.tracked[0].is_well());
}

#[tokio::test(start_paused = true)]
async fn readers_wait_for_a_registry_that_comes_back() {
    let scene = Scene::new([always(Fault::Transient)]);
    let outage = Duration::from_secs(600);
    let waiting = scene.read(Duration::from_secs(3600));
    let back = async {
        tokio::time::sleep(outage).await;
        scene.sources[0].plan([]);
    };
    let started = Instant::now();
    let (result, ()) = tokio::join!(waiting, back);
    result.unwrap();
    assert!(started.elapsed() <= outage + LONGEST_PAUSE * 2, "{:?}", started.elapsed());
    assert!(scene.asked()[0] < 600);

    // A read that begins when the server is back does not wait.
    scene.sources[0].plan(always(Fault::Transient));
    scene.read(DEADLINE).await.unwrap_err();
    scene.sources[0].plan([]);
    assert!(scene.timed().await.0.is_zero());
}

#[tokio::test(start_paused = true)]
async fn a_mirror_that_comes_back_is_preferred_again() {
    let scene = Scene::new([always(Fault::Transient), vec![]]);
    for _ in 0..100 {
        scene.timed().await.1.unwrap();
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    assert!(scene.asked()[0] < 15, "left alone: {:?}", scene.asked());
    scene.sources[0].plan([]);
    tokio::time::sleep(Duration::from_secs(45)).await;
    let before = scene.asked();
    scene.timed().await.1.unwrap();
    scene.timed().await.1.unwrap();
    assert_eq!(scene.asked(), [before[0] + 2, before[1]]);
}

/// Two blobs at one registry: one source hangs in the first, and eats all memory if it can.
#[tokio::test(start_paused = true)]
async fn a_hanging_request_leaves_its_memory_to_others() {
    let memory = PrioritySemaphore::new(100_000);
    let hangs = Scene::new([always(Fault::Hang)]);
    let works = Scene::new([vec![]]);
    let order = Mutex::new(Vec::new());
    let claim = Claim::new(IMAGE, || true);
    let read = async |scene: &Scene, name| {
        let deadline = Instant::now() + Duration::from_secs(4);
        let range = Stored(0)..Stored(100_000);
        let request = RangeRequest {
            range,
            part: u64::MAX,
            deadline,
            memory: &memory,
            claim: &claim,
            meter: scene,
        };
        let result = super::read(&scene.tracked, &request).await;
        order.lock().unwrap().push((name, result.is_ok()));
    };
    let started = Instant::now();
    let later = async {
        tokio::time::sleep(Duration::from_millis(10)).await;
        read(&works, "works").await;
        assert!(started.elapsed() <= Duration::from_secs(1), "{:?}", started.elapsed());
    };
    tokio::join!(read(&hangs, "hangs"), later);
    assert_eq!(*order.lock().unwrap(), [("works", true), ("hangs", false)]);
}

/// Many reads at once, each of which takes half a second, of sources that share `memory` bytes.
async fn crowd(memory: u64, readers: &[(&'static str, bool)]) -> (Duration, Vec<&'static str>) {
    let scene = Scene::new([always(Fault::Slow(Duration::from_millis(500))), vec![]]);
    let memory = PrioritySemaphore::new(memory);
    let order = Mutex::new(Vec::new());
    let started = Instant::now();
    let reads = readers.iter().map(async |(name, wanted)| {
        let wanted = *wanted;
        let claim = Claim::new(IMAGE, move || wanted);
        let (range, deadline) = (Stored(0)..Stored(100_000), started + DEADLINE);
        let request = RangeRequest {
            range,
            part: u64::MAX,
            deadline,
            memory: &memory,
            claim: &claim,
            meter: &scene,
        };
        let answer = super::read(&scene.tracked, &request).await.unwrap();
        order.lock().unwrap().push(*name);
        drop(answer);
    });
    futures_util::future::join_all(reads).await;
    assert_eq!(scene.asked()[1], 0, "a read that waits for a request slot asks no other source");
    (started.elapsed(), order.into_inner().unwrap())
}

#[tokio::test(start_paused = true)]
async fn memory_and_requests_are_bounded() {
    let readers = [("reader", true); 128];
    let half = Duration::from_millis(500);
    assert_eq!(crowd(1 << 30, &readers).await.0, half * 2, "64 requests of one source");
    assert_eq!(crowd(400_000, &readers).await.0, half * 32, "memory for four");
    let prefetches = [("prefetch", false); 128];
    assert_eq!(crowd(1 << 30, &prefetches).await.0, half * 4, "half of the requests");
    assert_eq!(crowd(400_000, &prefetches).await.0, half * 64, "half of the memory");
}

#[tokio::test(start_paused = true)]
async fn separate_parts_are_read_concurrently() {
    let slow = Fault::Slow(Duration::from_millis(500));
    for (part, count, first) in
        [(u64::MAX, 1, 100_000), (50_000, 2, 50_000), (30_000, 4, 25_000), (1, 16, 6_250)]
    {
        let scene = Scene::new([always(slow)]);
        let request = RangeRequest {
            range: Stored(5)..Stored(100_005),
            part,
            deadline: Instant::now() + DEADLINE,
            memory: &PrioritySemaphore::new(1 << 20),
            claim: &Claim::new(IMAGE, || false),
            meter: &scene,
        };
        let started = Instant::now();
        let answer = super::read(&scene.tracked, &request).await.unwrap();
        assert!(answer.bytes == contract::content()[5..100_005]);
        assert_eq!(started.elapsed(), Duration::from_millis(500));
        assert_eq!(scene.requests.load(Ordering::Relaxed), count);
        assert_eq!(scene.sources[0].ranges()[0], Stored(5)..Stored(5 + first));
    }
}

#[tokio::test(start_paused = true)]
async fn demand_overtakes_prefetch() {
    let mut readers = vec![("prefetch", false); 20];
    readers.push(("reader", true));
    let (_, order) = crowd(200_000, &readers).await;
    // One is in flight already, and leaves capacity.
    assert!(order[..2].contains(&"reader"), "{order:?}");
}

#[tokio::test(start_paused = true)]
async fn a_race_keeps_the_contract_of_a_source() {
    let faults = (0..20).map(|n| if n % 3 == 0 { Fault::None } else { Fault::Transient });
    let scene = Scene::new([faults.collect(), vec![Fault::Slow(Duration::from_secs(2)); 5]]);
    for _ in 0..30 {
        scene.timed().await.1.unwrap();
    }
    let none = Scene::new([]);
    assert!(matches!(none.read(DEADLINE).await, Err(SourceError::NoSource)));
}
