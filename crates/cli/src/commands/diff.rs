use std::{
    collections::{BTreeMap, HashMap, HashSet},
    process::ExitCode,
};

use anyhow::{Result, bail};
use clap::Args;
use indicatif::BinaryBytes;
use lazuli_image::{
    Chunk, Digest, InodeId, Kind, Tree,
    compare::{What, compare},
};
use serde::Serialize;

use crate::{
    Session,
    image::open::{self, OpenedImage, Shown},
    image_args, output,
};

/// Show the differences between two lazy images, in files and in chunks
///
/// Fetches the metadata only. The exit code is 0 if the file trees are the same, 1 if they differ,
/// and 2 after an error.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// A lazy image: a registry reference or oci:DIR[:TAG]
    #[arg(value_name = "A")]
    a: String,
    /// Another one
    #[arg(value_name = "B")]
    b: String,
    /// For programs; docs/cli.md describes it
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    access: image_args::Access,
}

/// The output of `diff --json`. Fields are added over time, never renamed or removed.
#[derive(Debug, Serialize)]
struct Report {
    a: Image,
    b: Image,
    files: Vec<File>,
    chunks: ChunkSums,
    fetch: Fetch,
}

#[derive(Debug, Serialize)]
struct Image {
    image: String,
    manifest_digest: Digest,
}

#[derive(Debug, Serialize)]
struct File {
    path: String,
    change: Change,
    /// In which ways a changed file differs, by aspect.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    what: BTreeMap<&'static str, Vec<String>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Change {
    Added,
    Removed,
    Changed,
}

/// Chunks by content.
#[derive(Debug, Serialize)]
struct ChunkSums {
    shared: Amount,
    only_a: Amount,
    only_b: Amount,
}

#[derive(Clone, Copy, Debug, Default, Serialize)]
struct Amount {
    chunks: u64,
    stored_bytes: u64,
}

/// The fetches of a node that has all of A, for all of B: it copies chunks that another blob has.
#[derive(Debug, Default, Serialize)]
struct Fetch {
    blobs: u64,
    chunks: u64,
    stored_bytes: u64,
}

pub(crate) fn run(session: &Session, arguments: &Arguments) -> Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let open = |text: &str| {
        let image = open::open(text, &arguments.access, &session.config, &runtime)?;
        image.image.must_be_whole(image.name.to_string())?;
        Ok::<_, anyhow::Error>(image)
    };
    let (a, b) = (open(&arguments.a)?, open(&arguments.b)?);
    let report = Report {
        files: files(&a, &b)?,
        chunks: chunks(&a, &b)?,
        fetch: fetch(&a, &b),
        a: Image { image: a.name.to_string(), manifest_digest: a.image.manifest_digest },
        b: Image { image: b.name.to_string(), manifest_digest: b.image.manifest_digest },
    };
    let text = match arguments.json {
        true => serde_json::to_string_pretty(&report)? + "\n",
        false => describe(&report),
    };
    // `diff | head` closes the pipe early; that is no error.
    output::write(&text);
    Ok(ExitCode::from(u8::from(!report.files.is_empty())))
}

/// The differences in files, in order of path.
fn files(a: &OpenedImage, b: &OpenedImage) -> Result<Vec<File>> {
    let (left, right) = (&*a.image.bootstrap, &*b.image.bootstrap);
    let made = |size, digest: lazuli_image::Algorithm| {
        format!("chunks of {} with {} digests", BinaryBytes(u64::from(size)), digest.name())
    };
    let ways = [left, right].map(|it| made(it.chunk_size(), it.digest_algorithm()));
    if ways[0] != ways[1] {
        bail!(
            "{} has {}, and {} has {}: their metadata do not tell which content is the same; `lazuli check B --against SOURCE` \
             reads it",
            a.name,
            ways[0],
            b.name,
            ways[1]
        );
    }
    let left = Shown { tree: left.tree()?, bootstrap: left };
    let right = Shown { tree: right.tree()?, bootstrap: right };
    let mut files: BTreeMap<Vec<u8>, File> = BTreeMap::new();
    for difference in compare(&left, &right, usize::MAX) {
        let (tree, change) = match difference.what {
            What::OnlyFirst => (&left.tree, Change::Removed),
            What::OnlySecond => (&right.tree, Change::Added),
            What::Changed(aspect, how) => {
                let path = difference.path;
                let shown = path.escape_ascii().to_string();
                let file = files.entry(path).or_insert_with(|| File {
                    path: shown,
                    change: Change::Changed,
                    what: BTreeMap::new(),
                });
                file.what.entry(aspect.name()).or_default().push(how);
                continue;
            }
        };
        for path in below(tree, difference.path) {
            let shown = path.escape_ascii().to_string();
            files.insert(path, File { path: shown, change, what: BTreeMap::new() });
        }
    }
    // If a directory became something else, or the reverse, only one of the trees has its children.
    let changed: Vec<_> = files.iter().filter(|(_, file)| file.what.contains_key("type")).collect();
    let paths: Vec<_> = changed.into_iter().map(|(path, _)| path.clone()).collect();
    for path in paths {
        for (tree, change) in [(&left.tree, Change::Removed), (&right.tree, Change::Added)] {
            for path in below(tree, path.clone()).into_iter().skip(1) {
                let shown = path.escape_ascii().to_string();
                files.insert(path, File { path: shown, change, what: BTreeMap::new() });
            }
        }
    }
    Ok(files.into_values().collect())
}

