//! Labels of Prepare requests, in which containerd describes a layer.

use std::collections::BTreeMap;

use crate::{Image, Login, SnapshotError};

/// Labels of a snapshot.
pub(crate) type Labels = BTreeMap<String, String>;

/// The name under which containerd will look for the unpacked layer: its chain id, as the image's
/// configuration claims.
pub(crate) const TARGET: &str = "containerd.io/snapshot.ref";

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
    /// like a layer's. Only a layer is prepared under a key that ends with its target:
    /// `NAMESPACE/NUMBER/extract-UNIQUE TARGET`. No pod chooses the key of its snapshots.
    ///
    /// # Errors
    /// A layer of a lazy image that is not named, or not by a digest: whether the layer is what it
    /// claims to be could not be found out.
    pub(crate) fn of(key: &str, labels: &Labels) -> Result<Self, SnapshotError> {
        let Some(target) = labels.get(TARGET).cloned() else { return Ok(Layer::Ordinary) };
        if key.rsplit_once(' ').is_none_or(|(_, of)| of != target) {
            return Ok(Layer::Ordinary);
        }
        let has = |label| labels.get(label).is_some_and(|value| value == "true");
        let lazy: fn(String, Image) -> Layer = match () {
            () if has(DATA) => |target, image| Layer::Data { target, image },
            () if has(BOOTSTRAP) => |target, image| Layer::Bootstrap { target, image },
            () => {
                let (reference, manifest) = (labels.get(IMAGE), labels.get(MANIFEST));
                let (Some(reference), Some(_)) = (reference, manifest) else {
                    return Ok(Layer::Ordinary);
                };
                let image = Image {
                    reference: reference.clone(),
                    manifest_digest: manifest.cloned(),
                    layers: None,
                    login: login(labels),
                };
                return Ok(Layer::Plain { target, image });
            }
        };
        let label = |label: &str| {
            labels.get(label).cloned().ok_or_else(|| {
                SnapshotError::Invalid(format!(
                    "layer {target} is of a lazy image, and there is no label {label} that says of which: expected \
                     disable_snapshot_annotations = false in containerd's configuration"
                ))
            })
        };
        let (reference, manifest_digest) = (label(IMAGE)?, Some(label(MANIFEST)?));
        let (layers, login) = (None, login(labels));
        Ok(lazy(target.clone(), Image { reference, manifest_digest, layers, login }))
    }
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
