use std::process::ExitCode;

use anyhow::{Result, bail};
use clap::Args;
use indicatif::BinaryBytes;
use lazuli_runtime::daemon::{
    Client, Request, Response, ScrubBlob, ScrubPlan, ScrubStep, ScrubbedChunk, UnusedBlob,
};
use serde::Serialize;

use crate::{Session, daemon, progress};

/// Read the whole cache back and check it, chunk by chunk
///
/// Wrong chunks are reported, evicted, and fetched again when they are read; containers keep
/// running. The exit code is 1 if a chunk was wrong.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// For programs; docs/cli.md describes it
    #[arg(long)]
    json: bool,
}

/// The findings.
#[derive(Debug, Serialize)]
struct Report {
    blobs: usize,
    chunks: u64,
    bytes: u64,
    wrong: Vec<Wrong>,
    unused: Vec<UnusedBlob>,
    damaged: Vec<String>,
}

/// A wrong chunk, and the images that have it.
#[derive(Debug, Serialize)]
struct Wrong {
    #[serde(flatten)]
    chunk: ScrubbedChunk,
    #[serde(flatten)]
    place: ScrubBlob,
}

pub(crate) fn run(session: &Session, arguments: &Arguments) -> Result<ExitCode> {
    let report = scrub(&mut daemon::connect(session)?)?;
    if arguments.json {
        println!("{}", serde_json::to_string_pretty(&report)?);
    } else {
        print(&report);
    }
    let right = report.wrong.is_empty() && report.damaged.is_empty();
    Ok(if right { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn scrub(daemon: &mut Client) -> Result<Report> {
    let plan = match daemon.call(&Request::ScrubPlan)? {
        Response::ScrubPlan(plan) => plan,
        other => bail!("the daemon answered {other:?} to a scrub; is it another version?"),
    };
    let ScrubPlan { blobs, unused, damaged } = plan;
    let total = blobs.iter().map(|blob| blob.bytes).sum();
    let bar = progress::bytes(Some(total), "scrubbing");
    let (mut chunks, mut bytes, mut wrong) = (0, 0, Vec::new());
    let count = blobs.len();
    for place in blobs {
        let mut next = Some(0);
        while let Some(from) = next {
            let step = step(daemon, &place, from)?;
            chunks += step.chunks;
            bytes += step.bytes;
            bar.inc(step.bytes);
            let found = step.wrong.into_iter();
            wrong.extend(found.map(|chunk| Wrong { chunk, place: place.clone() }));
            next = step.next;
        }
    }
    bar.finish_and_clear();
    Ok(Report { blobs: count, chunks, bytes, wrong, unused, damaged })
}

fn step(daemon: &mut Client, blob: &ScrubBlob, from: usize) -> Result<ScrubStep> {
    let Some(image) = blob.images.first().copied() else { return Ok(ScrubStep::default()) };
    match daemon.call(&Request::Scrub { image, position: blob.position, from })? {
        Response::Scrubbed(step) => Ok(step),
        other => bail!("the daemon answered {other:?} to a scrub; is it another version?"),
    }
}

fn print(report: &Report) {
    let Report { blobs, chunks, bytes, wrong, unused, damaged } = report;
    for Wrong { chunk, place } in wrong {
        let ScrubbedChunk { chunk, start, end } = chunk;
        println!("wrong    blob {}, chunk {chunk}, {start} to {end}", place.blob);
        for image in &place.images {
            println!("  image  {image}");
        }
        for mountpoint in &place.mountpoints {
            println!("  mount  {}", mountpoint.display());
        }
    }
    for problem in damaged {
        println!("damaged  {problem}");
    }
    for UnusedBlob { directory, bytes } in unused {
        println!("unused   {directory}, {}: no image describes it", BinaryBytes(*bytes));
    }
    let verdict = match wrong.len() {
        0 => "every digest is right".to_owned(),
        1 => "1 chunk was wrong and is given up".to_owned(),
        many => format!("{many} chunks were wrong and are given up"),
    };
    println!("{chunks} chunks in {blobs} blobs, {}: {verdict}", BinaryBytes(*bytes));
}
