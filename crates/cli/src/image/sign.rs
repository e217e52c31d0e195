//! `--sign`: signatures beside what is stored, in every form that is in use.
//!
//! ```text
//! referrer of the image: a Sigstore bundle          cosign 3
//! tag sha256-HEX.sig: a simple signing payload      cosign 2, podman, admission controllers
//! referrer of the image: what it was made from      nodes that know the converter's key
//! ```
//! All of them are stored before the image's name is. A digest that this key has signed is not
//! signed again, so that repeating a conversion stores nothing new.

use std::{
    fs,
    io::Read as _,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};
use clap::Args;
use lazuli_image::oci::Descriptor;
use lazuli_policy::{
    Conversion, Indexing, LayerIndexing, Payload, Statement,
    key::KEY_LIMIT,
    media_type,
    sign::{SignatureManifest, SignedPayload, SigningKey, attach},
};
use lazuli_registry::{BlobContent, Document, ImageName, Options, PushBy, Reference, Repository};

use crate::path_context::PathContext as _;

/// With which key an image is signed, and for which name.
#[derive(Debug, Args)]
pub(crate) struct Sign {
    /// Sign the image with this private key: PEM with PKCS#8, or a cosign.key, whose password is
    /// taken from $COSIGN_PASSWORD. cosign, podman and `policy.toml` verify it with the public key
    #[arg(long, value_name = "KEY")]
    sign: Option<PathBuf>,
    /// The name that the signature is for, if the image goes elsewhere afterwards [default:
    /// TARGET's repository]
    #[arg(long, value_name = "NAME", requires = "sign")]
    sign_as: Option<String>,
}

impl Sign {
    /// The options of a command that has options of its own.
    pub(crate) fn with(sign: Option<PathBuf>) -> Self {
        Sign { sign, sign_as: None }
    }

    /// Makes the signer of an image that goes to `target`; `None` without `--sign`.
    ///
    /// # Errors
    /// The key cannot be used, or there is no name that a signature could be for.
    pub(crate) fn signer(&self, target: &ImageName, access: &Options) -> Result<Option<Signer>> {
        let Some(path) = &self.sign else { return Ok(None) };
        let key = read_key(path).cannot("sign with", path)?;
        let reference = match (&self.sign_as, target) {
            (Some(name), _) => signed_name(name)?,
            (None, ImageName::Registry(reference)) => repository(reference),
            (None, ImageName::Layout(_)) => bail!(
                "a signature is for a name, and {target} is none that others know: say where the image goes with --sign-as NAME"
            ),
        };
        let (target, access) = (target.clone(), access.clone());
        Ok(Some(Signer { key, reference, target, access, conversion: None }))
    }
}

fn read_key(path: &Path) -> Result<SigningKey> {
    let mut pem = Vec::new();
    // One byte more than a key can have, so that it is refused.
    fs::File::open(path)?.take(KEY_LIMIT as u64 + 1).read_to_end(&mut pem)?;
    let password = std::env::var_os("COSIGN_PASSWORD");
    let password = password.as_ref().map(|password| password.as_encoded_bytes());
    Ok(SigningKey::from_pem(&pem, password)?)
}

/// `--sign-as`: a repository, or one of its tags.
fn signed_name(text: &str) -> Result<String> {
    let name: Reference = text.parse()?;
    if name.to_string().contains('@') {
        bail!("--sign-as {text}: a signature has the image's digest anyway; leave it out");
    }
    let tag = ImageName::Registry(name.clone()).tag().unwrap_or_default();
    let tag = if text.ends_with(&format!(":{tag}")) { format!(":{tag}") } else { String::new() };
    Ok(repository(&name) + &tag)
}

/// The repository as cosign spells it.
fn repository(reference: &Reference) -> String {
    let registry = match reference.registry() {
        "docker.io" => "index.docker.io",
        registry => registry,
    };
    format!("{registry}/{}", reference.repository())
}

/// Signs the documents of one place.
#[derive(Debug)]
pub(crate) struct Signer {
    key: SigningKey,
    /// The name that signatures are for.
    reference: String,
    target: ImageName,
    access: Options,
    /// How the lazy image was made, if that is to be stated.
    conversion: Option<Conversion>,
}

impl Signer {
    /// States with the signature of the lazy image how it was made.
    pub(crate) fn states(&mut self, conversion: Conversion) {
        self.conversion = Some(conversion);
    }

