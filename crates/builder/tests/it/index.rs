//! Indexes of layers by all kinds of writers: a node reads the layers' content with them.

use std::io::{self, Cursor, Read, Write as _};

use flate2::{Compression, GzBuilder, read::MultiGzDecoder, write::GzEncoder};
use lazuli_builder::{
    BuildError, Layer, LayerSource,
    index::{ImageIndex, IndexLayer, KnownLayer, assemble, diff_id, index, index_while_reading},
    merge,
};
use lazuli_image::{
    Algorithm, BlobIndex, Chunk, ChunkRef, Decoded, Digest, Points, Tree,
    codec::Decoder,
    compare::{Content, compare},
    points::NewPoint,
    rafs::{self, Bootstrap, Placed, ReadIndex},
};
use lazuli_testkit::{
    oci::Compression as Stored,
    odd,
    tarball::{self, Body, Entry, SparseFormat},
};

const CHUNK: u32 = 1 << 20;

fn gzip(level: u32, data: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::new(level));
    encoder.write_all(data).unwrap();
    encoder.finish().unwrap()
}

/// Files of all sizes, with different compression ratios.
fn files() -> Vec<u8> {
    let mut entries = vec![Entry::directory("dir"), Entry::file("dir/empty", "")];
    for (number, size) in
        [1, 511, 512, 4096, 70_000, (1 << 20) + 1, 5 << 20].into_iter().enumerate()
    {
        entries.push(Entry::file(format!("dir/text{number}"), odd::text(size)));
        entries
            .push(Entry::file(format!("dir/random{number}"), odd::random(number as u64, size / 4)));
    }
    entries.push(Entry::hard_link("hard", "dir/text5"));
    tarball::write(&entries)
}

fn index_of(layers: &[Vec<u8>]) -> Result<ImageIndex, BuildError> {
    let layer = |stored: &Vec<u8>| IndexLayer {
        digest: Algorithm::Sha256.digest(stored),
        stored_size: stored.len() as u64,
        file: None,
        source: Box::new(Cursor::new(stored.clone())),
    };
    let scratch = tempfile::tempdir().unwrap();
    let mut index = index(layers.iter().map(layer).collect(), scratch.path(), 2, &())?;
    // Blobs beside the layers are removed with the directory.
    for beside in &mut index.beside {
        let kept = std::env::temp_dir().join(format!(
            "{}-{}",
            std::process::id(),
            beside.record.blob.id.hex()
        ));
        std::fs::copy(beside.file.as_ref().unwrap(), &kept).unwrap();
        beside.file = Some(kept);
    }
    Ok(index)
}

/// An index as a node has it.
struct Opened {
    bootstrap: Bootstrap<Vec<u8>>,
    points: Vec<(BlobIndex, Points)>,
}

/// Opens an index as a node does: tables out of the indexes of layers, places into the bootstrap.
fn open(index: &ImageIndex) -> Opened {
    let unplaced = Bootstrap::open(&index.bootstrap[..]).unwrap();
    let mut tables = Vec::new();
    for blob in unplaced.unplaced() {
        let record = &unplaced.blob_records()[usize::from(blob.0)];
        let layer = index.layers.iter().find(|layer| layer.record.blob.id == record.blob.id);
        let (layer, tail) = (layer.unwrap(), record.tail);
        assert_eq!(tail.index, layer.record.tail.index);
        let stored = &layer.bytes[tail.ci_offset as usize..tail.meta_end() as usize];
        assert!(layer.tables.matches(stored));
        tables.push((*blob, rafs::ci_table_of(stored, &tail).unwrap()));
    }
    let Placed { at, table, points } = rafs::place_chunks(&index.bootstrap, &tables).unwrap();
    let mut bytes = index.bootstrap.clone();
    bytes[at as usize..][..table.len()].copy_from_slice(&table);
    let mut bootstrap = Bootstrap::open(bytes).unwrap();
    assert!(bootstrap.unplaced().is_empty());
    for (blob, points) in &points {
        bootstrap.set_points(*blob, points.clone()).unwrap();
    }
    for (BlobIndex(blob), table) in &tables {
        rafs::check_ci_table(&bootstrap.blob_records()[usize::from(*blob)], table).unwrap();
    }
    rafs::check(&bootstrap).unwrap();
    Opened { bootstrap, points }
}

