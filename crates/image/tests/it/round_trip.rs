use std::collections::BTreeMap;

use lazuli_image::{
    Codec, Inode, Kind, Metadata, Mtime, Name, Tree,
    rafs::{Bootstrap, check, write_bootstrap},
    tree::Device,
};
use proptest::{collection, prelude::*};

use crate::support::{BlobBuilder, flatten, records, sample, small_chunks};

#[test]
fn the_sample_reads_back_as_written() {
    let sample = sample();
    let bootstrap = Bootstrap::open(&sample.bootstrap[..]).unwrap();
    let summary = check(&bootstrap).unwrap();
    assert_eq!(summary.names, flatten(&sample.tree).len() as u64);
    assert_eq!(flatten(&bootstrap.tree().unwrap()), flatten(&sample.tree));
    assert_eq!(bootstrap.blob_records(), records(&sample.blobs));
    // Writing a tree that was read gives the same bytes, whatever the order of `Tree::add`.
    let again = bootstrap.tree().unwrap();
    let again = write_bootstrap(&again, &bootstrap.blob_records(), &small_chunks()).unwrap();
    assert!(again == sample.bootstrap);
}

#[test]
fn an_image_without_data_reads_back() {
    let tree = Tree::new(Metadata::default());
    let image = write_bootstrap(&tree, &[], &small_chunks()).unwrap();
    let bootstrap = Bootstrap::open(image).unwrap();
    assert_eq!(check(&bootstrap).unwrap().names, 1);
    assert!(bootstrap.blobs().is_empty());
}

#[test]
fn extents_cover_files_exactly() {
    let sample = sample();
    let bootstrap = Bootstrap::open(&sample.bootstrap[..]).unwrap();
    for name in [&b"text"[..], b"noise", b"hello", b"scattered", b"empty"] {
        let nid = bootstrap.lookup(bootstrap.root(), name).unwrap().unwrap();
        let size = bootstrap.inode(nid).unwrap().size;
        let mut content = Vec::new();
        while let Some(extent) = bootstrap.extent(nid, content.len() as u64).unwrap() {
            let start = extent.start.0 as usize;
            let blob = &sample.blobs[usize::from(extent.blob.0)].decoded;
            content.extend_from_slice(&blob[start..start + extent.len as usize]);
            // The same place is found from within the chunk.
            let last = content.len() as u64 - 1;
            assert_eq!(bootstrap.extent(nid, last).unwrap().unwrap().len, 1);
        }
        assert_eq!(content.len() as u64, size, "{}", name.escape_ascii());
        let digests: Vec<_> = content
            .chunks(0x4000)
            .map(|piece| bootstrap.digest_algorithm().digest(piece))
            .collect();
        let chunks = bootstrap.chunks(nid).unwrap().map(|chunk| {
            let (chunk, _) = chunk.unwrap();
            bootstrap.blobs()[usize::from(chunk.blob.0)].chunk(chunk.number).unwrap().digest
        });
        assert_eq!(chunks.collect::<Vec<_>>(), digests);
    }
}

#[test]
fn listings_continue_where_they_stopped() {
    let sample = sample();
    let bootstrap = Bootstrap::open(&sample.bootstrap[..]).unwrap();
    let big = bootstrap.lookup(bootstrap.root(), b"big").unwrap().unwrap();
    assert!(bootstrap.inode(big).unwrap().size > 4096 * 2);
    let all: Vec<_> = bootstrap.read_dir(big, 0).unwrap().collect::<Result<_, _>>().unwrap();
    assert_eq!(all.len(), 82);
    for (at, entry) in all.iter().enumerate() {
        let rest = bootstrap.read_dir(big, entry.next_offset).unwrap();
        assert!(rest.map(Result::unwrap).eq(all[at + 1..].iter().copied()));
        assert_eq!(bootstrap.lookup(big, entry.name).unwrap(), Some(entry.nid));
        let missing = [entry.name, b"?"].concat();
        assert_eq!(bootstrap.lookup(big, &missing).unwrap(), None);
    }
    assert_eq!(bootstrap.lookup(big, b"\x01").unwrap(), None);
    assert_eq!(bootstrap.read_dir(big, u64::MAX).unwrap().count(), 0);
}

/// A file before it is in a tree: content by size, so that shrinking is easy.
#[derive(Clone, Debug)]
enum Node {
    Directory,
    File(Vec<u8>),
    Other(Kind),
    /// One more name for the file with this index, modulo.
    HardLink(prop::sample::Index),
}