    /// Puts signatures beside the manifest of a lazy image, which `to` has, and the statement how
    /// it was made.
    pub(crate) async fn sign_lazy(&self, to: &dyn Repository, document: &Document) -> Result<()> {
        self.sign(to, document).await?;
        let Some(conversion) = &self.conversion else { return Ok(()) };
        let subject = describe(document);
        let statement = Statement::converted(self.reference.clone(), subject.digest, conversion)?;
        let attached = self.attach(to, &subject, &statement).await;
        attached.with_context(|| format!("cannot state what {} was made from", self.target))
    }

    /// Attaches to the index with the manifest `document`, which `to` has, the statement about the
    /// image it belongs to.
    pub(crate) async fn state_index(
        &self,
        to: &dyn Repository,
        document: &Document,
        indexing: &Indexing,
    ) -> Result<()> {
        let subject = describe(document);
        let statement = Statement::indexed(self.reference.clone(), subject.digest, indexing)?;
        let attached = self.attach(to, &subject, &statement).await;
        attached.with_context(|| format!("cannot state what the index of {} is", self.target))
    }

    /// States beside the manifest `document`, which `to` has, of which layer it has the index.
    pub(crate) async fn state_layer(
        &self,
        to: &dyn Repository,
        document: &Document,
        indexing: &LayerIndexing,
    ) -> Result<()> {
        let subject = describe(document);
        let statement = Statement::indexed_layer(self.reference.clone(), subject.digest, indexing)?;
        let attached = self.attach(to, &subject, &statement).await;
        let layer = indexing.layer.layer;
        attached.with_context(|| format!("cannot state what the index of layer {layer} is"))
    }

    /// Puts signatures beside `document`, which `to` has.
    pub(crate) async fn sign(&self, to: &dyn Repository, document: &Document) -> Result<()> {
        let subject = describe(document);
        let statement = Statement::signed(Some(self.reference.clone()), subject.digest);
        let signed = async {
            self.attach(to, &subject, &statement).await?;
            self.sign_payload(&subject).await
        };
        signed.await.with_context(|| format!("cannot sign {} in {}", subject.digest, self.target))
    }

    /// Makes a bundle with `statement` a referrer of `subject`.
    async fn attach(
        &self,
        to: &dyn Repository,
        subject: &Descriptor,
        statement: &Statement,
    ) -> Result<()> {
        Ok(attach(to, subject, statement, &self.key).await?)
    }

    /// Adds a signature to those under the `.sig` tag of `subject`.
    async fn sign_payload(&self, subject: &Descriptor) -> Result<()> {
        let tag = media_type::signature_tag(&subject.digest);
        let name = self.target.tagged(&tag).context("no image there can have a tag")?;
        let place = lazuli_registry::open(&name, &self.access)?;
        let mut manifest = match place.document(None).await {
            Ok(document) => {
                let parsed = SignatureManifest::parse(&document.raw);
                parsed.with_context(|| format!("{name} is there"))?
            }
            Err(error) if error.is_missing() => SignatureManifest::default(),
            Err(error) => return Err(error.into()),
        };
        let payload = Payload { reference: self.reference.clone(), digest: subject.digest };
        if manifest.has(&payload.to_json(), self.key.public()) {
            return Ok(());
        }
        let signed = SignedPayload::new(&self.key, &payload)?;
        manifest.add(&signed);
        let document = Document::new(manifest.to_json(), lazuli_image::oci::media_type::MANIFEST);
        for content in [signed.payload, manifest.config()] {
            let digest = lazuli_image::Algorithm::Sha256.digest(&content);
            let (size, content) = (content.len() as u64, BlobContent::Bytes(content.into()));
            place.push_blob(&digest, size, content, None, &|_| {}).await?;
        }
        place.push_document(&document, PushBy::Tag).await?;
        Ok(())
    }
}

fn describe(document: &Document) -> Descriptor {
    let Document { raw, digest, media_type } = document;
    Descriptor::plain(media_type, *digest, raw.len() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_spelled_as_cosign_spells_them() {
        for (text, expected) in [
            ("debian", "index.docker.io/library/debian"),
            ("debian:12", "index.docker.io/library/debian:12"),
            ("localhost:5000/app", "localhost:5000/app"),
            ("localhost:5000/app:latest", "localhost:5000/app:latest"),
            ("docker://quay.io/org/app:1", "quay.io/org/app:1"),
        ] {
            assert_eq!(signed_name(text).unwrap(), expected, "{text}");
        }
        let digest = "0".repeat(64);
        let error = signed_name(&format!("app@sha256:{digest}")).unwrap_err().to_string();
        assert!(error.contains("leave it out"), "{error}");
    }
}
