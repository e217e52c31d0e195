//! Damages an image repeatedly, in memory, and checks that readers detect the damage.
//!
//! `mutate DIR SEED COUNT`, with `DIR/bootstrap` and `DIR/<blob id>`. Each round makes one change
//! and updates all digests to match, as a forger would: only the format and the digests of chunks
//! can reveal it. Damage that goes undetected must be harmless: the tree and every byte of every
//! file are the same. A bootstrap may become that of another image, which only its digest reveals.
//!
//! Prints the number of each outcome, as JSON.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a command-line tool")]

use std::{
    collections::BTreeMap,
    fs, io,
    panic::{AssertUnwindSafe, catch_unwind},
    path::Path,
    process::ExitCode,
    time::{Duration, Instant},
};

use lazuli_image::{
    Algorithm, BlobIndex, Digest,
    codec::Decoder,
    erofs::{FileType, Nid},
    rafs::{self, BlobRecord, Bootstrap},
};
use lazuli_testkit::{content::Choices, mutation::mutate};
use serde_json::json;

/// The outcome of one mutation.
#[derive(Clone, Copy, Debug)]
enum Outcome {
    /// A reader reported an error.
    Found,
    /// Nothing differs.
    Harmless,
    /// A sound bootstrap of another image; its digest is another one.
    AnotherImage,
    /// Wrong bytes or another tree, and nothing said so.
    Missed,
    /// A panic.
    Panic,
}

impl Outcome {
    const fn name(self) -> &'static str {
        match self {
            Outcome::Found => "found",
            Outcome::Harmless => "harmless",
            Outcome::AnotherImage => "another_image",
            Outcome::Missed => "missed",
            Outcome::Panic => "panic",
        }
    }
}

/// The visible content of an image: every inode with a name, and the digest of every file that can
/// be read.
#[derive(Default)]
struct Shown {
    entries: Vec<(Vec<u8>, String, Option<Digest>)>,
    errors: u64,
}

impl Shown {
    /// Returns whether a reader of `self` sees the same as in `whole`, or an error.
    fn is_part_of(&self, whole: &Shown) -> bool {
        let same = |(one, other): (&(_, _, Option<_>), &(_, _, _))| {
            one.0 == other.0 && one.1 == other.1 && (one.2.is_none() || one.2 == other.2)
        };
        self.entries.len() == whole.entries.len()
            && self.entries.iter().zip(&whole.entries).all(same)
    }
}

struct Image {
    bootstrap: Vec<u8>,
    records: Vec<BlobRecord>,
    blobs: Vec<Vec<u8>>,
    shown: Shown,
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let numbers = |text: &String| text.parse().ok();
    let result = match &arguments[..] {
        [dir, seed, count] => match (numbers(seed), numbers(count)) {
            (Some(seed), Some(count)) => run(Path::new(dir), seed, count),
            _ => Err("SEED and COUNT are numbers".to_owned()),
        },
        _ => Err("usage: mutate DIR SEED COUNT".to_owned()),
    };
    result.map_or_else(
        |error| {
            eprintln!("mutate: {error}");
            ExitCode::FAILURE
        },
        |()| ExitCode::SUCCESS,
    )
}

fn run(dir: &Path, seed: u64, count: u64) -> Result<(), String> {
    let image = Image::load(dir)?;
    let before = peak_kib();
    let mut choices = Choices::new(seed);
    let mut outcomes: BTreeMap<String, BTreeMap<String, BTreeMap<String, u64>>> = BTreeMap::new();
    let (mut longest, mut problems) = (Duration::ZERO, Vec::new());
    for number in 0..count {
        let target = ["bootstrap", "tail", "blob"][(number % 3) as usize];
        let blob = choices.below(image.blobs.len() as u64) as usize;
        let mut bytes = image.part(target, blob).to_vec();
        let mutation = mutate(&mut bytes, &mut choices);
        let began = Instant::now();
        let judged = catch_unwind(AssertUnwindSafe(|| image.judge(target, blob, &bytes)));
        let outcome = judged.unwrap_or(Outcome::Panic);
        longest = longest.max(began.elapsed());
        if matches!(outcome, Outcome::Missed | Outcome::Panic) {
            problems.push(format!("{outcome:?}: mutation {number}, {mutation} of a {target}"));
        }
        let kinds = outcomes.entry(target.to_owned()).or_default();
        let counts = kinds.entry(mutation.to_string()).or_default();
        *counts.entry(outcome.name().to_owned()).or_default() += 1;
    }
    let figures = json!({
        "mutations": count,
        "outcomes": outcomes,
        "problems": problems,
        "longest_ms": longest.as_millis() as u64,
        "peak_rss_growth_kib": peak_kib().saturating_sub(before),
    });
    println!("{figures:#}");
    Ok(())
}

impl Image {
    fn load(dir: &Path) -> Result<Self, String> {
        let read = |name: &str| {
            fs::read(dir.join(name)).map_err(|error: io::Error| format!("{name}: {error}"))
        };
        let bootstrap = read("bootstrap")?;
        let records = Bootstrap::open(&bootstrap[..]).map_err(|error| error.to_string())?;
        let records = records.blob_records();
        let blobs = records.iter().map(|record| read(&record.blob.id.hex()));
        let blobs = blobs.collect::<Result<Vec<_>, _>>()?;
        let shown = show(&bootstrap, &blobs)?;
        if shown.errors > 0 {
            return Err("the image is damaged already".to_owned());
        }
        Ok(Image { bootstrap, records, blobs, shown })
    }

