use anyhow::Result;
use clap::{Args, ValueEnum};
use serde::Serialize;

use super::{Common, bootstrap::Given};

/// Print RAFS metadata as JSON
#[derive(Debug, Args)]
pub(super) struct Arguments {
    #[command(flatten)]
    given: Given,
    /// What to print
    #[arg(short = 'R', long, value_name = "request")]
    request: Request,
    #[command(flatten)]
    pub(super) common: Common,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Request {
    /// The blob table
    Blobs,
}

#[derive(Debug, Serialize)]
struct Blob {
    blob_id: String,
    compressed_size: u64,
    decompressed_size: u64,
    /// RAFS v6 has no read-ahead.
    readahead_offset: u32,
    readahead_size: u32,
}

pub(super) fn run(arguments: &Arguments) -> Result<()> {
    let Request::Blobs = arguments.request;
    let bootstrap = arguments.given.read()?;
    let blobs = bootstrap.blobs().iter().map(|blob| Blob {
        blob_id: blob.id.hex(),
        compressed_size: blob.stored_size,
        decompressed_size: blob.decoded_size,
        readahead_offset: 0,
        readahead_size: 0,
    });
    println!("{}", serde_json::to_string(&blobs.collect::<Vec<_>>())?);
    Ok(())
}
