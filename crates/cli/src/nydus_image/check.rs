use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Args;
use lazuli_image::rafs;

use super::{Common, bootstrap::Given, output::Output};

/// Validate RAFS metadata: superblocks, tables, every inode and every reference to a chunk
#[derive(Debug, Args)]
pub(super) struct Arguments {
    #[command(flatten)]
    given: Given,
    /// File path to save the result in JSON format
    #[arg(short = 'J', long, value_name = "output-json")]
    output_json: Option<PathBuf>,
    #[command(flatten)]
    pub(super) common: Common,
}

pub(super) fn run(arguments: &Arguments) -> Result<()> {
    let bootstrap = arguments.given.read()?;
    let path = arguments.given.path();
    rafs::check(&bootstrap).with_context(|| format!("the bootstrap {}", path.display()))?;
    println!("RAFS filesystem metadata is valid, referenced data blobs: ");
    for (index, blob) in bootstrap.blobs().iter().enumerate() {
        println!(
            "\t {index}: {}, compressed file size {:#x}, uncompressed file size {:#x}, chunks: {:#x}",
            blob.id.hex(),
            blob.stored_size,
            blob.decoded_size,
            blob.chunks.len()
        );
    }
    let compressor = bootstrap.blobs().first().map(|blob| blob.codec.to_string());
    let blobs = bootstrap.blobs().iter().map(|blob| blob.id);
    let output = Output::new(Some(path), blobs).of(bootstrap.version(), compressor);
    output.write(arguments.output_json.as_deref())
}
