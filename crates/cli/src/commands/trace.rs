use std::{
    collections::{BTreeMap, HashMap},
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Result, bail};
use clap::{Args, Subcommand};
use indicatif::BinaryBytes;
use lazuli_builder::bake::Hot;
use lazuli_image::{Digest, Kind, Trace, Tree, rafs::Bootstrap};
use serde::Serialize;

use crate::{
    Session,
    image::{
        open::{self, OpenedImage},
        trace,
    },
    image_args,
    path_context::PathContext as _,
};

/// Show the trace of an image: what its starts read
///
/// The daemon records the trace, and fetches what it lists ahead of the next start.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Print it by file, time and bytes
    Show(Show),
}

#[derive(Debug, Args)]
struct Show {
    /// A lazy image: a registry reference or oci:DIR[:TAG]
    #[arg(value_name = "IMAGE")]
    image: String,
    /// For programs; docs/cli.md describes it
    #[arg(long)]
    json: bool,
    /// Write the trace itself to a new file, for `convert --trace`
    #[arg(long, value_name = "FILE", conflicts_with = "json")]
    save: Option<PathBuf>,
    #[command(flatten)]
    access: image_args::Access,
}

/// A trace, as printed.
#[derive(Debug, Serialize)]
struct Shown {
    image: String,
    manifest_digest: Digest,
    starts: u32,
    bytes: u64,
    touches: Vec<Line>,
}

/// One chunk.
#[derive(Debug, Serialize)]
struct Line {
    milliseconds: u32,
    starts: u32,
    blob: Digest,
    chunk: u32,
    bytes: u64,
    files: Vec<String>,
}

pub(crate) fn run(session: &Session, arguments: &Arguments) -> Result<()> {
    let Verb::Show(show) = &arguments.verb;
    let runtime = tokio::runtime::Runtime::new()?;
    let image = open::open(&show.image, &show.access, &session.config, &runtime)?;
    let trace = trace::find(&session.root, &image, &runtime)?;
    if let Some(path) = &show.save {
        return save(path, &trace);
    }
    let shown = describe(&image, &trace)?;
    if show.json {
        println!("{}", serde_json::to_string_pretty(&shown)?);
    } else {
        print(&shown);
    }
    Ok(())
}

fn save(path: &Path, trace: &Trace) -> Result<()> {
    if path.exists() {
        bail!("{} exists already", path.display());
    }
    fs::write(path, trace.encode()).cannot("write", path)
}

fn describe(image: &OpenedImage, trace: &Trace) -> Result<Shown> {
    let OpenedImage { name, image, .. } = image;
    let files = files(&image.bootstrap)?;
    let blobs: HashMap<_, _> = image
        .bootstrap
        .blobs()
        .iter()
        .enumerate()
        .map(|(at, blob)| (blob.id, (at, blob)))
        .collect();
    let line = |touch: &lazuli_image::trace::Touch| {
        let id = trace.blobs()[usize::from(touch.blob)];
        let known = blobs.get(&id).and_then(|(at, blob)| Some((*at, blob.chunk(touch.number)?)));
        let place = known.map(|(at, _)| (at, touch.number));
        Line {
            milliseconds: touch.at,
            starts: touch.starts,
            blob: id,
            chunk: touch.number,
            bytes: known.map_or(0, |(_, chunk)| chunk.stored_share()),
            files: place.and_then(|place| files.get(&place)).cloned().unwrap_or_default(),
        }
    };
    let touches: Vec<_> = trace.touches().iter().map(line).collect();
    Ok(Shown {
        image: name.to_string(),
        manifest_digest: image.manifest_digest,
        starts: trace.starts(),
        bytes: touches.iter().map(|line| line.bytes).sum(),
        touches,
    })
}

/// The files that have each chunk, by position of the blob and chunk number.
fn files<B: AsRef<[u8]>>(bootstrap: &Bootstrap<B>) -> Result<BTreeMap<(usize, u32), Vec<String>>> {
    let tree = bootstrap.tree()?;
    let mut files: BTreeMap<_, Vec<String>> = BTreeMap::new();
    let mut pending = vec![(Tree::ROOT, String::new())];
    while let Some((directory, path)) = pending.pop() {
        let Kind::Directory(children) = &tree[directory].kind else { continue };
        for (name, child) in children {
            let path = format!("{path}/{name}");
            match &tree[*child].kind {
                Kind::Directory(_) => pending.push((*child, path)),
                Kind::Regular { chunks, .. } => {
                    for chunk in chunks {
                        let key = (usize::from(chunk.blob.0), chunk.number);
                        let known = files.entry(key).or_default();
                        if known.last() != Some(&path) {
                            known.push(path.clone());
                        }
                    }
                }
                _ => {}
            }
        }
    }
    Ok(files)
}

fn print(shown: &Shown) {
    let Shown { image, starts, bytes, touches, .. } = shown;
    println!("{image}: {} chunks, {}, in {starts} starts", touches.len(), BinaryBytes(*bytes));
    println!("{:>9}  {:>6}  {:>10}  file", "ms", "starts", "bytes");
    for Line { milliseconds, starts, bytes, files, .. } in touches {
        let file = match &files[..] {
            [] => "(not in this image)".to_owned(),
            [file] => file.clone(),
            [file, others @ ..] => format!("{file} (and {} more)", others.len()),
        };
        println!("{milliseconds:>9}  {starts:>6}  {:>10}  {file}", BinaryBytes(*bytes).to_string());
    }
}

/// Reports how much of a trace the image doesn't have.
pub(super) fn report_unknown(hot: &Hot, image: &str) {
    if hot.unknown > 0 {
        println!("  ignored   {} hot chunks of the trace that are not in {image}", hot.unknown);
    }
}
