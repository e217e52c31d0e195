//! Reuse of stored chunks and recorded layers.

use std::collections::HashMap;

use lazuli_builder::{
    BuildError, Built, Dictionary, Layer, LayerContents, LayerSource, Options, bootstrap_layer,
    build, build_with, merge,
};
use lazuli_image::{
    Algorithm, Codec, Digest,
    compare::compare,
    rafs::{Bootstrap, check},
};

use crate::{
    images::{CHUNK_SIZE, Image, layers, noise, options},
    tarball::{Tar, layer},
};

/// A dictionary of the blobs of these images, as a registry would describe them.
fn dictionary(images: &[&Built]) -> Dictionary {
    let mut dictionary = Dictionary::default();
    for image in images {
        let bootstrap = Bootstrap::open(&image.bootstrap[..]).unwrap();
        let blobs = image.blobs.iter().map(|blob| &blob.record.blob);
        let sizes: HashMap<Digest, u64> = blobs.map(|blob| (blob.id, blob.stored_size)).collect();
        dictionary.add(&bootstrap, |id| Some((*sizes.get(id)?, None)));
    }
    dictionary
}

/// An image, and the records of the layers that were read for it.
fn make(
    dictionary: Dictionary,
    layers: Vec<Layer>,
    options: &Options,
) -> Result<(Built, Vec<(usize, LayerContents)>), BuildError> {
    let mut records = Vec::new();
    let built = build_with(dictionary, layers, options, &(), &mut |read| {
        let record = LayerContents::from_bytes(&read.record().unwrap()).unwrap();
        records.push((read.layer(), record));
    })?;
    Ok((built, records))
}

fn fresh(built: &Built) -> Vec<u64> {
    let fresh = built.blobs.iter().filter(|blob| blob.file.is_some());
    fresh.map(|blob| blob.record.blob.chunks.len() as u64).collect()
}

/// The layers of a next version, with one of them changed.
fn next() -> Vec<Layer> {
    let mut layers = layers();
    let tar = Tar::default().file("only/old", &noise(1, 10_000)).file("only/new", &noise(9, 6000));
    layers[2] = layer("changed", tar.end());
    layers
}

fn is_whole(built: &Built, layers: Vec<Layer>) {
    let bootstrap = Bootstrap::open(&built.bootstrap[..]).unwrap();
    check(&bootstrap).unwrap();
    let image = Image { tree: bootstrap.tree().unwrap(), blobs: bootstrap.blobs().to_vec() };
    let source = merge(layers, CHUNK_SIZE, Algorithm::Blake3, 2, &()).unwrap();
    assert_eq!(compare(&image, &source, 10), []);
}

#[test]
fn an_image_that_exists_is_built_from_its_blobs() {
    let scratch = tempfile::tempdir().unwrap();
    let options = options(scratch.path(), Codec::Zstd, 2);
    let first = build(layers(), &options, &()).unwrap();
    let (again, _) = make(dictionary(&[&first]), layers(), &options).unwrap();
    assert_eq!(fresh(&again), [0; 0]);
    assert!(again.bootstrap == first.bootstrap);
    // Also the tables that travel beside the bootstrap, without a fetch of them.
    assert!(bootstrap_layer(&again) == bootstrap_layer(&first));
    let figures = |built: &Built| (built.report.distinct_chunks, built.report.distinct_bytes);
    assert_eq!(figures(&again), figures(&first));
    assert_eq!((again.report.known_blobs, again.report.read_layers), (3, 3));
}

#[test]
fn a_changed_layer_stores_only_new_chunks() {
    let scratch = tempfile::tempdir().unwrap();
    let options = options(scratch.path(), Codec::Zstd, 2);
    let first = build(layers(), &options, &()).unwrap();
    let (second, _) = make(dictionary(&[&first]), next(), &options).unwrap();
    assert_eq!(fresh(&second), [2]);
    is_whole(&second, next());
    // With both versions there is nothing left to store.
    let (third, _) = make(dictionary(&[&first, &second]), next(), &options).unwrap();
    assert_eq!(fresh(&third), [0; 0]);
    is_whole(&third, next());
}