/// Decodes a chunk from its stored bytes, if it has its digest.
fn read(opened: &Bootstrap<Vec<u8>>, blob: usize, chunk: &Chunk, stored: &[u8]) -> Option<Vec<u8>> {
    let stored = &stored[chunk.stored.0 as usize..chunk.stored_end().0 as usize];
    let (mut decoder, mut buffer) = (Decoder::new(), Vec::new());
    let unit = decoder.unit(&opened.blobs()[blob].unit(chunk), stored, &mut buffer).ok()?;
    let bytes = chunk.part_of(unit)?;
    chunk.digest.matches(bytes).then(|| bytes.to_vec())
}

/// The stored bytes of a blob: a layer, or a blob beside the layers.
fn stored_of(index: &ImageIndex, layers: &[Vec<u8>], id: &Digest) -> Vec<u8> {
    let layer = layers.iter().find(|layer| id.matches(layer));
    let beside = index.beside.iter().find(|beside| beside.record.blob.id == *id);
    layer.cloned().unwrap_or_else(|| std::fs::read(beside.unwrap().file.as_ref().unwrap()).unwrap())
}

struct Shown<'a> {
    tree: Tree,
    bootstrap: &'a Bootstrap<Vec<u8>>,
}

impl Content for Shown<'_> {
    fn tree(&self) -> &Tree {
        &self.tree
    }

    fn chunk(&self, chunk: ChunkRef) -> Option<(Digest, u32)> {
        let blob = self.bootstrap.blobs().get(usize::from(chunk.blob.0))?;
        blob.chunk(chunk.number).map(|chunk| (chunk.digest, chunk.decoded_size))
    }
}

/// Indexes layers, reads every chunk as a node does, and compares the tree with what the layers
/// hold.
fn same(layers: &[Vec<u8>]) -> ImageIndex {
    let index = index_of(layers).unwrap();
    let Opened { bootstrap, .. } = open(&index);
    for (number, blob) in bootstrap.blobs().iter().enumerate() {
        let stored = stored_of(&index, layers, &blob.id);
        assert_eq!(stored.len() as u64, blob.stored_size);
        for chunk in &blob.chunks {
            assert!(read(&bootstrap, number, chunk, &stored).is_some(), "{chunk:?}");
        }
    }
    let layer = |stored: &Vec<u8>| Layer {
        name: "layer".into(),
        stored_size: Some(stored.len() as u64),
        source: LayerSource::Tar(Box::new(Cursor::new(stored.clone()))),
    };
    let layers = layers.iter().map(layer).collect();
    let merged = merge(layers, CHUNK, Algorithm::Blake3, 2, &()).unwrap();
    let shown = Shown { tree: bootstrap.tree().unwrap(), bootstrap: &bootstrap };
    assert_eq!(compare(&shown, &merged, 5), []);
    index
}

#[test]
fn layers_of_any_encoder_are_read_where_they_are() {
    let tar = files();
    let members: Vec<u8> = tar.chunks(700_000).flat_map(|part| gzip(6, part)).collect();
    let small_members: Vec<u8> = tar.chunks(10_000).flat_map(|part| gzip(1, part)).collect();
    let named = GzBuilder::new().filename("layer.tar").comment("a comment").extra(b"ab".to_vec());
    let mut named = named.write(Vec::new(), Compression::new(6));
    named.write_all(&tar).unwrap();
    let mut kinds: Vec<Vec<u8>> = (0..=9).map(|level| gzip(level, &tar)).collect();
    let padded = [&kinds[6][..], &[0; 10_240]].concat();
    kinds.extend([members, small_members, named.finish().unwrap(), padded, tar.clone()]);
    let expected = Algorithm::Sha256.digest(&tar);
    for stored in &kinds {
        let index = same(std::slice::from_ref(stored));
        assert_eq!(index.diff_ids, [expected]);
        assert!(index.beside.is_empty());
        let bytes = index.layers[0].bytes.len();
        assert!(bytes * 20 < stored.len(), "{bytes} bytes for {}", stored.len());
    }
}

