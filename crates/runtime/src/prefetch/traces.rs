//! Stores traces: on the node, and beside the image in its registry.
//!
//! In the registry, a trace is an artifact whose subject is the image's manifest (OCI 1.1,
//! *referrers*). An annotation of the artifact's manifest holds all of it: registries repeat
//! annotations in their lists of referrers, so one request both finds and fetches it.

use std::{collections::BTreeMap, io, ops::Range, path::Path};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use lazuli_image::{Digest, Stored, Trace, oci::Descriptor, plan::Planner};
use lazuli_registry::{Referrers, RegistryError};

use super::small_files::SmallFiles;

/// The type of artifacts with traces.
pub const ARTIFACT_TYPE: &str = "application/vnd.lazuli.trace.v1";

/// Its annotation with the trace, in base64.
pub const ANNOTATION: &str = "vnd.lazuli.trace";

/// Limit of artifacts to read for one image.
const ARTIFACTS: usize = 16;

/// The traces that this node keeps.
#[derive(Debug)]
pub struct Traces(SmallFiles);

impl Traces {
    /// Those in the state directory `root`.
    pub fn of(root: &Path) -> Self {
        Traces(SmallFiles(root.join("traces")))
    }

    /// The trace of an image, if there is a valid one.
    pub fn get(&self, manifest: &Digest) -> Option<Trace> {
        let trace = Trace::decode(&self.0.get(manifest)?);
        let path = self.0.path(manifest);
        trace.inspect_err(|error| tracing::warn!(path = %path.display(), %error, "ignored")).ok()
    }

    /// Adds a start to the trace of an image. `saw` tells for which blobs the start's touches were
    /// visible, and `stored` returns the place of a chunk by its number.
    pub(crate) fn add(
        &self,
        manifest: &Digest,
        start: &Trace,
        saw: impl Fn(&Digest) -> bool,
        stored: impl Fn(&Digest, u32) -> Option<Range<Stored>>,
    ) -> io::Result<Trace> {
        let mut trace = match self.get(manifest) {
            Some(mut known) => {
                known.merge(start, saw);
                known
            }
            None => start.clone(),
        };
        trace.locate(Planner::NODE.gap, stored);
        self.put(manifest, &trace)?;
        Ok(trace)
    }

    /// Replaces the trace of an image.
    pub(crate) fn put(&self, manifest: &Digest, trace: &Trace) -> io::Result<()> {
        self.0.put(manifest, &trace.encode())
    }
}

/// The trace of an image in its registry.
pub async fn find(
    repository: &dyn Referrers,
    manifest: &Digest,
) -> Result<Option<Trace>, RegistryError> {
    let artifacts = repository.referrers(manifest, Some(ARTIFACT_TYPE)).await?;
    let mut found: Option<Trace> = None;
    for artifact in artifacts.iter().take(ARTIFACTS) {
        match read(artifact) {
            Some(Ok(trace)) => match &mut found {
                Some(found) => found.merge(&trace, |blob| trace.blobs().contains(blob)),
                None => found = Some(trace),
            },
            Some(Err(problem)) => tracing::warn!(artifact = %artifact.digest, problem, "ignored"),
            None => {}
        }
    }
    Ok(found)
}

fn read(artifact: &Descriptor) -> Option<Result<Trace, String>> {
    let text = artifact.annotations.get(ANNOTATION)?;
    let bytes = STANDARD.decode(text).map_err(|error| format!("annotation {ANNOTATION}: {error}"));
    let trace = |bytes: Vec<u8>| Trace::decode(&bytes).map_err(|error| error.to_string());
    Some(bytes.and_then(trace))
}

/// Puts a trace beside its image.
pub async fn publish(
    repository: &dyn Referrers,
    manifest: &Descriptor,
    trace: &Trace,
) -> Result<Digest, RegistryError> {
    let annotation = (ANNOTATION.to_owned(), STANDARD.encode(trace.encode()));
    repository.push_referrer(manifest, ARTIFACT_TYPE, &BTreeMap::from([annotation]), None).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keeps_what_starts_have_in_common() {
        let root = tempfile::tempdir().unwrap();
        let traces = Traces::of(root.path());
        let (image, blob) = (Digest::sha256([1; 32]), Digest::sha256([2; 32]));
        assert_eq!(traces.get(&image), None);
        let start = |chunks: &[u32]| {
            Trace::of_start(vec![blob], chunks.iter().map(|number| (0, *number, 0)))
        };
        traces.add(&image, &start(&[1, 2]), |_| true, |_, _| None).unwrap();
        traces.add(&image, &start(&[2, 3]), |_| true, |_, _| None).unwrap();
        let known = traces.get(&image).unwrap();
        assert_eq!(known.starts(), 2);
        assert_eq!(known.touches().iter().map(|t| t.number).collect::<Vec<_>>(), [1, 2, 3]);
        std::fs::write(root.path().join("traces").join(image.hex()), b"lazuli trace 2\n").unwrap();
        assert_eq!(traces.get(&image), None);
    }
}
