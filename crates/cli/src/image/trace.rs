//! Loads traces: from this node, the registry, or a file.

use std::{fs::File, io::Read as _, path::Path};

use anyhow::{Context, Result};
use lazuli_image::{Trace, trace::MAX_BYTES};
use lazuli_runtime::prefetch::{self, Traces};
use tokio::runtime::Runtime;

use crate::{image::open::OpenedImage, path_context::PathContext as _};

/// The trace of an image: that of this node's state directory `root`, else the one beside the
/// image.
pub(crate) fn find(root: &Path, image: &OpenedImage, runtime: &Runtime) -> Result<Trace> {
    let manifest = image.image.manifest_digest;
    if let Some(trace) = Traces::of(root).get(&manifest) {
        return Ok(trace);
    }
    let found = runtime.block_on(prefetch::find(&*image.repository, &manifest))?;
    let image = &image.name;
    found.with_context(|| format!("no start of {image} was recorded, here or beside the image"))
}

/// Reads a trace that `lazuli trace show --save` wrote.
pub(crate) fn read(path: &Path) -> Result<Trace> {
    let read = || {
        let mut bytes = Vec::new();
        // One byte more than a trace can have, so that it is refused.
        File::open(path)?.take(MAX_BYTES as u64 + 1).read_to_end(&mut bytes)?;
        Ok(Trace::decode(&bytes)?)
    };
    let read: Result<Trace> = read();
    read.cannot("use", path)
}