#[test]
fn an_image_with_every_oddity_has_an_index() {
    for compression in [Stored::Gzip, Stored::None] {
        let image = odd::image().compressed_with(compression);
        let layers: Vec<_> = image.layers.iter().map(|layer| layer.stored().unwrap()).collect();
        let index = same(&layers);
        // Sparse files are not in one piece in any tar.
        assert!(!index.beside.is_empty());
        let diff_ids: Vec<_> = image.layers.iter().map(|layer| layer.diff_id()).collect();
        assert_eq!(index.diff_ids, diff_ids);
    }
}

#[test]
fn content_without_a_point_is_stored_beside_the_layer() {
    // Zeros are one block, however many there are; data behind them in this block is too far from
    // its start.
    let zeros = Entry::file("zeros", vec![0; 40 << 20]);
    let pieces = vec![(5000, b"data".to_vec())];
    let sparse = Body::Sparse { format: SparseFormat::Pax10, size: 100_000, pieces };
    let tar = tarball::write(&[zeros, Entry::new("sparse", sparse), Entry::file("end", "end")]);
    let index = same(&[gzip(1, &tar)]);
    assert_eq!(index.beside.len(), 1);
    let beside = &index.beside[0].record.blob;
    assert!(beside.stored_size < 100_000, "{}", beside.stored_size);
}

#[test]
fn equal_layers_give_equal_indexes() {
    let layers = [gzip(6, &files()), gzip(6, &tarball::write(&[Entry::file("x", "y")]))];
    let [a, b] = [(); 2].map(|()| index_of(&layers).unwrap());
    assert_eq!(a.bootstrap, b.bootstrap);
    for (a, b) in a.layers.iter().zip(&b.layers) {
        assert_eq!(a.bytes, b.bytes);
    }
    // An index does not depend on neighbouring layers.
    let alone = index_of(&layers[..1]).unwrap();
    assert_eq!(alone.layers[0].bytes, a.layers[0].bytes);
}

/// A source that delivers a few bytes at a time, as a network does.
struct Trickle(Cursor<Vec<u8>>, usize);

impl Read for Trickle {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.1 = self.1 * 31 % 61 + 1;
        let count = buffer.len().min(self.1);
        self.0.read(&mut buffer[..count])
    }
}

#[test]
fn the_index_does_not_depend_on_how_the_layer_arrives() {
    let stored = gzip(6, &files());
    let expected = index_of(std::slice::from_ref(&stored)).unwrap();
    for seed in 1..4 {
        let layer = IndexLayer {
            digest: Algorithm::Sha256.digest(&stored),
            stored_size: stored.len() as u64,
            file: None,
            source: Box::new(Trickle(Cursor::new(stored.clone()), seed)),
        };
        let scratch = tempfile::tempdir().unwrap();
        let index = index(vec![layer], scratch.path(), 2, &()).unwrap();
        assert!(index.layers[0].bytes == expected.layers[0].bytes, "{seed}");
        assert!(index.bootstrap == expected.bootstrap, "{seed}");
    }
}

#[test]
fn layers_without_content_have_no_blob() {
    let layers = [
        gzip(6, &tarball::write(&[Entry::file("a", "a"), Entry::file("b", "b")])),
        gzip(6, &tarball::write(&[Entry::directory("d"), Entry::file(".wh.a", "")])),
    ];
    let index = same(&layers);
    assert_eq!((index.layers.len(), index.diff_ids.len()), (2, 2));
    assert_eq!(open(&index).bootstrap.blobs().len(), 1);
    let empty = same(&[gzip(6, &tarball::write(&[]))]);
    assert_eq!(open(&empty).bootstrap.blobs().len(), 0);
    assert_same_without_layers(&layers, &index);
}

