//! Where traces come from: this node, the registry, a file.

use std::{fs::File, io::Read as _, path::Path};

use anyhow::{Context, Result};
use lazuli_builder::bake::Hot;
use lazuli_image::{Trace, trace::MAX_BYTES};
use lazuli_runtime::prefetch::{self, Traces};
use tokio::runtime::Runtime;

use crate::{Session, open_image::LazyImage};

/// What is known of the starts of an image: what this node has seen, else what is beside the image.
pub(crate) fn find(session: &Session, image: &LazyImage, runtime: &Runtime) -> Result<Trace> {
    let manifest = image.image.manifest_digest;
    if let Some(trace) = Traces::of(&session.root).get(&manifest) {
        return Ok(trace);
    }
    let found = runtime.block_on(prefetch::find(&*image.repository, &manifest))?;
    let image = &image.name;
    found.with_context(|| format!("no start of {image} was recorded, here or beside the image"))
}

/// Reads what `lazuli trace show --save` wrote.
pub(crate) fn read(path: &Path) -> Result<Trace> {
    let read = || {
        let mut bytes = Vec::new();
        // One byte more than a trace can have, so that it is refused.
        File::open(path)?.take(MAX_BYTES as u64 + 1).read_to_end(&mut bytes)?;
        Ok(Trace::decode(&bytes)?)
    };
    let read: Result<Trace> = read();
    read.with_context(|| format!("cannot use {}", path.display()))
}

/// Says what a trace knows that the image does not have.
pub(crate) fn report_unknown(hot: &Hot, image: &str) {
    if hot.unknown > 0 {
        println!("  ignored   {} hot chunks of the trace that are not in {image}", hot.unknown);
    }
}
