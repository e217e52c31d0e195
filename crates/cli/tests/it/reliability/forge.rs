//! Images as an attacker would change them, with every digest made right that can be.

use std::{
    fs,
    io::Read as _,
    path::{Path, PathBuf},
};

use lazuli_image::{
    Algorithm, Digest,
    rafs::{Bootstrap, BootstrapOptions},
};
use lazuli_testkit::{
    oci::{Compression, Layer},
    v5,
};
use serde_json::{Value, json};

/// The only image of an OCI layout, open for changes.
pub(crate) struct Forge {
    layout: PathBuf,
}

impl Forge {
    pub(crate) fn new(layout: PathBuf) -> Self {
        Forge { layout }
    }

    pub(crate) fn blob_path(&self, digest: &str) -> PathBuf {
        self.layout.join("blobs/sha256").join(digest.trim_start_matches("sha256:"))
    }

    fn index(&self) -> Value {
        serde_json::from_slice(&fs::read(self.layout.join("index.json")).unwrap()).unwrap()
    }

    /// The manifest's digest and bytes.
    pub(crate) fn manifest(&self) -> (String, Vec<u8>) {
        let digest = self.index()["manifests"][0]["digest"].as_str().unwrap().to_owned();
        let raw = fs::read(self.blob_path(&digest)).unwrap();
        (digest, raw)
    }

    /// Digest of the last layer, which has the bootstrap.
    pub(crate) fn bootstrap_layer(&self) -> String {
        let manifest: Value = serde_json::from_slice(&self.manifest().1).unwrap();
        let layers = manifest["layers"].as_array().unwrap();
        layers.last().unwrap()["digest"].as_str().unwrap().to_owned()
    }

    /// The files of the bootstrap layer.
    pub(crate) fn members(&self) -> Vec<(String, Vec<u8>)> {
        let layer = fs::read(self.blob_path(&self.bootstrap_layer())).unwrap();
        let mut archive = tar::Archive::new(zstd::Decoder::new(&layer[..]).unwrap());
        let members = archive.entries().unwrap().map(|entry| {
            let mut entry = entry.unwrap();
            let name = entry.path().unwrap().to_str().unwrap().to_owned();
            let mut content = Vec::new();
            entry.read_to_end(&mut content).unwrap();
            (name, content)
        });
        members.filter(|(name, _)| !name.ends_with('/')).collect()
    }

    pub(crate) fn bootstrap(&self) -> Vec<u8> {
        let members = self.members().into_iter();
        members.into_iter().find(|(name, _)| name == "image/image.boot").unwrap().1
    }

    /// Changes the bootstrap; layer, manifest and index follow.
    pub(crate) fn change_bootstrap(&self, change: impl FnOnce(&mut Vec<u8>)) {
        self.change_members(|members| {
            let bootstrap = members.iter_mut().find(|(name, _)| name == "image/image.boot");
            change(&mut bootstrap.unwrap().1);
        });
    }

    /// Changes the files of the bootstrap layer; layer, manifest and index follow.
    pub(crate) fn change_members(&self, change: impl FnOnce(&mut Vec<(String, Vec<u8>)>)) {
        let mut members = self.members();
        change(&mut members);
        let mut tar = tar::Builder::new(Vec::new());
        for (name, content) in &members {
            let mut header = tar::Header::new_gnu();
            header.set_size(content.len() as u64);
            header.set_mode(0o444);
            tar.append_data(&mut header, name, &content[..]).unwrap();
        }
        let layer = Layer::new(tar.into_inner().unwrap(), Compression::Zstd).stored().unwrap();
        let mut manifest: Value = serde_json::from_slice(&self.manifest().1).unwrap();
        let descriptor = manifest["layers"].as_array_mut().unwrap().last_mut().unwrap();
        descriptor["digest"] = self.put(&layer).to_string().into();
        descriptor["size"] = layer.len().into();
        self.put_manifest(manifest.to_string().as_bytes());
    }

    /// Turns the image into one of RAFS v5, with the same blobs.
    pub(crate) fn make_v5(&self) {
        let bootstrap = Bootstrap::open(self.bootstrap()).unwrap();
        let options = BootstrapOptions {
            chunk_size: bootstrap.chunk_size(),
            digest: bootstrap.digest_algorithm(),
        };
        let old = v5::write(&bootstrap.tree().unwrap(), bootstrap.blobs(), &options);
        self.change_members(|members| *members = vec![("image/image.boot".to_owned(), old)]);
        let mut manifest: Value = serde_json::from_slice(&self.manifest().1).unwrap();
        let descriptor = manifest["layers"].as_array_mut().unwrap().last_mut().unwrap();
        descriptor["annotations"]["containerd.io/snapshot/nydus-fs-version"] = "5".into();
        self.put_manifest(manifest.to_string().as_bytes());
    }

