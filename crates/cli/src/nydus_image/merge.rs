use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use lazuli_builder::{SourceImage, TreeOf, combine};

use super::{
    Common, PrefetchPolicy, bootstrap,
    directory::Directory,
    output::Output,
    prefetch::{find, patterns},
};

/// Merge the bootstraps of layers, lowest first, into that of an image
#[derive(Debug, Args)]
pub(super) struct Arguments {
    /// Bootstraps, each in a file that is named by the SHA-256 of its layer's blob
    #[arg(value_name = "SOURCE", required = true)]
    sources: Vec<PathBuf>,
    /// Output path of the merged bootstrap
    #[arg(short = 'B', long, value_name = "bootstrap", required_unless_present = "blob_dir")]
    bootstrap: Option<PathBuf>,
    #[command(flatten)]
    directory: Directory,
    /// The chunk dictionary of the layers: each names its blobs itself
    #[arg(long, value_name = "chunk-dict")]
    chunk_dict: Option<String>,
    /// The bootstrap of an image that the layers go on
    #[arg(long, value_name = "parent-bootstrap")]
    parent_bootstrap: Option<PathBuf>,
    /// What readers fetch first
    #[arg(long, value_name = "prefetch-policy", default_value = "none")]
    prefetch_policy: PrefetchPolicy,
    /// File path to save the result in JSON format
    #[arg(short = 'J', long, value_name = "output-json")]
    output_json: Option<PathBuf>,
    #[command(flatten)]
    pub(super) common: Common,
}

pub(super) fn run(arguments: &Arguments) -> Result<()> {
    let patterns = patterns(arguments.prefetch_policy)?;
    if let Some(option) = &arguments.chunk_dict {
        bootstrap::dictionary(option)?;
    }
    let parent = arguments.parent_bootstrap.iter().map(|path| (path.as_path(), TreeOf::Image));
    let layers = arguments.sources.iter().map(|path| (path.as_path(), TreeOf::Layer));
    let read = |(path, of): (_, _)| Ok((path, of, bootstrap::of_layer(path)?));
    let images = parent.chain(layers).map(read).collect::<Result<Vec<_>>>()?;
    let sources = images.iter().map(|(path, of, image)| SourceImage {
        name: path.display().to_string(),
        image,
        of: *of,
    });
    let combined = combine(&sources.collect::<Vec<_>>())?;
    let prefetch = match combined.blobs[..] {
        [] => Vec::new(),
        _ => find(&combined.tree, &patterns),
    };
    let bytes = combined.bootstrap(&prefetch)?;
    let path = arguments.directory.write_bootstrap(arguments.bootstrap.as_deref(), &bytes)?;
    let blobs = combined.blobs.iter().map(|record| record.blob.id);
    Output::new(Some(&path), blobs).made().write(arguments.output_json.as_deref())
}
