//! Writes the first inputs of the fuzz targets to `corpus/`: `cargo run --bin seeds`.

use std::{fs, io};

use lazuli_image::Codec;

#[allow(dead_code, reason = "shared with the tests of the crate")]
#[path = "../../crates/image/tests/it/support.rs"]
mod support;

#[allow(dead_code, reason = "shared with the tests of the crate")]
#[path = "../../crates/builder/tests/it/tarball.rs"]
mod tarball;

#[path = "../../crates/testkit/src/v5.rs"]
mod v5;

fn main() -> io::Result<()> {
    let corpus = concat!(env!("CARGO_MANIFEST_DIR"), "/corpus");
    for target in [
        "bootstrap",
        "bootstrap_v5",
        "batches",
        "blob_tail",
        "tar_source",
        "inflate",
        "layer_index",
        "seekable_toc",
        "documents",
        "registry_events",
    ] {
        fs::create_dir_all(format!("{corpus}/{target}"))?;
    }
    let batched = support::batched_sample(Codec::None);
    let bare = support::without_places(&batched.bootstrap);
    let size = (bare.len() as u32).to_le_bytes();
    let table = &batched.blobs[0].tail.meta_file[..batched.blobs[0].record.tail.ci_size as usize];
    fs::write(format!("{corpus}/batches/sample"), [&size, &bare[..], table].concat())?;
    for (name, sample) in
        [("sample", support::sample()), ("small", support::small_sample()), ("batched", batched)]
    {
        fs::write(format!("{corpus}/bootstrap/{name}"), &sample.bootstrap)?;
        let blobs: Vec<_> = sample.blobs.iter().map(|blob| blob.record.blob.clone()).collect();
        let old = v5::write(&sample.tree, &blobs, &support::small_chunks());
        fs::write(format!("{corpus}/bootstrap_v5/{name}"), old)?;
        for (index, blob) in sample.blobs.iter().enumerate() {
            let info = &blob.record.tail;
            let words = [
                info.features,
                info.chunk_count,
                info.ci_stored_size as u32,
                blob.record.blob.codec as u32 | (info.ci_codec as u32) << 8,
                info.ci_offset as u32,
                info.ci_size as u32,
            ];
            let head: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
            let tail = &blob.stored[info.ci_offset as usize..];
            fs::write(format!("{corpus}/blob_tail/{name}{index}"), [&head, tail].concat())?;
        }
    }
    fs::write(format!("{corpus}/seekable_toc/layers"), [b"\0", TOCS.as_bytes()].concat())?;
    fs::write(format!("{corpus}/documents/lazy"), LAZY_MANIFEST)?;
    fs::write(format!("{corpus}/registry_events/distribution"), DISTRIBUTION_EVENTS)?;
    fs::write(format!("{corpus}/registry_events/harbor"), HARBOR_EVENT)?;
    let layers = two_layers();
    fs::write(format!("{corpus}/layer_index/tar"), &layers[2..])?;
    fs::write(format!("{corpus}/inflate/text"), [&[6, 6], DEFLATE].concat())?;
    fs::write(format!("{corpus}/layer_index/gzip"), gzip(&layers[2..]))?;
    fs::write(format!("{corpus}/tar_source/layers"), layers)
}

/// The squares of the first 60 numbers, in a deflate block with codes of its own.
const DEFLATE: &[u8] =
    b"\x15\x8f\xdb\x11\xc4\x30\x0c\x02\x5b\xa1\x04\xc9\x51\xec\x50\x8e\x1f\x49\xff\x25\xdc\xde\
    \xd7\x0e\x63\x04\x38\x94\x2a\x59\x19\x4a\xab\x95\x2e\x74\xe8\x4e\xf5\xd2\xb0\x1c\x9a\xd6\
    \x2e\xbd\x89\x07\x53\x83\x55\xca\xce\x0d\x8f\xb9\xe0\x5b\x6a\x99\x5c\x87\xda\x80\x13\x7d\
    \x4c\x54\xe8\x2a\xf8\x10\xbb\xff\xb9\xa1\x2a\x88\xae\x6d\x4a\x28\xba\x21\xfe\xfb\xfb\x37\
    \x86\xba\x21\x79\xe3\x32\xf5\xa1\xf1\x5a\x0f\x7d\xcf\x4c\xb6\x84\xdc\x21\x73\x66\x33\xc3\
    \x18\xf7\x59\x8b\xa9\xeb\x24\x2b\x43\x7b\xa5\x0e\xdf\x38\xb6\x7e";

/// Notifications of CNCF distribution.
const DISTRIBUTION_EVENTS: &str = concat!(
    r#"{"events":[{"action":"push","target":{"repository":"team/app","tag":"1","digest":"#,
    r#""sha256:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"}},"#,
    r#"{"action":"delete","target":{"repository":"team/app","digest":"#,
    r#""sha256:bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb"}}]}"#,
);

/// A webhook of Harbor.
const HARBOR_EVENT: &str = concat!(
    r#"{"type":"PUSH_ARTIFACT","event_data":{"repository":{"repo_full_name":"team/app"},"#,
    r#""resources":[{"tag":"1","digest":"#,
    r#""sha256:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"}]}}"#,
);

