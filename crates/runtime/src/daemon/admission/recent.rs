//! Manifests that were fetched a moment ago.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex},
};

use lazuli_registry::{ImageName, Manifest};

use crate::sync::lock;

/// Bytes of manifests that are remembered. Those of lazy images have a few kilobytes, and the
/// largest 4 MiB.
const KEPT: usize = 8 << 20;

/// The last manifests that were fetched by digest: containerd asks for one layer after the other,
/// and then the image is mounted.
#[derive(Debug, Default)]
pub(in crate::daemon) struct Recent(Mutex<VecDeque<(String, Arc<Manifest>)>>);

impl Recent {
    /// The manifest that `name`, which has a digest, means.
    pub(in crate::daemon) fn get(&self, name: &ImageName) -> Option<Arc<Manifest>> {
        let name = name.to_string();
        let recent = lock(&self.0);
        recent.iter().find(|(known, _)| *known == name).map(|(_, manifest)| manifest.clone())
    }

    /// Remembers the manifest of `name`, which has a digest.
    pub(in crate::daemon) fn insert(&self, name: &ImageName, manifest: Arc<Manifest>) {
        let name = name.to_string();
        let mut recent = lock(&self.0);
        recent.retain(|(known, _)| *known != name);
        recent.push_back((name, manifest));
        while recent.iter().map(|(_, manifest)| manifest.raw.len()).sum::<usize>() > KEPT {
            recent.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use lazuli_image::{Algorithm, oci};

    use super::*;

    #[test]
    fn recent_manifests_are_bounded_by_bytes() {
        let json = format!(
            r#"{{"schemaVersion":2,"config":{{"mediaType":"","digest":"{}","size":0}},"layers":[]}}"#,
            Algorithm::Sha256.digest(b"")
        );
        let json = json.as_bytes();
        let parsed = oci::Manifest::parse(json).unwrap();
        let manifest = |size: usize| {
            let (raw, digest) = (Bytes::from(vec![0; size]), Algorithm::Sha256.digest(json));
            let media_type = oci::media_type::MANIFEST.to_owned();
            Arc::new(Manifest { raw, digest, media_type, parsed: parsed.clone(), index: None })
        };
        let name = |tag: usize| format!("r.example/a:{tag}").parse::<ImageName>().unwrap();
        let recent = Recent::default();
        for tag in 0..3 {
            recent.insert(&name(tag), manifest(KEPT / 2));
        }
        let known = [0, 1, 2].map(|tag| recent.get(&name(tag)).is_some());
        assert_eq!(known, [false, true, true]);
        recent.insert(&name(1), manifest(1));
        recent.insert(&name(3), manifest(KEPT / 2 - 1));
        assert!([1, 2, 3].iter().all(|tag| recent.get(&name(*tag)).is_some()));
        recent.insert(&name(4), manifest(KEPT + 1));
        assert!((0..5).all(|tag| recent.get(&name(tag)).is_none()));
    }
}