/// A node's knowledge of layers whose indexes it has.
fn known(layers: &[Vec<u8>], index: &ImageIndex) -> Vec<KnownLayer> {
    let known = layers.iter().zip(&index.diff_ids).map(|(stored, diff_id)| {
        let digest = Algorithm::Sha256.digest(stored);
        let written = index.layers.iter().find(|it| it.record.blob.id == digest).unwrap();
        let (stored_size, index) = (stored.len() as u64, written.bytes.clone());
        KnownLayer { digest, stored_size, diff_id: *diff_id, file: None, index }
    });
    known.collect()
}

/// Makes the same image of the indexes alone, and the layers again with the content of chunks.
fn assert_same_without_layers(layers: &[Vec<u8>], index: &ImageIndex) {
    let known = known(layers, index);
    let again = assemble(known.clone()).unwrap();
    assert_eq!(again.bootstrap, index.bootstrap);
    assert_eq!(again.diff_ids, index.diff_ids);
    for (layer, again) in index.layers.iter().zip(&again.layers) {
        assert_eq!((&layer.bytes, &layer.record), (&again.bytes, &again.record));
        assert_eq!(layer.tables, again.tables);
    }
    for (known, stored) in known.iter().zip(layers) {
        let mut tar = Vec::new();
        std::io::Read::read_to_end(&mut MultiGzDecoder::new(&stored[..]), &mut tar).unwrap();
        let read = ReadIndex::parse(&known.index, known.digest, known.stored_size).unwrap();
        let fill = |chunk: &Chunk, content: &mut [u8]| {
            let start = read.starts[chunk.number as usize] as usize;
            content.copy_from_slice(&tar[start..start + content.len()]);
            Ok(())
        };
        assert_eq!(diff_id(&read, fill).unwrap(), known.diff_id);
        let other = |_: &Chunk, content: &mut [u8]| {
            content.fill(b'x');
            Ok(())
        };
        let is_empty = read.starts.is_empty();
        assert_eq!(diff_id(&read, other).unwrap() == known.diff_id, is_empty);
    }
}

#[test]
fn an_image_is_made_of_indexes_alone() {
    let white = [Entry::file("dir/.wh.text1", ""), Entry::file("dir/text2", "another")];
    let layers = [gzip(6, &files()), gzip(9, &tarball::write(&white)), gzip(6, &files())];
    assert_same_without_layers(&layers, &index_of(&layers).unwrap());
    // Any lower layers are an image of their own.
    for count in 1..layers.len() {
        assert_same_without_layers(&layers[..count], &index_of(&layers[..count]).unwrap());
    }
}

#[test]
fn indexes_that_do_not_lead_to_all_of_a_layer_are_refused() {
    let sparse = Body::Sparse {
        format: SparseFormat::Pax10,
        size: 9000,
        pieces: vec![(5000, b"data".to_vec())],
    };
    let layers = [gzip(6, &tarball::write(&[Entry::file("a", "a"), Entry::new("s", sparse)]))];
    let error = assemble(known(&layers, &index_of(&layers).unwrap())).unwrap_err().to_string();
    assert!(error.contains("no skeleton"), "{error}");
    let layers = [gzip(6, &files())];
    let index = index_of(&layers).unwrap();
    let mut cut = known(&layers, &index);
    let half = cut[0].index.len() / 2;
    cut[0].index.truncate(half);
    assert!(assemble(cut).is_err());
}

