//! The server, from outside: what a scraper gets, and what an attacker does not.

use std::{
    io,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use lazuli_metrics::{Address, Family, Kind, Measure, Sample, Value, serve};
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _},
    net::{TcpListener, TcpStream, UnixStream},
};

/// Nothing here takes longer, on the busiest machine.
const DEADLINE: Duration = Duration::from_secs(60);

const GET: &[u8] = b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n";

/// Measures how often it was asked.
fn counting() -> (Arc<AtomicU64>, Arc<Measure>) {
    let asked = Arc::<AtomicU64>::default();
    let counter = asked.clone();
    let measure = move || -> futures_util::future::BoxFuture<'static, Vec<Family>> {
        let count = counter.fetch_add(1, Ordering::Relaxed) + 1;
        let samples = vec![Sample { labels: Vec::new(), value: Value::Count(count) }];
        let (name, help, kind) = ("asked", "How often.", Kind::Counter);
        Box::pin(async move { vec![Family { name, help, kind, unit: None, samples }] })
    };
    (asked, Arc::new(measure))
}

/// A port that was free a moment ago.
async fn free_port() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap()
}

async fn start() -> (SocketAddr, Arc<AtomicU64>) {
    let (address, (asked, measure)) = (free_port().await, counting());
    tokio::spawn(serve(Address::Tcp(address), measure, std::future::pending()));
    (address, asked)
}

