//! The image of a pod's sandbox: a program that waits.
//!
//! Kubernetes' own image is in a distant registry, which tests must not use.

use std::io;

use serde_json::{Value, json};

use crate::{
    oci::{Compression, Image, Layer},
    tarball::{self, Body, Entry},
};

/// `pause()` for ever: an x86-64 ELF file of one segment. As the first process of its namespace it
/// gets no signal but SIGKILL.
fn program() -> Vec<u8> {
    /// The address at which the segment is mapped.
    const BASE: u64 = 0x40_0000;
    /// Bytes of the two headers, after which the code begins.
    const HEADERS: u64 = 64 + 56;
    /// `mov eax, 34` (pause), `syscall`, and back to the begin.
    const CODE: [u8; 9] = [0xb8, 0x22, 0, 0, 0, 0x0f, 0x05, 0xeb, 0xf7];
    let size = HEADERS + CODE.len() as u64;
    let mut elf = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0".to_vec();
    for half in [2_u16, 62] {
        elf.extend(half.to_le_bytes()); // an executable; x86-64
    }
    elf.extend(1_u32.to_le_bytes());
    for word in [BASE + HEADERS, 64, 0] {
        elf.extend(word.to_le_bytes()); // entry, program headers, no sections
    }
    elf.extend(0_u32.to_le_bytes());
    for half in [64_u16, 56, 1, 64, 0, 0] {
        elf.extend(half.to_le_bytes()); // sizes and counts of headers
    }
    for word in [1_u32, 5] {
        elf.extend(word.to_le_bytes()); // to be loaded; readable and executable
    }
    for word in [0, BASE, BASE, size, size, 0x1000] {
        elf.extend(word.to_le_bytes());
    }
    elf.extend(CODE);
    elf
}

/// The image, with `/pause` as its only file.
pub fn image() -> Image {
    let file = Entry::file("pause", program()).mode(0o755);
    let layer = Layer::new(tarball::write([&file]), Compression::Gzip);
    let mut image = Image::new([layer]);
    image.config["config"] = json!({ "Entrypoint": ["/pause"] });
    image
}

/// The image as a tar file that `ctr image import` takes, by the name `name`.
pub fn archive(name: &str) -> io::Result<Vec<u8>> {
    let layout = tempfile::tempdir()?;
    image().write_layout(layout.path(), "latest")?;
    let index = std::fs::read(layout.path().join("index.json"))?;
    let mut index: Value = serde_json::from_slice(&index)?;
    // containerd reads this annotation first.
    index["manifests"][0]["annotations"]["io.containerd.image.name"] = json!(name);
    let mut entries = vec![
        Entry::file("oci-layout", std::fs::read(layout.path().join("oci-layout"))?),
        Entry::file("index.json", index.to_string()),
    ];
    for blob in std::fs::read_dir(layout.path().join("blobs/sha256"))? {
        let blob = blob?;
        let name = format!("blobs/sha256/{}", blob.file_name().to_string_lossy());
        entries.push(Entry::new(name, Body::File(std::fs::read(blob.path())?)));
    }
    Ok(tarball::write(&entries))
}

#[cfg(test)]
mod tests {
    use std::{os::unix::fs::PermissionsExt as _, process::Command, thread, time::Duration};

    use super::*;

    #[test]
    fn the_pause_program_waits_until_it_is_killed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("pause");
        std::fs::write(&path, program()).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        let mut child = Command::new(path).spawn().unwrap();
        thread::sleep(Duration::from_millis(50));
        assert!(child.try_wait().unwrap().is_none());
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