#[test]
fn content_is_handed_on_where_it_will_be() {
    let stored = gzip(6, &files());
    let digest = Algorithm::Sha256.digest(&stored);
    let layer = || IndexLayer {
        digest,
        stored_size: stored.len() as u64,
        file: None,
        source: Box::new(Cursor::new(stored.clone())),
    };
    let mut taken = Vec::new();
    let mut sink = |at: Decoded, content: &[u8]| {
        taken.push((at, Algorithm::Blake3.digest(content)));
        Ok(())
    };
    let made = index_while_reading(layer(), &mut sink).unwrap();
    let index = index_of(std::slice::from_ref(&stored)).unwrap();
    assert_eq!(made.index.bytes, index.layers[0].bytes);
    assert_eq!(made.diff_id, index.diff_ids[0]);
    let chunks = &made.index.record.blob.chunks;
    let places: Vec<_> = chunks.iter().map(|chunk| (chunk.decoded, chunk.digest)).collect();
    assert_eq!(taken, places);
    let mut full = |_: Decoded, _: &[u8]| Err(std::io::Error::other("no room"));
    assert!(index_while_reading(layer(), &mut full).unwrap_err().to_string().contains("no room"));
}

#[test]
fn a_layer_may_be_there_twice() {
    let sparse = |size| {
        let pieces = vec![(5000, b"data".to_vec())];
        Body::Sparse { format: SparseFormat::Pax10, size, pieces }
    };
    let twice = gzip(6, &tarball::write(&[Entry::file("a", "a"), Entry::new("s", sparse(9000))]));
    let other = gzip(6, &tarball::write(&[Entry::file("b", "b"), Entry::new("t", sparse(9000))]));
    let index = same(&[twice.clone(), other, twice]);
    assert_eq!((index.layers.len(), index.beside.len(), index.diff_ids.len()), (2, 1, 3));
}

fn lone_file(number: usize, content: &[u8]) -> IndexLayer {
    IndexLayer {
        digest: Algorithm::Sha256.digest(content),
        stored_size: content.len() as u64,
        file: Some(format!("shards/{number}")),
        source: Box::new(Cursor::new(content.to_vec())),
    }
}

#[test]
fn a_layer_that_is_a_file_is_indexed_as_it_is() {
    // Nothing of it is unpacked, whatever it looks like.
    let content = gzip(0, &odd::random(7, (5 << 19) + 7));
    let (scratch, digest) = (tempfile::tempdir().unwrap(), Algorithm::Sha256.digest(&content));
    let layers = vec![lone_file(1, &content), lone_file(2, b""), lone_file(3, &content)];
    let index = index(layers, scratch.path(), 2, &()).unwrap();
    assert_eq!((index.layers.len(), index.beside.len()), (2, 0));
    assert_eq!(index.diff_ids, [digest, Algorithm::Sha256.digest(b""), digest]);
    let Opened { bootstrap, points } = open(&index);
    assert!(points.is_empty());
    let [blob] = bootstrap.blobs() else { panic!("{:?}", bootstrap.blobs().len()) };
    let mut end = 0;
    for chunk in &blob.chunks {
        assert_eq!((chunk.stored.0, chunk.stored_size), (end, chunk.decoded_size));
        assert!(read(&bootstrap, 0, chunk, &content).is_some());
        end = chunk.stored_end().0;
    }
    assert_eq!(end, content.len() as u64);
    assert!(blob.is_one_file());
    let other = index_of(&[tarball::write(&[Entry::file("model", content.clone())])]).unwrap();
    assert!(!open(&other).bootstrap.blobs()[0].is_one_file(), "headers are around it");
    let layer = |number: usize, content: &[u8]| Layer {
        name: "layer".into(),
        stored_size: Some(content.len() as u64),
        source: LayerSource::File(
            format!("shards/{number}"),
            Box::new(Cursor::new(content.to_vec())),
        ),
    };
    let layers = vec![layer(1, &content), layer(2, b""), layer(3, &content)];
    let merged = merge(layers, CHUNK, Algorithm::Blake3, 2, &()).unwrap();
    let shown = Shown { tree: bootstrap.tree().unwrap(), bootstrap: &bootstrap };
    assert_eq!(compare(&shown, &merged, 5), []);
}