async fn connect(address: SocketAddr) -> TcpStream {
    let begun = Instant::now();
    loop {
        match TcpStream::connect(address).await {
            Ok(stream) => return stream,
            Err(error) => assert!(begun.elapsed() < DEADLINE, "{error}"),
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

async fn ask(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    request: &[u8],
) -> io::Result<String> {
    stream.write_all(request).await?;
    let mut answer = String::new();
    tokio::time::timeout(DEADLINE, stream.read_to_string(&mut answer)).await??;
    Ok(answer)
}

#[tokio::test]
async fn a_scrape_gets_openmetrics_and_the_end_of_the_connection() {
    let (address, _) = start().await;
    let answer = ask(connect(address).await, GET).await.unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    let kind = "content-type: application/openmetrics-text; version=1.0.0; charset=utf-8";
    assert!(head.contains(kind), "{head}");
    assert!(head.contains("connection: close"), "{head}");
    assert!(body.ends_with("asked_total 1\n# EOF\n"), "{body}");
}

#[tokio::test]
async fn other_paths_and_methods_are_refused() {
    let (address, asked) = start().await;
    for (request, status) in [
        ("GET / HTTP/1.1", "404"),
        ("GET /metrics/../../etc/passwd HTTP/1.1", "404"),
        ("POST /metrics HTTP/1.1", "405"),
        ("DELETE /metrics HTTP/1.1", "405"),
        ("nonsense", "400"),
    ] {
        let request = format!("{request}\r\nHost: a\r\n\r\n");
        let answer = ask(connect(address).await, request.as_bytes()).await.unwrap();
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{request}: {answer}");
    }
    assert_eq!(asked.load(Ordering::Relaxed), 0);
}

#[tokio::test]
async fn an_endless_head_ends_the_connection() {
    let (address, asked) = start().await;
    let head = [b"GET /metrics HTTP/1.1\r\nX-Long: ", &[b'x'; 1 << 20][..]].concat();
    // It is closed while this is sent, or answered with an error.
    let answer = ask(connect(address).await, &head).await.unwrap_or_default();
    assert!(!answer.contains("200 OK"), "{answer}");
    assert_eq!(asked.load(Ordering::Relaxed), 0);
}

#[tokio::test]
async fn clients_that_say_nothing_do_not_keep_a_scrape_out() {
    let (address, _) = start().await;
    let mut silent = Vec::new();
    for _ in 0..200 {
        silent.push(connect(address).await);
    }
    let answer = ask(connect(address).await, GET).await.unwrap();
    assert!(answer.contains("200 OK"), "{answer}");
    // The oldest had to give way.
    let ended = tokio::time::timeout(DEADLINE, silent[0].read(&mut [0; 1])).await.unwrap();
    assert!(ended.is_err() || ended.is_ok_and(|bytes| bytes == 0));
}

#[tokio::test]
async fn a_client_that_sends_byte_by_byte_is_ended() {
    let (address, _) = start().await;
    let mut slow = connect(address).await;
    let begun = Instant::now();
    while slow.write_all(b"G").await.is_ok() {
        assert!(begun.elapsed() < DEADLINE);
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

#[tokio::test]
async fn a_crowd_is_answered_with_one_measurement_a_second() {
    let (address, asked) = start().await;
    let begun = Instant::now();
    let scrapes = (0..50).map(|_| async move { ask(connect(address).await, GET).await });
    let answers = futures_util::future::join_all(scrapes).await;
    // Those that came late have ended those that came first.
    assert!(answers.iter().any(|answer| answer.as_ref().is_ok_and(|it| it.contains("200 OK"))));
    let measured = asked.load(Ordering::Relaxed);
    assert!(measured <= 1 + begun.elapsed().as_secs(), "{measured}");
}

#[tokio::test]
async fn a_client_that_leaves_takes_no_measurement_with_it() {
    let address = free_port().await;
    let (asked, measured) = counting();
    let (release, released) = tokio::sync::watch::channel(false);
    let slow: Arc<Measure> = Arc::new(move || {
        let (families, mut released) = (measured(), released.clone());
        Box::pin(async move {
            released.wait_for(|released| *released).await.unwrap();
            families.await
        })
    });
    tokio::spawn(serve(Address::Tcp(address), slow, std::future::pending()));
    let mut first = connect(address).await;
    first.write_all(GET).await.unwrap();
    while asked.load(Ordering::Relaxed) == 0 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    drop(first);
    let second = ask(connect(address).await, GET);
    let release = async {
        tokio::time::sleep(Duration::from_millis(200)).await;
        release.send(true).unwrap();
    };
    let (answer, ()) = tokio::join!(second, release);
    assert!(answer.unwrap().contains("200 OK"));
    assert_eq!(asked.load(Ordering::Relaxed), 1);
}

#[tokio::test]
async fn an_address_that_is_taken_is_tried_again() {
    let taken = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (address, (_, measure)) = (taken.local_addr().unwrap(), counting());
    tokio::spawn(serve(Address::Tcp(address), measure, std::future::pending()));
    tokio::time::sleep(Duration::from_millis(100)).await;
    drop(taken);
    let answer = ask(connect(address).await, GET).await.unwrap();
    assert!(answer.contains("200 OK"), "{answer}");
}

#[tokio::test]
async fn a_successor_listens_where_the_server_before_did() {
    let address = free_port().await;
    for _ in 0..3 {
        let (leave, left) = tokio::sync::oneshot::channel::<()>();
        let leaving = async { drop(left.await) };
        let (_, measure) = counting();
        let serving = tokio::spawn(serve(Address::Tcp(address), measure, leaving));
        let answer = ask(connect(address).await, GET).await.unwrap();
        assert!(answer.contains("asked_total 1\n"), "{answer}");
        drop(leave);
        serving.await.unwrap();
    }
}

#[tokio::test]
async fn a_unix_socket_serves_metrics() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("metrics.sock");
    let (_, measure) = counting();
    tokio::spawn(serve(Address::Unix(path.clone()), measure, std::future::pending()));
    let begun = Instant::now();
    let stream = loop {
        match UnixStream::connect(&path).await {
            Ok(stream) => break stream,
            Err(error) => assert!(begun.elapsed() < DEADLINE, "{error}"),
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    };
    assert!(ask(stream, GET).await.unwrap().contains("200 OK"));
}
