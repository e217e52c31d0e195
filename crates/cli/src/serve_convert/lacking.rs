//! Which lazy form of a tag a registry lacks, as it answers now.

use lazuli_image::{
    Digest,
    oci::{Descriptor, Platform, media_type},
};
use lazuli_policy::media_type::BUNDLE;
use lazuli_registry::{
    Document, Manifest, Parsed, RegistryError, Repository, fetch_index, listed_indexes,
    manifest::IMAGE_TYPES,
};

use super::Form;

/// What is to be done for a tag.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Lacking {
    /// Nothing, and why.
    Nothing(&'static str),
    /// Indexes beside these manifests.
    Indexes(Vec<Digest>),
    /// The lazy form of this manifest, under the same tag.
    LazyForm(Digest),
}

/// Most manifests of an index that are looked at.
const MANIFESTS: usize = 64;

/// Looks at the tag that `repository` was opened at. Returns what it names, too.
///
/// # Errors
/// The registry cannot be asked.
pub(super) async fn find(
    repository: &dyn Repository,
    form: Form,
    is_signed: bool,
) -> Result<(Option<Digest>, Lacking), RegistryError> {
    match repository.document(None).await {
        Ok(document) => {
            let named = document.digest;
            Ok((Some(named), of(repository, &document, form, is_signed).await?))
        }
        Err(error) if error.is_missing() => Ok((None, Lacking::Nothing("there is no such tag"))),
        Err(error) => Err(error),
    }
}

async fn of(
    repository: &dyn Repository,
    document: &Document,
    form: Form,
    is_signed: bool,
) -> Result<Lacking, RegistryError> {
    let place = repository.describe();
    let entries = match document.parse(&place)? {
        Parsed::Image(manifest) if !is_image(&manifest) => {
            return Ok(Lacking::Nothing("it is lazy, or no image"));
        }
        Parsed::Image(manifest) if form == Form::Both => {
            return Ok(Lacking::LazyForm(manifest.digest));
        }
        Parsed::Image(manifest) => {
            return Ok(match has_index(repository, &manifest, is_signed).await? {
                true => Lacking::Nothing("it has an index"),
                false => Lacking::Indexes(vec![manifest.digest]),
            });
        }
        Parsed::Index(_, entries) => entries,
    };
    if entries.iter().any(is_lazy) {
        return Ok(Lacking::Nothing("it has a lazy form"));
    }
    // Converting would leave one of several platforms under the tag, and no attestations.
    let mut lacking = Vec::new();
    for entry in entries.iter().filter(|entry| is_for_linux(entry)).take(MANIFESTS) {
        let document = repository.document(Some(&entry.digest)).await?;
        let Parsed::Image(manifest) = document.parse(&place)? else { continue };
        if is_image(&manifest) && !has_index(repository, &manifest, is_signed).await? {
            lacking.push(manifest.digest);
        }
    }
    Ok(match lacking.is_empty() {
        true => Lacking::Nothing("it has indexes, or no images"),
        false => Lacking::Indexes(lacking),
    })
}

fn is_lazy(entry: &Descriptor) -> bool {
    let platform = entry.runs_on();
    platform.is_some_and(|platform| platform.features.iter().any(|it| it == Platform::LAZY))
}

/// Attestations of BuildKit, and lists of referrers, name no such platform.
fn is_for_linux(entry: &Descriptor) -> bool {
    IMAGE_TYPES.contains(&entry.media_type.as_str())
        && entry.platform.as_ref().is_some_and(|platform| platform.os == "linux")
}

/// Returns whether this is an ordinary image: charts, caches and signatures have tags as well.
fn is_image(manifest: &Manifest) -> bool {
    let manifest = &manifest.parsed;
    let config = manifest.config.media_type.as_str();
    let is_layer = |layer: &Descriptor| {
        let kind = &layer.media_type;
        let prefixes = ["application/vnd.oci.image.layer.", "application/vnd.docker.image.rootfs."];
        prefixes.iter().any(|prefix| kind.starts_with(prefix)) && !kind.contains("+encrypted")
    };
    [media_type::CONFIG, media_type::DOCKER_CONFIG].contains(&config)
        && manifest.artifact_type.is_none()
        && manifest.subject.is_none()
        && manifest.lazy_base().is_none()
        && !manifest.layers.is_empty()
        && manifest.layers.iter().all(is_layer)
}

/// Returns whether the manifest has an index, with a statement if there has to be one: a job that
/// was interrupted may have stored the index alone.
async fn has_index(
    repository: &dyn Repository,
    manifest: &Manifest,
    is_signed: bool,
) -> Result<bool, RegistryError> {
    for entry in listed_indexes(repository, &manifest.digest, None).await {
        if fetch_index(repository, manifest, &entry).await.is_none() {
            continue;
        }
        if !is_signed || !repository.referrers(&entry.digest, Some(BUNDLE)).await?.is_empty() {
            return Ok(true);
        }
    }
    Ok(false)
}
