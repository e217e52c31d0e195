//! Images of layers that say themselves what is in them.

use lazuli_builder::index::{LayerToc, SeekableImage, assemble_seekable, assemble_seekable_one};
use lazuli_image::{
    Algorithm, Chunk, Kind, Stored, Tree,
    rafs::{self, Bootstrap, layout::Origin},
    seekable::{FrameDigest, SeekableLayer, TocPlace},
    tree::Device,
};

const SIZE: u64 = 64 << 20;
const END: u64 = 63 << 20;

fn toc(number: u8, place: TocPlace, entries: &[String]) -> LayerToc {
    let digest = Algorithm::Sha256.digest(&[number]);
    let toc = format!(r#"{{"version":1,"entries":[{}]}}"#, entries.join(",")).into_bytes();
    LayerToc { layer: SeekableLayer { digest, size: SIZE, toc: place }, toc, end: Stored(END) }
}

fn estargz(number: u8, entries: &[String]) -> LayerToc {
    toc(number, TocPlace::Member { digest: Algorithm::Sha256.digest(b"toc") }, entries)
}

fn containers(number: u8, entries: &[String]) -> LayerToc {
    let digest = FrameDigest::Stored(Algorithm::Sha256.digest(b"toc"));
    toc(number, TocPlace::Frame { offset: END + 8, stored_size: 1, size: 1, digest }, entries)
}

fn digest(of: &str) -> String {
    Algorithm::Sha256.digest(of.as_bytes()).to_string()
}

/// A file with the fields of its first piece.
fn file(name: &str, size: u64, more: &str) -> String {
    let digest = digest(name);
    format!(r#"{{"name":"{name}","type":"reg","size":{size},"digest":"{digest}"{more}}}"#)
}

fn piece(offset: u64, at: u64, size: u64) -> String {
    let digest = digest(&format!("{at}"));
    format!(r#","offset":{offset},"chunkOffset":{at},"chunkSize":{size},"chunkDigest":"{digest}""#)
}

fn later(offset: u64, at: u64, size: u64) -> String {
    format!(r#"{{"type":"chunk","name":"ignored"{}}}"#, piece(offset, at, size))
}

/// The bootstrap, which was checked.
fn open(layers: &[LayerToc]) -> Bootstrap<Vec<u8>> {
    let SeekableImage { bootstrap, points } = assemble_seekable(layers).unwrap();
    let mut bootstrap = Bootstrap::open(bootstrap).unwrap();
    for (blob, points) in points {
        bootstrap.set_points(blob, points).unwrap();
    }
    rafs::check(&bootstrap).unwrap();
    assert_eq!(bootstrap.origin(), Origin::Seekable);
    bootstrap
}

fn refused(layers: &[LayerToc]) -> String {
    assemble_seekable(layers).unwrap_err().to_string()
}

/// A layer alone is a lower directory of overlayfs.
#[test]
fn whiteouts_of_a_layer_alone_are_those_of_overlayfs() {
    let entry = |name: &str, kind: &str| format!(r#"{{"name":"{name}","type":"{kind}"}}"#);
    let listed = [entry("a/", "dir"), file("a/.wh.x", 0, ""), file(".wh.y", 0, "")];
    let SeekableImage { bootstrap, .. } = assemble_seekable_one(&estargz(1, &listed)).unwrap();
    let bootstrap = Bootstrap::open(bootstrap).unwrap();
    rafs::check(&bootstrap).unwrap();
    let tree = bootstrap.tree().unwrap();
    for path in ["a/x", "y"] {
        let id = tree.find(path.split('/').map(str::as_bytes)).unwrap();
        let kind = &tree[id].kind;
        assert!(matches!(kind, Kind::CharDevice(Device { major: 0, minor: 0 })), "{kind:?}");
    }
    // Owner and mode of the directory are those of lower layers.
    let unlisted = estargz(1, &[file("a/x", 0, "")]);
    let error = assemble_seekable_one(&unlisted).unwrap_err().to_string();
    assert!(error.contains("does not list the directory"), "{error}");
    assemble_seekable(&[unlisted]).unwrap();
}

fn content<'a>(bootstrap: &'a Bootstrap<Vec<u8>>, tree: &Tree, path: &str) -> Vec<&'a Chunk> {
    let id = tree.find(path.split('/').map(str::as_bytes)).unwrap();
    let Kind::Regular { chunks, .. } = &tree[id].kind else { panic!("{path} is no file") };
    let blob = |chunk: &lazuli_image::ChunkRef| &bootstrap.blobs()[usize::from(chunk.blob.0)];
    chunks.iter().map(|chunk| blob(chunk).chunk(chunk.number).unwrap()).collect()
}

#[test]
fn pieces_become_chunks_that_end_before_the_next_member() {
    const MIB: u64 = 1 << 20;
    let layer = estargz(
        1,
        &[
            file("a", 2 * MIB + 5, &piece(100, 0, 2 * MIB)),
            later(700_000, 2 * MIB, 5),
            file("b", 10, r#","offset":700100,"innerOffset":7"#),
            file("c", 20, r#","offset":700100,"innerOffset":600"#),
            file("d", MIB, &piece(900_000, 0, 0)),
            file("empty", 0, ""),
        ],
    );
    let bootstrap = open(&[layer]);
    let tree = bootstrap.tree().unwrap();
    let place = |chunk: &&Chunk| {
        let part = chunk.part.unwrap();
        (chunk.stored.0, u64::from(chunk.stored_size), part.offset, u64::from(part.size))
    };
    let places = |path| content(&bootstrap, &tree, path).iter().map(place).collect::<Vec<_>>();
    assert_eq!(places("a"), [(100, 699_900, 0, 2 * MIB), (700_000, 100, 0, 5)]);
    assert_eq!(places("b"), [(700_100, 17 + 2 + (160 << 10), 7, 17)]);
    assert_eq!(places("c")[0].2, 600);
    // What follows the last one in its member is not fetched.
    assert!(places("d")[0].1 < 2 * MIB, "{:?}", places("d"));
    assert_eq!(places("empty"), []);
    // All but the last piece of a file are multiples of this.
    assert_eq!(u64::from(bootstrap.chunk_size()), 2 * MIB);
}

#[test]
fn pieces_of_any_size_make_one_image() {
    let large = estargz(
        1,
        &[file("large", 12 << 20, &piece(100, 0, 8 << 20)), later(200_000, 8 << 20, 4 << 20)],
    );
    let small = containers(
        2,
        &[
            file("small", 20_480, &piece(100, 0, 12_288)),
            later(300, 12_288, 8192),
            file("odd", 100_000, &format!(r#"{},"endOffset":5000"#, piece(1000, 0, 777))),
            later(2000, 777, 99_223),
        ],
    );
    let bootstrap = open(&[large, small]);
    assert_eq!(bootstrap.chunk_size(), 4096);
    let tree = bootstrap.tree().unwrap();
    let sizes = |path| -> Vec<u32> {
        content(&bootstrap, &tree, path).iter().map(|chunk| chunk.decoded_size).collect()
    };
    assert_eq!(sizes("large"), [8 << 20, 4 << 20]);
    assert_eq!(sizes("small"), [12_288, 8192]);
    // Its pieces do not begin on block borders.
    assert_eq!(sizes("odd"), [100_000]);
    let odd = content(&bootstrap, &tree, "odd")[0];
    assert_eq!((odd.stored.0, odd.stored_end().0), (1000, 5000));
    assert_eq!(odd.digest.to_string(), digest("odd"));
    let codecs: Vec<_> = bootstrap.blobs().iter().map(|blob| blob.codec.to_string()).collect();
    assert_eq!(codecs, ["gzip", "zstd"]);
    let nid = bootstrap.lookup(bootstrap.root(), b"large").unwrap().unwrap();
    let extent = bootstrap.extent(nid, (8 << 20) + 5000).unwrap().unwrap();
    assert_eq!(extent.start.0, (8 << 20) + 5000);
}

#[test]
fn layers_are_stacked_as_tars_are() {
    let lower = estargz(
        1,
        &[
            r#"{"name":"d/","type":"dir","mode":493,"uid":7}"#.to_owned(),
            file("d/gone", 1, r#","offset":100"#),
            file("d/kept", 1, r#","offset":200"#),
            file("o/hidden", 1, r#","offset":300"#),
            file(".prefetch.landmark", 1, r#","offset":150"#),
            file("stargz.index.json", 1, r#","offset":160"#),
            r#"{"name":"null","type":"char","devMajor":1,"devMinor":3,"mode":438}"#.to_owned(),
        ],
    );
    let upper = estargz(
        2,
        &[
            r#"{"name":"d/.wh.gone","type":"reg"}"#.to_owned(),
            r#"{"name":"o/.wh..wh..opq","type":"reg"}"#.to_owned(),
            file("o/new", 1, r#","offset":100"#),
            r#"{"name":"link","type":"hardlink","linkName":"d/kept"}"#.to_owned(),
            r#"{"name":"s","type":"symlink","linkName":"d/kept"}"#.to_owned(),
            file(".no.prefetch.landmark", 1, r#","offset":600"#),
        ],
    );
    let bootstrap = open(&[lower.clone(), upper.clone()]);
    let tree = bootstrap.tree().unwrap();
    let find = |path: &str| tree.find(path.split('/').map(str::as_bytes));
    assert_eq!(find("d/gone").or(find("o/hidden")).or(find(".prefetch.landmark")), None);
    assert_eq!(find("stargz.index.json").or(find(".no.prefetch.landmark")), None);
    assert_eq!(find("link"), find("d/kept"));
    assert!(find("o/new").is_some() && find("s").is_some() && find("null").is_some());
    assert_eq!(tree[find("d").unwrap()].metadata.uid, 7);
    // Only what upper layers have left is hot.
    assert_eq!(bootstrap.prefetch().len(), 0);
    assert_eq!(open(std::slice::from_ref(&lower)).prefetch().len(), 1);
    // A layer by itself: its link leads nowhere.
    assert!(refused(&[upper]).contains("link"));
    // The same layer twice is one blob.
    assert_eq!(open(&[lower.clone(), lower]).blobs().len(), 1);
}

#[test]
fn unreadable_pieces_are_refused_by_name() {
    let too_large = [file("big", 20 << 20, &piece(100, 0, 777)), later(300, 777, (20 << 20) - 777)];
    for (entries, expected) in [
        (too_large.to_vec(), "`/big`: 20971520 bytes in pieces that do not begin on block borders"),
        (vec![file("x", 17 << 20, &piece(100, 0, 17 << 20))], "`/x`: a piece of 17825792 bytes"),
        (vec![file("x", 9, "")], "a piece at 0"),
        (vec![file("x", 9, &piece(END, 0, 9))], "a piece at 66060288"),
        (vec![file("x", 9, &piece(100, 0, 8))], "`/x`: its pieces have 8 bytes, it has 9"),
        (vec![file("x", 9, &piece(100, 0, 10))], "a piece of 10 bytes at 0, expected 9"),
        (vec![file("x", 9, &piece(100, 5, 4))], "a piece of 4 bytes at 5"),
        (vec![file("x", 9, &piece(100, 0, 8)), later(200, 7, 1)], "a piece of 1 bytes at 7"),
        (vec![later(200, 0, 1)], "a piece of no file"),
        (vec![r#"{"name":"x","type":"symlink"}"#.to_owned()], "a symbolic link to 0 bytes"),
        (vec![r#"{"name":"x","type":"hardlink","linkName":"../y"}"#.to_owned()], "`..`"),
        (vec![r#"{"name":".wh.","type":"reg"}"#.to_owned()], "a whiteout that hides no name"),
        (vec![format!(r#"{{"name":"{}","type":"dir"}}"#, "d/".repeat(300))], "directories deep"),
        // Two files that claim the same bytes.
        (
            vec![
                file("x", 9, r#","offset":100"#),
                file("y", 9, r#","offset":100,"innerOffset":4"#),
            ],
            "overlap",
        ),
    ] {
        let error = refused(&[estargz(1, &entries)]);
        assert!(error.contains(expected), "{error}");
        assert!(
            error.contains(&Algorithm::Sha256.digest(&[1]).to_string()) || error.contains("blob 0"),
            "{error}"
        );
    }
}

#[test]
fn equal_pieces_are_one_chunk() {
    let layer = estargz(
        1,
        &[
            file("a", 9, &piece(100, 0, 9)),
            file("b", 9, &piece(100, 0, 9)),
            file("c", 9, &piece(200, 0, 9)),
        ],
    );
    let bootstrap = open(&[layer]);
    assert_eq!(bootstrap.blobs()[0].chunks.len(), 2);
}

#[test]
fn a_few_bytes_do_not_become_many() {
    // Pieces of a block, and others that are as large as they can be.
    let mut entries = vec![file("small", 8192, &piece(100, 0, 4096)), later(200, 4096, 4096)];
    let large = |number: u64| {
        let name = format!("large{number}");
        file(&name, 16 << 20, &format!(r#","offset":{}"#, 1000 + number * 100))
    };
    entries.extend((0..4200).map(large));
    let error = refused(&[estargz(1, &entries)]);
    assert!(error.contains("17203202 parts of files"), "{error}");
    assert_eq!(open(&[estargz(1, &entries[..100])]).blobs()[0].chunks.len(), 100);
    // Time is in the number of pieces.
    const PIECES: u64 = 200_000;
    let mut entries = vec![file("long", PIECES * 4096, &piece(100, 0, 4096))];
    entries.extend((1..PIECES).map(|number| later(100 + number * 50, number * 4096, 4096)));
    assert_eq!(open(&[estargz(1, &entries)]).blobs()[0].chunks.len(), PIECES as usize);
}
