use anyhow::Result;
use clap::Args;
use indicatif::BinaryBytes;
use lazuli_image::{Digest, rafs};
use serde::Serialize;

use crate::{
    Session,
    image::open::{self, OpenedImage},
    image_args, output,
};

/// Show what a lazy image consists of: blobs, chunks, sizes
///
/// Fetches the metadata only.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// A lazy image: a registry reference or oci:DIR[:TAG]
    #[arg(value_name = "IMAGE")]
    image: String,
    /// For programs
    #[arg(long, conflicts_with = "tree")]
    json: bool,
    /// All of the metadata, as text
    #[arg(long)]
    tree: bool,
    #[command(flatten)]
    access: image_args::Access,
}

/// The output of `inspect --json`. Fields are added over time, never renamed or removed.
#[derive(Debug, Serialize)]
struct Description {
    image: String,
    manifest_digest: Digest,
    /// 5 or 6; 6 also of what a node makes of seekable layers.
    rafs_version: u8,
    /// `RAFS v6`, `RAFS v5` or `seekable layers`.
    origin: String,
    /// Bytes of all layers as stored.
    bytes_total: u64,
    bootstrap_bytes: u64,
    chunk_size: u32,
    /// Names in the file tree; hard links count each.
    names: u64,
    blobs: Vec<BlobDescription>,
}

#[derive(Debug, Serialize)]
struct BlobDescription {
    id: Digest,
    codec: String,
    stored_bytes: u64,
    decoded_bytes: u64,
    chunks: usize,
}

pub(crate) fn run(session: &Session, arguments: &Arguments) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let Arguments { image, access, .. } = arguments;
    let OpenedImage { name, image, .. } = &open::open(image, access, &session.config, &runtime)?;
    let bootstrap = &image.bootstrap;
    if arguments.tree {
        // `inspect --tree | head` closes the pipe early; that is no error.
        output::write(&rafs::dump(bootstrap));
        return Ok(());
    }
    let blobs = bootstrap.blobs().iter().map(|blob| BlobDescription {
        id: blob.id,
        codec: blob.codec.to_string(),
        stored_bytes: blob.stored_size,
        decoded_bytes: blob.decoded_size,
        chunks: blob.chunks.len(),
    });
    let description = Description {
        image: name.to_string(),
        manifest_digest: image.manifest_digest,
        rafs_version: bootstrap.version(),
        origin: bootstrap.origin().to_string(),
        bytes_total: image.bytes_total,
        bootstrap_bytes: bootstrap.bytes().len() as u64,
        chunk_size: bootstrap.chunk_size(),
        names: bootstrap.inode_count(),
        blobs: blobs.collect(),
    };
    if arguments.json {
        println!("{}", serde_json::to_string_pretty(&description)?);
    } else {
        print(&description);
    }
    Ok(())
}

fn print(description: &Description) {
    println!("{}", description.image);
    println!("  digest     {}", description.manifest_digest);
    println!("  stored     {}", BinaryBytes(description.bytes_total));
    println!(
        "  bootstrap  {}, {} for {} names, chunks of {}",
        description.origin,
        BinaryBytes(description.bootstrap_bytes),
        description.names,
        BinaryBytes(description.chunk_size.into())
    );
    for (index, blob) in description.blobs.iter().enumerate() {
        println!(
            "  blob {index:<4}  {}  {} chunks, {} stored ({}), {} decoded",
            blob.id,
            blob.chunks,
            BinaryBytes(blob.stored_bytes),
            blob.codec,
            BinaryBytes(blob.decoded_bytes)
        );
    }
}