/// A path and all that is below it.
fn below(tree: &Tree, path: Vec<u8>) -> Vec<Vec<u8>> {
    let names = path.split(|byte| *byte == b'/').filter(|name| !name.is_empty());
    let mut pending: Vec<_> = tree.find(names).map(|id| (path, id)).into_iter().collect();
    let mut found = Vec::new();
    while let Some((path, id)) = pending.pop() {
        for (name, child) in tree.children(id).into_iter().flatten() {
            pending.push(([&path[..], b"/", name.as_bytes()].concat(), *child));
        }
        found.push(path);
    }
    found
}

/// The differences in content of files, wherever it lies.
fn chunks(a: &OpenedImage, b: &OpenedImage) -> Result<ChunkSums> {
    let (left, right) = (stored(a)?, stored(b)?);
    let amount = |chunks: &HashMap<Digest, u64>, wanted: &dyn Fn(&Digest) -> bool| {
        let sizes = chunks.iter().filter(|(digest, _)| wanted(digest)).map(|(_, size)| *size);
        sizes.fold(Amount::default(), |sum, size| Amount {
            chunks: sum.chunks + 1,
            stored_bytes: sum.stored_bytes + size,
        })
    };
    Ok(ChunkSums {
        shared: amount(&right, &|digest| left.contains_key(digest)),
        only_a: amount(&left, &|digest| !right.contains_key(digest)),
        only_b: amount(&right, &|digest| !left.contains_key(digest)),
    })
}

/// The stored sizes of the chunks that files have. Blobs may have more, of layers below and of
/// other images.
fn stored(image: &OpenedImage) -> Result<HashMap<Digest, u64>> {
    let bootstrap = &image.image.bootstrap;
    let (tree, blobs) = (bootstrap.tree()?, bootstrap.blobs());
    let mut stored = HashMap::new();
    for id in (0..tree.len() as u32).map(InodeId) {
        let Kind::Regular { chunks, .. } = &tree[id].kind else { continue };
        let chunks =
            chunks.iter().filter_map(|c| blobs.get(usize::from(c.blob.0))?.chunk(c.number));
        stored.extend(chunks.map(|chunk| (chunk.digest, chunk.stored_share())));
    }
    Ok(stored)
}

fn fetch(a: &OpenedImage, b: &OpenedImage) -> Fetch {
    let here = a.image.bootstrap.blobs().iter().flat_map(|blob| &blob.chunks);
    let mut known: HashSet<_> = here.map(|chunk| chunk.digest).collect();
    let mut fetch = Fetch::default();
    for blob in b.image.bootstrap.blobs() {
        let new: Vec<_> = blob.chunks.iter().filter(|chunk| known.insert(chunk.digest)).collect();
        fetch.blobs += u64::from(!new.is_empty());
        fetch.chunks += new.len() as u64;
        fetch.stored_bytes += new.into_iter().map(Chunk::stored_share).sum::<u64>();
    }
    fetch
}

fn describe(report: &Report) -> String {
    let mut text = String::new();
    for File { path, change, what } in &report.files {
        let sign = match change {
            Change::Added => '+',
            Change::Removed => '-',
            Change::Changed => '~',
        };
        text += &format!("{sign} {path}");
        let how = what.iter().map(|(aspect, how)| format!("{aspect} ({})", how.join("; ")));
        let how: Vec<_> = how.collect();
        if !how.is_empty() {
            text += &format!("  {}", how.join(", "));
        }
        text.push('\n');
    }
    let count = |wanted| report.files.iter().filter(|file| file.change == wanted).count();
    let amount = |Amount { chunks, stored_bytes }| {
        format!("{} in {chunks} chunks", BinaryBytes(stored_bytes))
    };
    let Report { a, b, chunks, fetch, .. } = report;
    text += &format!("{} and {}\n", a.image, b.image);
    text += &format!(
        "  files     {} added, {} removed, {} changed\n",
        count(Change::Added),
        count(Change::Removed),
        count(Change::Changed)
    );
    text += &format!("  shared    {}\n", amount(chunks.shared));
    text += &format!("  only A    {}\n", amount(chunks.only_a));
    text += &format!("  only B    {}\n", amount(chunks.only_b));
    text += &format!(
        "  fetch     {} in {} blobs, by a node that has A\n",
        BinaryBytes(fetch.stored_bytes),
        fetch.blobs
    );
    text
}
