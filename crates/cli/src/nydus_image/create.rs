use std::{
    fs::File,
    io,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use lazuli_builder::{
    Built, Dictionary, EntryPath, Layer, LayerSource, Options, Whiteouts, build_layer, build_with,
};
use lazuli_image::{
    Algorithm, Codec, Digest,
    rafs::{Bootstrap, BootstrapOptions, write_bootstrap_with_prefetch},
};

use super::{
    Common, PrefetchPolicy, bootstrap,
    directory::{Directory, store},
    output::Output,
    prefetch::{find, patterns},
};
use crate::{image::scratch::Scratch, path_context::PathContext as _};

/// Create a RAFS v6 image of a directory or a tar file: that of one layer
#[derive(Debug, Args)]
pub(super) struct Arguments {
    /// Source from which to build
    #[arg(value_name = "SOURCE")]
    source: PathBuf,
    /// Conversion type
    #[arg(
        short = 't',
        long = "type",
        alias = "source-type",
        value_name = "type",
        default_value = "dir-rafs"
    )]
    kind: Kind,
    /// File path to save the generated RAFS metadata
    #[arg(
        short = 'B',
        long,
        value_name = "bootstrap",
        required_unless_present_any = ["blob_inline_meta", "blob_dir"],
        conflicts_with = "blob_inline_meta"
    )]
    bootstrap: Option<PathBuf>,
    /// File path to save the generated data blob, or a named pipe
    #[arg(
        short,
        long,
        value_name = "blob",
        required_unless_present = "blob_dir",
        conflicts_with = "blob_dir"
    )]
    blob: Option<PathBuf>,
    #[command(flatten)]
    directory: Directory,
    /// Put the metadata into the data blob
    #[arg(long, alias = "inline-bootstrap")]
    blob_inline_meta: bool,
    /// Features; every blob has a table of contents
    #[arg(long, value_name = "features")]
    features: Option<Feature>,
    /// Size of chunks: a power of two, 0x1000 to 0x1000000
    #[arg(long, value_name = "chunk-size", value_parser = size, default_value = "0x100000")]
    chunk_size: u32,
    /// Compress neighbouring small chunks in batches of up to this many bytes: a power of two,
    /// 0x1000 to the size of chunks; 0 for none
    #[arg(long, value_name = "batch-size", value_parser = size, default_value = "0")]
    batch_size: u32,
    /// Algorithm to compress chunks
    #[arg(long, value_name = "compressor", default_value = "zstd")]
    compressor: Compressor,
    /// Format version
    #[arg(short = 'v', long, value_name = "fs-version", default_value = "6")]
    fs_version: FsVersion,
    /// Reuse the chunks of an image, by its bootstrap: bootstrap=FILE
    #[arg(long, value_name = "chunk-dict")]
    chunk_dict: Option<String>,
    /// Align decoded chunks to 4K, as is always done
    #[arg(long)]
    aligned_chunk: bool,
    /// How to treat whiteouts: oci applies them, none keeps them, for `merge`
    #[arg(long, value_name = "whiteout-spec", default_value = "oci")]
    whiteout_spec: WhiteoutSpec,
    /// What readers fetch first
    #[arg(long, value_name = "prefetch-policy", default_value = "none")]
    prefetch_policy: PrefetchPolicy,
    /// File path to save the result in JSON format
    #[arg(short = 'J', long, value_name = "output-json")]
    output_json: Option<PathBuf>,
    #[command(flatten)]
    pub(super) common: Common,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Kind {
    Directory,
    DirRafs,
    TarRafs,
    TargzRafs,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Feature {
    BlobToc,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Compressor {
    None,
    #[value(name = "lz4_block")]
    Lz4Block,
    Zstd,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum FsVersion {
    #[value(name = "6")]
    V6,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum WhiteoutSpec {
    Oci,
    None,
}

/// A number as upstream spells it, in decimal or in hexadecimal.
fn size(text: &str) -> Result<u32, std::num::ParseIntError> {
    text.strip_prefix("0x").map_or_else(|| text.parse(), |digits| u32::from_str_radix(digits, 16))
}

pub(super) fn run(arguments: &Arguments) -> Result<()> {
    // At once: a reader of a pipe waits for a writer, also if an error means that nothing is
    // written.
    let output = BlobOutput::open(arguments)?;
    let prefetch = patterns(arguments.prefetch_policy)?;
    let scratch = Scratch::new()?;
    let mut options = Options::new(scratch.path());
    options.chunk_size = arguments.chunk_size;
    options.batch_size = arguments.batch_size;
    options.codec = match arguments.compressor {
        Compressor::None => Codec::None,
        Compressor::Lz4Block => Codec::Lz4,
        Compressor::Zstd => Codec::Zstd,
    };
    let mut dictionary = Dictionary::default();
    if let Some(option) = &arguments.chunk_dict {
        dictionary = Dictionary::of(&bootstrap::dictionary(option)?);
    }
    let layer = Layer {
        name: arguments.source.display().to_string(),
        stored_size: None,
        source: source(arguments)?,
    };
    if arguments.blob_inline_meta {
        let whiteouts = match arguments.whiteout_spec {
            WhiteoutSpec::Oci => Whiteouts::Applied,
            WhiteoutSpec::None => Whiteouts::Kept,
        };
        let first = |tree: &_| find(tree, &prefetch);
        let built = build_layer(dictionary, layer, whiteouts, &first, &options, &())?;
        output.take(&built.file, &built.id)?;
        let own = built.has_content.then_some(built.id);
        let blobs = built.known.into_iter().chain(own);
        return Output::new(None, blobs).made().write(arguments.output_json.as_deref());
    }
    if matches!(arguments.whiteout_spec, WhiteoutSpec::None) {
        bail!(
            "whiteouts stay only in a layer for `merge`: --whiteout-spec none takes --blob-inline-meta"
        );
    }
    let built = build_with(dictionary, vec![layer], &options, &(), &mut |_| {})?;
    for blob in &built.blobs {
        if let Some(own) = &blob.file {
            output.take(own, &blob.record.blob.id)?;
        }
    }
    let metadata = with_prefetch(&built, &options, &prefetch)?;
    let path = arguments.directory.write_bootstrap(arguments.bootstrap.as_deref(), &metadata)?;
    let blobs = built.blobs.iter().map(|blob| blob.record.blob.id);
    Output::new(Some(&path), blobs).made().write(arguments.output_json.as_deref())
}

fn source(arguments: &Arguments) -> Result<LayerSource> {
    let path = &arguments.source;
    Ok(match arguments.kind {
        Kind::Directory | Kind::DirRafs => LayerSource::Directory(path.clone()),
        Kind::TarRafs | Kind::TargzRafs => {
            let file = File::open(path);
            let file = file.cannot("read", path)?;
            LayerSource::Tar(Box::new(file))
        }
    })
}

/// Where the data blob goes.
enum BlobOutput<'a> {
    /// A file, or a pipe.
    File(&'a Path, File),
    Directory(&'a Path),
}

impl<'a> BlobOutput<'a> {
    fn open(arguments: &'a Arguments) -> Result<Self> {
        if let Some(directory) = arguments.directory.path() {
            return Ok(BlobOutput::Directory(directory));
        }
        let path = arguments.blob.as_deref().context("neither --blob nor --blob-dir")?;
        Ok(BlobOutput::File(path, File::create(path).cannot("write", path)?))
    }

    fn take(&self, made: &Path, id: &Digest) -> Result<()> {
        let mut content = File::open(made).cannot("read", made)?;
        match self {
            BlobOutput::File(path, file) => {
                io::copy(&mut content, &mut &*file).map(drop).cannot("write", path)
            }
            BlobOutput::Directory(directory) => store(directory, id, content).map(drop),
        }
    }
}

/// The bootstrap with a prefetch table.
fn with_prefetch(built: &Built, options: &Options, patterns: &[EntryPath]) -> Result<Vec<u8>> {
    if patterns.is_empty() || built.blobs.is_empty() {
        return Ok(built.bootstrap.clone());
    }
    let tree = Bootstrap::open(&built.bootstrap[..])?.tree()?;
    let records: Vec<_> = built.blobs.iter().map(|blob| blob.record.clone()).collect();
    let layout = BootstrapOptions { chunk_size: options.chunk_size, digest: Algorithm::Blake3 };
    Ok(write_bootstrap_with_prefetch(&tree, &records, &layout, &find(&tree, patterns))?)
}