#[test]
fn known_layers_are_not_read_again() {
    let scratch = tempfile::tempdir().unwrap();
    let options = options(scratch.path(), Codec::Zstd, 2);
    let (first, records) = make(Dictionary::default(), layers(), &options).unwrap();
    assert_eq!(records.iter().map(|(layer, _)| *layer).collect::<Vec<_>>(), [0, 1, 2]);
    let known = |mut layers: Vec<Layer>, which: &[usize]| {
        for &at in which {
            layers[at].source = LayerSource::Known(Box::new(records[at].1.clone()));
        }
        layers
    };
    let (all, read) = make(dictionary(&[&first]), known(layers(), &[0, 1, 2]), &options).unwrap();
    assert!(all.bootstrap == first.bootstrap && read.is_empty() && fresh(&all).is_empty());
    let (second, read) = make(dictionary(&[&first]), known(next(), &[0, 1]), &options).unwrap();
    assert_eq!((fresh(&second), read.len(), second.report.read_layers), (vec![2], 1, 1));
    is_whole(&second, next());
    let missing = make(Dictionary::default(), known(layers(), &[1]), &options).unwrap_err();
    let expected = "layer middle: 153 of its chunks are not in the dictionary";
    assert_eq!(missing.to_string(), expected);
}

#[test]
fn small_blobs_count_for_whole_layers_only() {
    let scratch = tempfile::tempdir().unwrap();
    let options = options(scratch.path(), Codec::Zstd, 2);
    let big = || layer("big", Tar::default().file("big", &noise(5, 300 << 10)).end());
    let small = |name| layer(name, Tar::default().file(name, &noise(6, 9000)).end());
    let (first, records) = make(Dictionary::default(), vec![big(), small("s")], &options).unwrap();
    let record = |at: usize| Some(records[at].1.clone());
    let ids = |built: &Built, at: usize| built.blobs[at].record.blob.id;

    let mut all = dictionary(&[&first]);
    assert_eq!(all.trim(&[None, None], &options), [false, false]);
    assert_eq!(all.ids().collect::<Vec<_>>(), [ids(&first, 0)]);

    // The layer that is not known stands first.
    let mut all = dictionary(&[&first]);
    assert_eq!(all.trim(&[None, record(1)], &options), [false, true]);
    assert_eq!(all.ids().collect::<Vec<_>>(), [ids(&first, 0), ids(&first, 1)]);

    let other = Options { chunk_size: 2 * CHUNK_SIZE, ..options.clone() };
    let mut all = dictionary(&[&first]);
    assert_eq!(all.trim(&[record(0), record(1)], &other), [false, false]);
    assert!(all.is_empty());
    let other = Options { codec: Codec::Lz4, ..options };
    let mut all = dictionary(&[&first]);
    assert_eq!(all.trim(&[record(0), record(1)], &other), [false, false]);
    assert!(all.is_empty());
}

#[test]
fn damaged_layer_records_are_ignored() {
    let scratch = tempfile::tempdir().unwrap();
    let options = options(scratch.path(), Codec::Zstd, 2);
    let mut records = Vec::new();
    let mut keep = |read: lazuli_builder::ReadLayer<'_>| records.push(read.record().unwrap());
    build_with(Dictionary::default(), layers(), &options, &(), &mut keep).unwrap();
    let record = &records[0];
    assert!(LayerContents::from_bytes(record).is_some());
    for length in 0..record.len() {
        assert!(LayerContents::from_bytes(&record[..length]).is_none(), "{length}");
    }
    for at in 0..record.len() {
        let mut damaged = record.clone();
        damaged[at] ^= 1;
        assert!(LayerContents::from_bytes(&damaged).is_none(), "{at}");
    }
}

#[test]
fn blobs_of_others_are_left_out() {
    let scratch = tempfile::tempdir().unwrap();
    let built = build(layers(), &options(scratch.path(), Codec::Zstd, 2), &()).unwrap();
    let bootstrap = Bootstrap::open(&built.bootstrap[..]).unwrap();
    let add = |size: &dyn Fn(&Digest) -> Option<u64>| {
        let mut dictionary = Dictionary::default();
        dictionary.add(&bootstrap, |id| Some((size(id)?, None)));
        dictionary.ids().count()
    };
    let size = |id: &Digest| {
        let blobs = built.blobs.iter().map(|blob| &blob.record.blob);
        blobs.filter(|blob| blob.id == *id).map(|blob| blob.stored_size).next()
    };
    assert_eq!(add(&size), 3);
    assert_eq!(add(&|id| Some(size(id)? + 1)), 0, "there is more in it than the bootstrap says");
    assert_eq!(add(&|_| None), 0, "they are gone");
}