    fn part(&self, target: &str, blob: usize) -> &[u8] {
        match target {
            "bootstrap" => &self.bootstrap,
            "tail" => &self.blobs[blob][self.records[blob].tail.ci_offset as usize..],
            _ => &self.blobs[blob],
        }
    }

    /// The outcome of reading the image with `bytes` in place of a part of it.
    fn judge(&self, target: &str, blob: usize, bytes: &[u8]) -> Outcome {
        let with = |bytes: Vec<u8>| {
            let mut blobs = self.blobs.clone();
            blobs[blob] = bytes;
            blobs
        };
        let unchanged = bytes == self.part(target, blob);
        let (refused, shown) = match target {
            "bootstrap" => (false, show(bytes, &self.blobs)),
            "tail" => {
                let data = &self.blobs[blob][..self.records[blob].tail.ci_offset as usize];
                let refused = rafs::check_blob(bytes, &self.records[blob]).is_err();
                (refused, show(&self.bootstrap, &with([data, bytes].concat())))
            }
            _ => (false, show(&self.bootstrap, &with(bytes.to_vec()))),
        };
        match shown {
            Err(_) => Outcome::Found,
            Ok(shown) if shown.is_part_of(&self.shown) => {
                let found = refused || shown.errors > 0;
                if found { Outcome::Found } else { Outcome::Harmless }
            }
            Ok(_) if target == "bootstrap" && !unchanged => Outcome::AnotherImage,
            Ok(_) => Outcome::Missed,
        }
    }
}

/// Everything that an image shows, or the first reason why it does not.
fn show(bootstrap: &[u8], blobs: &[Vec<u8>]) -> Result<Shown, String> {
    let bootstrap = Bootstrap::open(bootstrap).map_err(|error| error.to_string())?;
    rafs::check(&bootstrap).map_err(|error| error.to_string())?;
    let tree = bootstrap.tree().map_err(|error| error.to_string())?;
    let mut shown = Shown::default();
    let mut pending = vec![(Vec::new(), lazuli_image::Tree::ROOT, bootstrap.root())];
    let mut known: BTreeMap<Nid, Option<Digest>> = BTreeMap::new();
    while let Some((path, id, nid)) = pending.pop() {
        let inode = bootstrap.inode(nid).map_err(|error| error.to_string())?;
        let digest = match (known.get(&inode.nid), inode.file_type) {
            (Some(digest), _) => *digest,
            (None, FileType::Regular) => {
                let digest = content(&bootstrap, nid, inode.size, blobs);
                shown.errors += u64::from(digest.is_err());
                digest.ok()
            }
            _ => None,
        };
        known.insert(inode.nid, digest);
        for (name, child) in tree.children(id).into_iter().flatten() {
            let found =
                bootstrap.lookup(nid, name.as_bytes()).map_err(|error| error.to_string())?;
            let found = found.ok_or("a name that is listed is not found")?;
            pending.push(([&path[..], b"/", name.as_bytes()].concat(), *child, found));
        }
        let mut inode = tree[id].clone();
        if let lazuli_image::Kind::Directory(children) = &mut inode.kind {
            children.clear();
        }
        shown.entries.push((path, format!("{inode:?}"), digest));
    }
    shown.entries.sort();
    Ok(shown)
}

/// The digest of a file whose chunks are decoded and checked, as in every reader.
fn content(
    bootstrap: &Bootstrap<&[u8]>,
    file: Nid,
    size: u64,
    blobs: &[Vec<u8>],
) -> Result<Digest, String> {
    let mut hasher = Algorithm::Sha256.hasher();
    let chunks = bootstrap.chunks(file).map_err(|error| error.to_string())?;
    let mut seen = 0;
    for chunk in chunks {
        let (chunk, _) = chunk.map_err(|error| error.to_string())?;
        let BlobIndex(blob) = chunk.blob;
        let record = &bootstrap.blobs()[usize::from(blob)];
        let chunk = record.chunk(chunk.number).ok_or("a chunk that is not listed")?;
        // A registry that has fewer bytes answers with fewer.
        let stored = blobs.get(usize::from(blob)).and_then(|bytes| {
            bytes.get(chunk.stored.0 as usize..)?.get(..chunk.stored_size as usize)
        });
        let stored = stored.ok_or("the blob is too short")?;
        let (mut decoder, mut buffer) = (Decoder::new(), Vec::new());
        let unit = decoder.unit(&record.unit(chunk), stored, &mut buffer);
        let unit = unit.map_err(|error| error.to_string())?;
        let decoded = chunk.part_of(unit).ok_or("a chunk behind the end of its batch")?;
        if !chunk.digest.matches(decoded) {
            return Err(format!("chunk {} has another digest", chunk.number));
        }
        seen += decoded.len() as u64;
        hasher.update(decoded);
    }
    if seen == size { Ok(hasher.finish()) } else { Err(format!("{seen} of {size} bytes")) }
}

/// The most memory that this process ever had, in KiB.
fn peak_kib() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.and_then(|line| line.split_whitespace().next()?.parse().ok()).unwrap_or(0)
}
