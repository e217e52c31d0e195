//! Labels of Prepare requests, in which containerd describes a layer.

use std::{borrow::Cow, collections::BTreeMap};

use crate::{Image, Login, SnapshotError};

/// Labels of a snapshot.
pub(crate) type Labels = BTreeMap<String, String>;

/// The name under which containerd will look for the unpacked layer: its chain id, as the image's
/// configuration claims, see [`chain_id`].
pub(crate) const TARGET: &str = "containerd.io/snapshot.ref";

/// What BuildKit writes before the chain id of a layer, with `-` for `:`.
const BUILDKIT: &str = "buildkit-layer-snapshot-v1-";

const IMAGE: &str = "containerd.io/snapshot/cri.image-ref";
const MANIFEST: &str = "containerd.io/snapshot/cri.manifest-digest";

/// Credentials of the pull, from clients that pass them on: a user and a password, or a refresh
/// token alone.
const USER: &str = "containerd.io/snapshot/pullusername";
const SECRET: &str = "containerd.io/snapshot/pullsecret";

/// Annotations of layers of lazy images, which containerd passes on.
const DATA: &str = "containerd.io/snapshot/nydus-blob";
const BOOTSTRAP: &str = "containerd.io/snapshot/nydus-bootstrap";

/// How to handle a layer.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Layer {
    /// containerd unpacks it, or the request is for no layer at all.
    Ordinary,
    /// A layer of an image that may be shown as it is; otherwise containerd unpacks it.
    Plain {
        /// See [`TARGET`].
        target: String,
        /// The image.
        image: Image,
    },
    /// Data of a lazy image, which arrives as it is read: nothing to do.
    Data {
        /// See [`TARGET`].
        target: String,
        /// The image.
        image: Image,
    },
    /// The bootstrap of a lazy image: the image is to be mounted.
    Bootstrap {
        /// See [`TARGET`].
        target: String,
        /// The image.
        image: Image,
    },
}

impl Layer {
    /// Parses the labels of a Prepare request for the snapshot `key`.
    ///
    /// containerd also labels the snapshots of pods with the pods' own annotations, which may look
    /// like a layer's. Only a layer is prepared under a key that ends with its chain id:
    /// `NAMESPACE/NUMBER/extract-UNIQUE CHAIN-ID`. No pod chooses the key of its snapshots.
    ///
    /// # Errors
    /// A layer of a lazy image that is not named, or not by a digest: whether the layer is what it
    /// claims to be could not be found out.
    pub(crate) fn of(key: &str, labels: &Labels) -> Result<Self, SnapshotError> {
        let Some(target) = labels.get(TARGET).cloned() else { return Ok(Layer::Ordinary) };
        if key.rsplit_once(' ').is_none_or(|(_, of)| of != chain_id(&target)) {
            return Ok(Layer::Ordinary);
        }
        let manifest = manifest_digest(&target, labels);
        let has = |label| labels.get(label).is_some_and(|value| value == "true");
        let lazy: fn(String, Image) -> Layer = match () {
            () if has(DATA) => |target, image| Layer::Data { target, image },
            () if has(BOOTSTRAP) => |target, image| Layer::Bootstrap { target, image },
            () => {
                let (Some(reference), Some(_)) = (labels.get(IMAGE), &manifest) else {
                    return Ok(Layer::Ordinary);
                };
                let image = Image {
                    reference: reference.clone(),
                    manifest_digest: manifest,
                    layers: None,
                    login: login(labels),
                };
                return Ok(Layer::Plain { target, image });
            }
        };
        let expect = |label: &str, value: Option<String>| {
            value.ok_or_else(|| {
                SnapshotError::Invalid(format!(
                    "layer {target} is of a lazy image, and there is no label {label} that says of which: expected \
                     disable_snapshot_annotations = false in containerd's configuration, for other clients than \
                     Kubernetes see docs/clients.md"
                ))
            })
        };
        let reference = expect(IMAGE, labels.get(IMAGE).cloned())?;
        let manifest_digest = Some(expect(MANIFEST, manifest)?);
        let (layers, login) = (None, login(labels));
        Ok(lazy(target.clone(), Image { reference, manifest_digest, layers, login }))
    }
}

/// The chain id in the name of a layer's snapshot, which is the name itself but for BuildKit.
pub(crate) fn chain_id(name: &str) -> Cow<'_, str> {
    match name.strip_prefix(BUILDKIT) {
        Some(rest) => rest.replacen('-', ":", 1).into(),
        None => name.into(),
    }
}

/// The digest of the manifest that a layer is in. BuildKit gives it in the reference alone; other
/// clients may have that of an index there.
fn manifest_digest(target: &str, labels: &Labels) -> Option<String> {
    let in_reference = || {
        let reference = labels.get(IMAGE).filter(|_| target.starts_with(BUILDKIT))?;
        Some(reference.rsplit_once('@')?.1.to_owned())
    };
    labels.get(MANIFEST).cloned().or_else(in_reference)
}

/// The image that a layer's labels name, for messages.
pub(crate) fn image_of(labels: &Labels) -> &str {
    labels.get(IMAGE).map_or("an unknown image", String::as_str)
}