#[test]
fn a_layer_that_is_a_file_and_a_tar_is_refused() {
    let tar = tarball::write(&[Entry::file("a", odd::random(1, 1 << 20))]);
    let layers = vec![lone_file(1, &tar), IndexLayer { file: None, ..lone_file(1, &tar) }];
    let error = index(layers, tempfile::tempdir().unwrap().path(), 2, &()).unwrap_err();
    assert!(error.to_string().contains("as a file and as a tar"), "{error}");
}

#[test]
fn an_artifact_may_have_as_many_files_as_blobs() {
    let index = |files: usize, tars: usize| {
        let mut layers: Vec<_> =
            (0..files).map(|number| lone_file(number, &number.to_le_bytes())).collect();
        layers.extend((0..tars).map(|number| {
            // Sparse files are stored beside the layer, in one blob more.
            let pieces = vec![(5000, number.to_le_bytes().to_vec())];
            let sparse = Body::Sparse { format: SparseFormat::Pax10, size: 9000, pieces };
            let tar = tarball::write(&[Entry::new(format!("sparse{number}"), sparse)]);
            IndexLayer { file: None, ..lone_file(0, &gzip(6, &tar)) }
        }));
        index(layers, tempfile::tempdir().unwrap().path(), 2, &())
    };
    let made = index(250, 2).unwrap();
    assert_eq!((made.layers.len(), made.beside.len()), (252, 2));
    let opened = Bootstrap::open(&made.bootstrap[..]).unwrap();
    assert_eq!(opened.blobs().len(), 252);
    let error = index(251, 2).unwrap_err().to_string();
    assert!(error.contains("255 blobs") && error.contains("254"), "{error}");
}

#[test]
fn images_that_cannot_be_indexed_are_refused_by_name() {
    let tar = files();
    let zstd = zstd::bulk::compress(&tar, 1).unwrap();
    let good = gzip(6, &tar);
    let garbage = [&good[..], b"garbage"].concat();
    let cases = [
        (zstd, "zstd"),
        (garbage, "gzip magic"),
        (good[..good.len() / 2].to_vec(), "cut off"),
        (b"no tar at all, but long enough".repeat(50), "header"),
    ];
    for (stored, problem) in cases {
        let digest = Algorithm::Sha256.digest(&stored).to_string();
        let error = index_of(&[stored]).unwrap_err();
        let error = format!("{error}: {:?}", std::error::Error::source(&error));
        assert!(error.contains(problem) && error.contains(&digest), "{error}");
    }
}

/// A forged index causes errors, and never wrong bytes: digests cover decoded bytes.
#[test]
fn forged_windows_and_points_never_pass() {
    let layers = [gzip(6, &files())];
    let index = index_of(&layers).unwrap();
    let Opened { mut bootstrap, points } = open(&index);
    let (blob, points) = points.into_iter().next().unwrap();
    let first = bootstrap.blobs()[0].chunks[0];
    type Forge = fn(&mut NewPoint);
    let forges: [Forge; 3] = [
        |point| point.window.iter_mut().for_each(|byte| *byte ^= 0x20),
        |point| point.window.clear(),
        |point| point.bits = (point.bits + 1) % 8,
    ];
    let starts: std::collections::BTreeSet<_> =
        bootstrap.blobs()[0].chunks.iter().map(|chunk| chunk.stored).collect();
    assert!(starts.len() > 3);
    for forge in forges {
        let forged: Points = starts
            .iter()
            .map(|stored| {
                let point = points.at(*stored).unwrap();
                let window = point.window().unwrap();
                let mut new =
                    NewPoint { stored: *stored, bits: point.bits, before: point.before, window };
                if *stored != first.stored {
                    forge(&mut new);
                }
                new
            })
            .collect();
        bootstrap.set_points(blob, forged).unwrap();
        let chunks = bootstrap.blobs()[0].chunks.clone();
        let wrong =
            chunks.iter().filter(|chunk| read(&bootstrap, 0, chunk, &layers[0]).is_none()).count();
        assert!(wrong > 0, "{wrong} of {}", chunks.len());
    }
}
