//! Renders an image as text, for people and for tests that compare the text.

use std::fmt::Write as _;

use super::Bootstrap;
use crate::{
    FormatError, Mtime,
    erofs::{FileType, InodeView},
};

/// Limit of [`dump`], in bytes of text: far beyond the needs of a valid image, so that the text and
/// the memory for it stay in proportion to the image.
const TEXT_PER_BYTE: usize = 64;
const MIN_TEXT: usize = 1 << 20;

/// Renders the image as text: first the tables, then every name in the order of a walk, with its
/// whole inode. Equal images give equal texts. A damaged part appears as its error.
pub fn dump<B: AsRef<[u8]>>(bootstrap: &Bootstrap<B>) -> String {
    let mut text = String::new();
    tables(bootstrap, &mut text);
    // Depth first, with a stack instead of recursion. A hostile image may nest, loop and overlap.
    let mut room = MIN_TEXT + bootstrap.bytes().len() * TEXT_PER_BYTE;
    let mut stack = vec![(Vec::new(), bootstrap.root())];
    while let Some((path, nid)) = stack.pop() {
        if text.len() > room {
            line(&mut text, "… and so on: this is more than a sound image of its size contains");
            break;
        }
        let shown = if path.is_empty() { "/".into() } else { path.escape_ascii().to_string() };
        let inode = match bootstrap.inode(nid) {
            Ok(inode) => inode,
            Err(error) => {
                line(&mut text, &format!("{shown} {error}"));
                continue;
            }
        };
        line(&mut text, &format!("{shown} {}", describe(bootstrap, &inode)));
        if inode.file_type != FileType::Directory {
            continue;
        }
        let first_child = stack.len();
        for entry in bootstrap.read_dir(nid, 0).into_iter().flatten() {
            match entry {
                Ok(entry) if entry.is_dot() => {}
                Ok(entry) if room > 0 => {
                    let path = [&path[..], b"/", entry.name].concat();
                    room = room.saturating_sub(path.len());
                    stack.push((path, entry.nid));
                }
                Ok(_) => break,
                Err(error) => line(&mut text, &format!("{shown} {error}")),
            }
        }
        stack[first_child..].reverse();
    }
    text
}

fn line(text: &mut String, content: &str) {
    text.push_str(content);
    text.push('\n');
}

fn tables<B: AsRef<[u8]>>(bootstrap: &Bootstrap<B>, text: &mut String) {
    line(
        text,
        &format!(
            "bootstrap: {} bytes, {} names, root {}, chunks of {} bytes, {} digests",
            bootstrap.bytes().len(),
            bootstrap.inode_count(),
            bootstrap.root(),
            bootstrap.chunk_size(),
            bootstrap.digest_algorithm().name(),
        ),
    );
    if !bootstrap.prefetch().is_empty() {
        let nids: Vec<String> = bootstrap.prefetch().iter().map(|nid| nid.0.to_string()).collect();
        line(text, &format!("prefetch: {}", nids.join(" ")));
    }
    for (index, (blob, tail)) in bootstrap.blobs().iter().zip(bootstrap.tails()).enumerate() {
        line(
            text,
            &format!(
                "blob {index}: {}, {}, stored {}, decoded {}, features {:#x}, {} chunks",
                blob.id,
                blob.codec,
                blob.stored_size,
                blob.decoded_size,
                tail.features,
                tail.chunk_count
            ),
        );
        line(
            text,
            &format!(
                "  ci {}+{} ({} decoded, {}), toc {} bytes {}",
                tail.ci_offset,
                tail.ci_stored_size,
                tail.ci_size,
                tail.ci_codec,
                tail.toc_size,
                tail.toc_digest.map_or("-".into(), |digest| digest.to_string())
            ),
        );
        for chunk in &blob.chunks {
            line(
                text,
                &format!(
                    "  chunk {}: stored {}+{}{}, decoded {}+{}, {}",
                    chunk.number,
                    chunk.stored.0,
                    chunk.stored_size,
                    chunk.part.map_or(String::new(), |part| {
                        format!(" (from {} of {})", part.offset, part.size)
                    }),
                    chunk.decoded.0,
                    chunk.decoded_size,
                    chunk.digest
                ),
            );
        }
    }
}

fn describe<B: AsRef<[u8]>>(bootstrap: &Bootstrap<B>, inode: &InodeView) -> String {
    let Mtime { seconds, nanoseconds } = inode.mtime;
    let mut text = format!(
        "{:06o} {}:{} {}.{:09} nid {} at {} {:?} links {} size {}",
        inode.mode(),
        inode.uid,
        inode.gid,
        seconds,
        nanoseconds,
        inode.nid.0,
        inode.offset,
        inode.layout,
        inode.nlink,
        inode.size,
    );
    if let Err(error) = content(bootstrap, inode, &mut text) {
        let _ = write!(text, " {error}");
    }
    text
}

fn content<B: AsRef<[u8]>>(
    bootstrap: &Bootstrap<B>,
    inode: &InodeView,
    text: &mut String,
) -> Result<(), FormatError> {
    for (name, value) in bootstrap.xattrs(inode.nid)? {
        let _ = write!(text, " {}={}", name.escape_ascii(), value.escape_ascii());
    }
    match inode.file_type {
        FileType::Regular => {
            let _ = write!(text, " format {:#x}", inode.data);
            for chunk in bootstrap.chunks(inode.nid)? {
                let (chunk, decoded) = chunk?;
                let _ = write!(text, " {}.{}@{}", chunk.blob.0, chunk.number, decoded.0);
            }
        }
        FileType::Symlink => {
            let _ = write!(text, " -> {}", bootstrap.read_link(inode.nid)?.escape_ascii());
        }
        FileType::CharDevice | FileType::BlockDevice => {
            if let Some(device) = inode.rdev() {
                let _ = write!(text, " device {}:{}", device.major, device.minor);
            }
        }
        FileType::Directory => {
            let _ = write!(text, " block {}", inode.data);
        }
        FileType::Fifo | FileType::Socket => {}
    }
    Ok(())
}