fn login(labels: &Labels) -> Option<Login> {
    let secret = labels.get(SECRET).filter(|secret| !secret.is_empty())?.clone();
    let user = labels.get(USER).cloned().unwrap_or_default();
    Some(Login { user, secret })
}

/// The labels to keep: containerd removes one by making it empty, and every client may see them.
pub(crate) fn kept(mut labels: Labels) -> Labels {
    labels.retain(|name, value| !value.is_empty() && !matches!(name.as_str(), USER | SECRET));
    labels
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buildkits_layers_are_told_by_name_and_reference() {
        let of = |key: &str, reference: &str, target: &str| {
            let pairs = [(TARGET, target), (DATA, "true"), (IMAGE, reference)];
            let labels = pairs.map(|(name, value)| (name.to_owned(), value.to_owned()));
            Layer::of(key, &labels.into())
        };
        let (key, target) = ("b/1/tmp-x sha256:1", "buildkit-layer-snapshot-v1-sha256-1");
        let image = Image {
            reference: "r/a:1@sha256:2".to_owned(),
            manifest_digest: Some("sha256:2".to_owned()),
            layers: None,
            login: None,
        };
        let expected = Layer::Data { target: target.to_owned(), image };
        assert_eq!(of(key, "r/a:1@sha256:2", target).unwrap(), expected);
        assert_eq!(of("b/1/tmp-x sha256:2", "r/a@sha256:2", target).unwrap(), Layer::Ordinary);
        // A tag alone may have moved, and a digest may be that of an index elsewhere.
        of(key, "r/a:1", target).unwrap_err();
        of(key, "r/a@sha256:2", "sha256:1").unwrap_err();
        assert_eq!(chain_id(target), "sha256:1");
        assert_eq!(chain_id("sha256:1"), "sha256:1");
    }

    #[test]
    fn layers_are_told_by_their_labels() {
        let labels = |pairs: &[(&str, &str)]| {
            pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect::<Labels>()
        };
        let target = || "sha256:1".to_owned();
        let image = |login: Option<(&str, &str)>| Image {
            reference: "r/a:1".to_owned(),
            manifest_digest: Some("d".to_owned()),
            layers: None,
            login: login.map(|(user, secret)| Login { user: user.into(), secret: secret.into() }),
        };
        let bootstrap =
            [(TARGET, "sha256:1"), (BOOTSTRAP, "true"), (IMAGE, "r/a:1"), (MANIFEST, "d")];
        for (pairs, expected) in [
            (&[][..], Layer::Ordinary),
            (&[(TARGET, "sha256:1"), (IMAGE, "r/a:1")], Layer::Ordinary),
            (
                &[(TARGET, "sha256:1"), (IMAGE, "r/a:1"), (MANIFEST, "d")],
                Layer::Plain { target: target(), image: image(None) },
            ),
            // A container's snapshot may inherit labels; without a target it is no layer.
            (&[(DATA, "true")], Layer::Ordinary),
            (&[(TARGET, "sha256:1"), (DATA, "false")], Layer::Ordinary),
            (
                &[(TARGET, "sha256:1"), (DATA, "true"), (IMAGE, "r/a:1"), (MANIFEST, "d")],
                Layer::Data { target: target(), image: image(None) },
            ),
            (&bootstrap, Layer::Bootstrap { target: target(), image: image(None) }),
            (
                &[&bootstrap[..], &[(USER, "joe"), (SECRET, "s")]].concat(),
                Layer::Bootstrap { target: target(), image: image(Some(("joe", "s"))) },
            ),
            (
                &[&bootstrap[..], &[(SECRET, "s")]].concat(),
                Layer::Bootstrap { target: target(), image: image(Some(("", "s"))) },
            ),
            (
                &[&bootstrap[..], &[(USER, "joe"), (SECRET, "")]].concat(),
                Layer::Bootstrap { target: target(), image: image(None) },
            ),
        ] {
            let key = "k8s.io/7/extract-1-a sha256:1";
            assert_eq!(Layer::of(key, &labels(pairs)).unwrap(), expected, "{pairs:?}");
            // Snapshots of pods and containers.
            for key in ["k8s.io/7/0123abc", "k8s.io/7/extract-1-a sha256:2", "sha256:1"] {
                assert_eq!(Layer::of(key, &labels(pairs)).unwrap(), Layer::Ordinary, "{pairs:?}");
            }
        }
        let secrets = labels(&[(USER, "joe"), (SECRET, "s"), ("a", ""), ("b", "c")]);
        assert_eq!(kept(secrets), labels(&[("b", "c")]));
        let shown = format!("{:?}", image(Some(("joe", "hush"))));
        assert!(!shown.contains("joe") && !shown.contains("hush"), "{shown}");
        for kind in [DATA, BOOTSTRAP] {
            for (known, missing) in [(MANIFEST, "cri.image-ref"), (IMAGE, "cri.manifest-digest")] {
                let pairs = [(TARGET, "sha256:1"), (kind, "true"), (known, "x")];
                let key = "default/1/extract-1-a sha256:1";
                let error = Layer::of(key, &labels(&pairs)).unwrap_err().to_string();
                assert!(error.contains("layer sha256:1") && error.contains(missing), "{error}");
            }
        }
    }
}
