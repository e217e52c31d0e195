//! The source of a conversion in the terms of policies, and the statement about the conversion.

use std::{collections::BTreeMap, fs::File, io, path::PathBuf, sync::Arc};

use anyhow::{Context, Result};
use lazuli_image::{Algorithm, Digest, Trace};
use lazuli_policy::{Conversion, Converter, Gate, Indexing, Question, StatedLayer};
use lazuli_registry::{ImageName, Manifest, Options, Source};

use crate::convert::source::Opened;

/// A registry image that is converted, as a statement names it.
#[derive(Debug)]
pub(crate) struct Origin(lazuli_policy::Source);

impl Origin {
    /// Identifies `source`, if the policy of this machine admits it. `None` for sources that have
    /// no name in a registry, which policies don't cover.
    ///
    /// # Errors
    /// The policy refuses the image.
    pub(crate) async fn admit(
        policy: Option<PathBuf>,
        source: &Source,
        opened: &Opened,
        access: &Options,
    ) -> Result<Option<Self>> {
        let (Source::Image(name @ ImageName::Registry(_)), Some((manifest, _))) =
            (source, &opened.image)
        else {
            return Ok(None);
        };
        let gate = Arc::new(Gate::new(policy, None));
        gate.admit(Question::of(name, manifest, access)).await?;
        Ok(Some(Self::of(name, manifest)))
    }

    /// The source for `name`.
    pub(crate) fn of(name: &ImageName, manifest: &Manifest) -> Self {
        let name = name.to_string();
        let name = name.split('@').next().unwrap_or_default().to_owned();
        let (meant, manifest) = (manifest.index.as_ref(), manifest.digest);
        let digest = meant.map_or(manifest, |index| index.digest);
        Origin(lazuli_policy::Source { name, digest, manifest })
    }

    /// The statement that it is indexed, with these layers.
    ///
    /// # Errors
    /// This program cannot be read.
    pub(crate) fn indexed(self, layers: Vec<StatedLayer>) -> Result<Indexing> {
        Ok(Indexing { source: self.0, converter: this_program()?, layers })
    }

    /// The statement of its conversion.
    ///
    /// # Errors
    /// This program cannot be read.
    pub(crate) fn converted(
        self,
        options: BTreeMap<String, String>,
        trace: Option<&Trace>,
        reused: Vec<Digest>,
    ) -> Result<Conversion> {
        Ok(Conversion {
            source: self.0,
            converter: this_program()?,
            options,
            trace: trace.map(|trace| Algorithm::Sha256.digest(&trace.encode())),
            reused,
        })
    }
}

/// The converter in statements.
pub(crate) fn this_program() -> Result<Converter> {
    let program = digest_of("/proc/self/exe").context("cannot read this program")?;
    let version = env!("CARGO_PKG_VERSION").to_owned();
    Ok(Converter { version, program: Some(program) })
}

fn digest_of(path: &str) -> io::Result<Digest> {
    let mut hasher = Algorithm::Sha256.hasher();
    let mut file = File::open(path)?;
    let mut buffer = vec![0; 64 << 10];
    loop {
        match io::Read::read(&mut file, &mut buffer)? {
            0 => return Ok(hasher.finish()),
            read => hasher.update(&buffer[..read]),
        }
    }
}