/// A manifest with an annotated data blob, an annotated index of a layer, and a guess.
const LAZY_MANIFEST: &str = concat!(
    r#"{"schemaVersion":2,"mediaType":"application/vnd.oci.image.manifest.v1+json","#,
    r#""config":{"mediaType":"application/vnd.oci.image.config.v1+json","size":2,"digest":"#,
    r#""sha256:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"},"layers":["#,
    r#"{"mediaType":"application/vnd.oci.image.layer.v1.tar","size":9000,"digest":"#,
    r#""sha256:bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb","annotations":"#,
    r#"{"vnd.lazuli.hot-bytes":"4096"}},"#,
    r#"{"mediaType":"application/vnd.oci.image.layer.v1.tar","size":90,"digest":"#,
    r#""sha256:cccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccc","annotations":"#,
    r#"{"containerd.io/snapshot/nydus-ref":"#,
    r#""sha256:dddddddddddddddddddddddddddddddddddddddddddddddddddddddddddddddd"}}],"#,
    r#""annotations":{"vnd.lazuli.guess":"#,
    r#""bGF6dWxpIHRyYWNlIDEKAQG7u7u7u7u7u7u7u7u7u7u7u7u7u7u7u7u7u7u7u7u7uwEAAIAgAAABAAE="}}"#,
);

/// The tables of contents of two layers; see the target for the byte between them.
const TOCS: &str = concat!(
    r#"{"version":1,"entries":[{"name":"d/","type":"dir","mode":493},"#,
    r#"{"name":"d/a","type":"reg","size":9000,"offset":100,"chunkSize":4096,"mode":420,"#,
    r#""modtime":"2024-02-29T23:59:59Z","xattrs":{"user.a":"YQ=="},"#,
    r#""chunkDigest":"sha256:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"},"#,
    r#"{"name":"d/a","type":"chunk","offset":900,"chunkOffset":4096,"#,
    r#""chunkDigest":"sha256:bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb"},"#,
    r#"{"name":"l","type":"symlink","linkName":"d/a"},"#,
    r#"{"name":"c","type":"char","devMajor":1,"devMinor":3},{"name":"p","type":"fifo"}]}"#,
    "\0",
    r#"{"version":1,"entries":[{"name":"d/.wh.a","type":"reg"},"#,
    r#"{"name":"h","type":"hardlink","linkName":"d/a"},{"name":".prefetch.landmark","#,
    r#""type":"reg","size":1,"offset":200},"#,
    r#"{"name":"b","type":"reg","size":5,"offset":100,"innerOffset":7,"endOffset":300,"#,
    r#""digest":"sha256:cccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccc"}]}"#,
);

/// A gzip file of blocks that are stored as they are.
fn gzip(data: &[u8]) -> Vec<u8> {
    let mut file = vec![0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 255];
    for block in data.chunks(1000) {
        let size = (block.len() as u16).to_le_bytes();
        file.push(0);
        file.extend([size[0], size[1], !size[0], !size[1]]);
        file.extend(block);
    }
    file.extend([1, 0, 0, 0xff, 0xff]);
    // Checksum and size are not checked.
    file.extend([0; 8]);
    file
}

/// A lower and an upper layer with one of most things; see the target for the two bytes in front.
fn two_layers() -> Vec<u8> {
    let sparse: &[(&str, &[u8])] = &[("GNU.sparse.size", b"20"), ("GNU.sparse.map", b"4,4,12,4")];
    let in_data: &[(&str, &[u8])] =
        &[("GNU.sparse.major", b"1"), ("GNU.sparse.realsize", b"20"), ("GNU.sparse.name", b"s")];
    let attributes: &[(&str, &[u8])] = &[
        ("mtime", b"-1.5"),
        ("SCHILY.xattr.user.a", b"b"),
        ("LIBARCHIVE.xattr.user.c", b"AAEC"),
        ("SCHILY.acl.access", b"user::rwx,user:7:r--,group::r--,mask::r--,other::r--"),
    ];
    let low = tarball::Tar::default()
        .dir("d/")
        .pax(b'x', attributes)
        .file("d/f", b"content")
        .link(b'1', "h", "d/f")
        .link(b'2', "l", "d")
        .pax(b'x', sparse)
        .file("s0", b"abcdefgh")
        .0;
    let mut map = b"2\n4\n4\n12\n4\n".to_vec();
    map.resize(512, 0);
    map.extend(b"abcdefgh");
    let high = tarball::Tar::default()
        .member(&tarball::Header::new(b'L', b"././@LongLink", 3), b"l/x")
        .file("short", b"x")
        .file("d/.wh.f", b"")
        .file("d/.wh..wh..opq", b"")
        .link(b'1', "i", "d/f")
        .member(&tarball::Header::new(b'3', b"c", 0), b"")
        .pax(b'x', in_data)
        .file("GNUSparseFile.0/s", &map)
        .end();
    let blocks = u16::try_from(low.len() / 512).unwrap_or(0);
    [&blocks.to_le_bytes()[..], &low, &high].concat()
}