fn name() -> impl Strategy<Value = Name> {
    let byte = any::<u8>().prop_filter("allowed in a name", |byte| !matches!(byte, 0 | b'/'));
    let len = prop_oneof![4 => 1..12_usize, 1 => 250..256_usize];
    len.prop_flat_map(move |len| collection::vec(byte.clone(), len))
        .prop_filter_map("dots", |bytes| Name::new(&bytes).ok())
}

fn metadata() -> impl Strategy<Value = Metadata> {
    let prefix = prop_oneof![Just("user."), Just("trusted."), Just("security.")];
    let attribute = (prefix, "[a-z]{1,20}").prop_map(|(prefix, rest)| [prefix, &rest].concat());
    let attribute = prop_oneof![
        8 => attribute,
        1 => Just("system.posix_acl_access".to_owned()),
        1 => Just("system.posix_acl_default".to_owned()),
    ];
    let attribute = attribute.prop_map(|name| name.into_bytes().into_boxed_slice());
    let value = prop_oneof![
        9 => collection::vec(any::<u8>(), 0..40),
        1 => collection::vec(any::<u8>(), 5000..5010),
    ];
    let xattrs = collection::btree_map(attribute, value.prop_map(Vec::into_boxed_slice), 0..4);
    let xattrs = prop_oneof![2 => Just(BTreeMap::new()), 1 => xattrs];
    let mtime = (any::<i64>(), 0..1_000_000_000_u32)
        .prop_map(|(seconds, nanoseconds)| Mtime { seconds, nanoseconds });
    (0..=0o7777_u16, any::<u32>(), any::<u32>(), mtime, xattrs).prop_map(
        |(permissions, uid, gid, mtime, xattrs)| Metadata { permissions, uid, gid, mtime, xattrs },
    )
}

fn node() -> impl Strategy<Value = Node> {
    let target = collection::vec(1..=255_u8, 1..=4095).prop_map(|target| target.into());
    let device = (0..4096_u32, 0..1_u32 << 20).prop_map(|(major, minor)| Device { major, minor });
    let size = prop_oneof![3 => 0..100_usize, 1 => 0..100_000_usize];
    prop_oneof![
        3 => Just(Node::Directory),
        4 => (size, any::<u8>()).prop_map(|(size, fill)| Node::File(vec![fill; size])),
        1 => target.prop_map(|target| Node::Other(Kind::Symlink(target))),
        1 => device.clone().prop_map(|device| Node::Other(Kind::CharDevice(device))),
        1 => device.prop_map(|device| Node::Other(Kind::BlockDevice(device))),
        1 => Just(Node::Other(Kind::Fifo)),
        1 => Just(Node::Other(Kind::Socket)),
        2 => any::<prop::sample::Index>().prop_map(Node::HardLink),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_tree_reads_back_as_written(
        root in metadata(),
        nodes in collection::vec((name(), metadata(), node(), any::<prop::sample::Index>()), 0..120),
    ) {
        let mut blob = BlobBuilder::new(Codec::Zstd, small_chunks());
        let mut tree = Tree::new(root);
        let (mut directories, mut files) = (vec![Tree::ROOT], vec![]);
        for (name, metadata, node, parent) in nodes {
            // Half of the names go to the root, so that directories of several blocks are common.
            let parent = *parent.get(&directories);
            let parent = if metadata.uid % 2 == 0 { Tree::ROOT } else { parent };
            if tree.children(parent).is_some_and(|children| children.contains_key(&name)) {
                continue;
            }
            let kind = match node {
                Node::Directory => Kind::Directory(BTreeMap::new()),
                Node::File(content) => blob.file(0, &content),
                Node::Other(kind) => kind,
                Node::HardLink(to) => {
                    if !files.is_empty() {
                        let id = *to.get(&files);
                        tree.children_mut(parent).unwrap().insert(name, id);
                    }
                    continue;
                }
            };
            let is_directory = matches!(kind, Kind::Directory(_));
            let id = tree.add(Inode { metadata, kind });
            tree.children_mut(parent).unwrap().insert(name, id);
            if is_directory { directories.push(id) } else { files.push(id) }
        }
        let records = if blob.chunks.is_empty() { vec![] } else { vec![blob.finish().record] };
        let image = write_bootstrap(&tree, &records, &small_chunks()).unwrap();
        let bootstrap = Bootstrap::open(&image[..]).unwrap();
        prop_assert_eq!(check(&bootstrap).unwrap().names, bootstrap.inode_count());
        prop_assert_eq!(flatten(&bootstrap.tree().unwrap()), flatten(&tree));
        prop_assert_eq!(bootstrap.blob_records(), &records[..]);
        let again = write_bootstrap(&tree, &records, &small_chunks()).unwrap();
        prop_assert!(image == again);
    }
}
