//! Bootstraps as files.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use clap::Args;
use lazuli_image::{
    Algorithm, Digest,
    rafs::{self, Bootstrap, v5},
};

/// A bootstrap that a verb looks at.
#[derive(Debug, Args)]
pub(super) struct Given {
    /// File path of RAFS metadata
    #[arg(value_name = "BOOTSTRAP", required_unless_present = "option")]
    argument: Option<PathBuf>,
    /// The same
    #[arg(
        id = "option",
        short = 'B',
        long = "bootstrap",
        value_name = "bootstrap",
        conflicts_with = "argument"
    )]
    option: Option<PathBuf>,
}

impl Given {
    pub(super) fn path(&self) -> &Path {
        self.argument.as_deref().or(self.option.as_deref()).unwrap_or(Path::new(""))
    }

    /// Reads the bootstrap. One that was extracted from its blob gets an id that no other blob has,
    /// unless the file is named after the right one.
    pub(super) fn read(&self) -> Result<Bootstrap<Vec<u8>>> {
        let path = self.path();
        let context = || format!("cannot read the bootstrap {}", path.display());
        let bytes = fs::read(path).with_context(context)?;
        if v5::is_v5(&bytes) {
            let translated = v5::translate(&bytes).with_context(context)?;
            return Bootstrap::open(translated).with_context(context);
        }
        let id = named(path).unwrap_or_else(|| Algorithm::Sha256.digest(&bytes));
        parse(bytes, Some(id)).with_context(context)
    }
}

/// Reads the bootstrap of a layer, which is called as upstream calls it if the layer has content:
/// by the SHA-256 of the layer's blob.
pub(super) fn of_layer(path: &Path) -> Result<Bootstrap<Vec<u8>>> {
    let context = || format!("cannot read the bootstrap {}", path.display());
    parse(fs::read(path).with_context(context)?, named(path)).with_context(context)
}

fn parse(mut bytes: Vec<u8>, id: Option<Digest>) -> Result<Bootstrap<Vec<u8>>> {
    if let Some(id) = id {
        rafs::set_id(&mut bytes, &id)?;
    }
    Ok(Bootstrap::open(bytes)?)
}

/// The digest that a file is called by, up to the first dot.
fn named(path: &Path) -> Option<Digest> {
    let name = path.file_name()?.to_str()?;
    Digest::from_hex(Algorithm::Sha256, name.split('.').next()?)
}

/// A chunk dictionary, as upstream spells it: the bootstrap of an image.
pub(super) fn dictionary(option: &str) -> Result<Bootstrap<Vec<u8>>> {
    let path = Path::new(option.strip_prefix("bootstrap=").unwrap_or(option));
    let context = || format!("cannot use the chunk dictionary {}", path.display());
    parse(fs::read(path).with_context(context)?, None).with_context(context)
}