    /// Makes `raw` the manifest of the image.
    fn put_manifest(&self, raw: &[u8]) {
        let mut index = self.index();
        index["manifests"][0]["digest"] = self.put(raw).to_string().into();
        index["manifests"][0]["size"] = json!(raw.len());
        fs::write(self.layout.join("index.json"), index.to_string()).unwrap();
    }

    fn put(&self, content: &[u8]) -> Digest {
        let digest = Algorithm::Sha256.digest(content);
        fs::write(self.blob_path(&digest.to_string()), content).unwrap();
        digest
    }

    /// Replaces the content stored under a digest.
    pub(crate) fn replace(&self, digest: &str, change: impl FnOnce(&mut Vec<u8>)) {
        replace(&self.blob_path(digest), change);
    }
}

/// Changes a file.
pub(crate) fn replace(path: &Path, change: impl FnOnce(&mut Vec<u8>)) {
    let mut content = fs::read(path).unwrap();
    change(&mut content);
    fs::write(path, content).unwrap();
}

/// The places of a bootstrap's tables.
pub(crate) struct Tables {
    /// First byte and rows of 256 bytes.
    pub(crate) blobs: (usize, usize),
    /// First byte and rows of 80 bytes.
    pub(crate) chunks: (usize, usize),
}

/// First byte of the device slots, of 128 bytes each.
pub(crate) const DEVICE_SLOTS: usize = 1408;

impl Tables {
    pub(crate) fn of(bootstrap: &[u8]) -> Self {
        let word = |at: usize| u64::from_le_bytes(bootstrap[at..at + 8].try_into().unwrap());
        let size = u32::from_le_bytes(bootstrap[1168..1172].try_into().unwrap());
        Tables {
            blobs: (word(1160) as usize, size as usize / 256),
            chunks: (word(1176) as usize, word(1184) as usize / 80),
        }
    }
}

/// Exchanges two pieces of `bytes` that have the same length.
pub(crate) fn exchange(bytes: &mut [u8], a: usize, b: usize, len: usize) {
    let first = bytes[a..a + len].to_vec();
    bytes.copy_within(b..b + len, a);
    bytes[b..b + len].copy_from_slice(&first);
}

/// The table of CRC-32C, which upstream checks where chunks have one.
fn crc_table() -> Vec<u32> {
    let step = |crc: u32| if crc & 1 == 1 { crc >> 1 ^ 0x82f6_3b78 } else { crc >> 1 };
    (0..256).map(|byte| (0..8).fold(byte, |crc, _| step(crc))).collect()
}

fn crc_state(bytes: &[u8]) -> u32 {
    let table = crc_table();
    let next = |crc: u32, byte: &u8| crc >> 8 ^ table[(crc as u8 ^ byte) as usize];
    bytes.iter().fold(!0, next)
}

pub(crate) fn crc32c(bytes: &[u8]) -> u32 {
    !crc_state(bytes)
}

/// Chooses the last four bytes so that the CRC-32C of `bytes` is `wanted`.
pub(crate) fn force_crc32c(bytes: &mut [u8], wanted: u32) {
    let table = crc_table();
    let body = bytes.len() - 4;
    // The top byte of each state names the entry that made it, so the last four entries are known.
    let mut state = !wanted;
    let mut entries = [0; 4];
    for entry in entries.iter_mut().rev() {
        *entry = table.iter().position(|value| value >> 24 == state >> 24).unwrap();
        state = (state ^ table[*entry]) << 8;
    }
    let mut state = crc_state(&bytes[..body]);
    for (byte, entry) in bytes[body..].iter_mut().zip(entries) {
        *byte = state as u8 ^ entry as u8;
        state = state >> 8 ^ table[entry];
    }
}

#[test]
fn a_crc_is_no_proof() {
    assert_eq!(crc32c(b"123456789"), 0xe306_9283);
    let mut forged = b"other content and four bytes".to_vec();
    force_crc32c(&mut forged, crc32c(b"the content"));
    assert_eq!(crc32c(&forged), crc32c(b"the content"));
}
