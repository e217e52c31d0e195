use std::collections::BTreeMap;

use lazuli_image::Mtime;
use proptest::prelude::*;

use super::*;

fn path(text: &str) -> EntryPath {
    EntryPath::parse(format!("./{text}").as_bytes()).unwrap()
}

/// An entry identified by its mtime.
fn entry(at: &str, mtime: i64, kind: EntryKind) -> Entry {
    let mtime = Mtime { seconds: mtime, nanoseconds: 0 };
    let metadata = Metadata { permissions: 0o700, mtime, ..Metadata::default() };
    Entry { path: path(at), offset: 0, metadata, kind }
}

fn file() -> EntryKind {
    EntryKind::Regular { size: 0, chunks: Vec::new() }
}

/// `d a 1` is a directory with mtime 1, `f` a file, `s a 1 target` a symbolic and `h a 0 target` a
/// hard link, `w a` a whiteout of a, `o a` an opaque a.
fn parse(line: &str) -> Entry {
    let words: Vec<&str> = line.split(' ').collect();
    let mtime = words.get(2).map_or(0, |word| word.parse().unwrap());
    let kind = match words[0] {
        "d" => EntryKind::Directory,
        "f" => file(),
        "s" => EntryKind::Symlink(words[3].as_bytes().into()),
        "h" => EntryKind::HardLink(path(words[3])),
        "w" => EntryKind::Whiteout,
        "o" => EntryKind::Opaque,
        other => panic!("{other}"),
    };
    entry(words[1], mtime, kind)
}

/// Lines like those of [`parse`], with `=N` for the N-th inode in order of paths.
fn listing(tree: &Tree) -> Vec<String> {
    fn visit(
        tree: &Tree,
        at: InodeId,
        path: &str,
        ids: &mut Vec<InodeId>,
        lines: &mut Vec<String>,
    ) {
        for (name, &id) in tree.children(at).unwrap() {
            let path = format!("{path}{name}");
            let number = ids.iter().position(|&known| known == id).unwrap_or_else(|| {
                ids.push(id);
                ids.len() - 1
            });
            let letter = match &tree[id].kind {
                Kind::Directory(_) => "d",
                Kind::Symlink(_) => "s",
                _ => "f",
            };
            lines.push(format!("{letter} {path} {} ={number}", tree[id].metadata.mtime.seconds));
            if tree.children(id).is_some() {
                visit(tree, id, &format!("{path}/"), ids, lines);
            }
        }
    }
    let mut lines = Vec::new();
    visit(tree, Tree::ROOT, "", &mut Vec::new(), &mut lines);
    lines
}

fn stack(layers: &[&[&str]]) -> Result<Tree, BuildError> {
    let mut overlay = Overlay::new();
    for (number, layer) in layers.iter().enumerate() {
        let entries = layer.iter().map(|line| parse(line)).collect();
        overlay.apply(&format!("layer{number}"), entries)?;
    }
    Ok(overlay.finish())
}

/// A description, layers, and the expected tree.
type Case = (&'static str, &'static [&'static [&'static str]], &'static [&'static str]);

#[test]
fn layers_stack_as_the_specification_says() {
    let table: &[Case] = &[
        ("a whiteout hides", &[&["f a 1", "f b 2"], &["w a"]], &["f b 2 =0"]),
        ("a whiteout hides a tree", &[&["d a 1", "f a/x 2"], &["w a"]], &[]),
        ("nothing to hide", &[&["w a", "f b 1"], &["w c/d"]], &["f b 1 =0"]),
        (
            "a whiteout after its name hides only below",
            &[&["f a 1"], &["f a 2", "w a"]],
            &["f a 2 =0"],
        ),
        (
            "an opaque directory, whatever the order",
            &[&["d a 1", "f a/x 2"], &["d a 3", "f a/y 4", "o a"]],
            &["d a 3 =0", "f a/y 4 =1"],
        ),
        ("an opaque root", &[&["f a 1", "d b 2"], &["f c 3", "o ."]], &["f c 3 =0"]),
        (
            "directories merge, the upper one is what it is",
            &[&["d a 1", "f a/x 2"], &["d a 3", "f a/y 4"]],
            &["d a 3 =0", "f a/x 2 =1", "f a/y 4 =2"],
        ),
        (
            "a directory that is not listed stays as it is",
            &[&["d a 1", "d a/b 2"], &["f a/b/x 3"]],
            &["d a 1 =0", "d a/b 2 =1", "f a/b/x 3 =2"],
        ),
        (
            "a directory without an entry of its own",
            &[&["f a/b/x 3"]],
            &["d a 0 =0", "d a/b 0 =1", "f a/b/x 3 =2"],
        ),
        ("listed after its content", &[&["f a/x 3", "d a 7"]], &["d a 7 =0", "f a/x 3 =1"]),
        ("a file for a directory", &[&["d a 1", "f a/x 2"], &["f a 3"]], &["f a 3 =0"]),
        (
            "a directory for a file",
            &[&["f a 1"], &["d a 2", "f a/x 3"]],
            &["d a 2 =0", "f a/x 3 =1"],
        ),
        (
            "an implied directory for a file",
            &[&["f a 1"], &["f a/x 3"]],
            &["d a 0 =0", "f a/x 3 =1"],
        ),
        ("the last of equal names", &[&["f a 1", "f a 2", "f a 3"]], &["f a 3 =0"]),
        (
            "through a symbolic link",
            &[&["d usr 1", "d usr/lib 2", "s lib 3 usr/lib"], &["f lib/x 4", "w lib/y"]],
            &["s lib 3 =0", "d usr 1 =1", "d usr/lib 2 =2", "f usr/lib/x 4 =3"],
        ),
        (
            "a directory for a symbolic link has nothing of what was behind it",
            &[&["d a 1", "f a/x 2", "f a/y 3", "s b 4 a"], &["d b 5", "f b/z 6", "o b", "w b/x"]],
            &["d a 1 =0", "f a/x 2 =1", "f a/y 3 =2", "d b 5 =3", "f b/z 6 =4"],
        ),
        (
            "nor has a directory in it",
            &[
                &["d a 1", "d a/c 2", "f a/c/x 3", "s b 4 a"],
                &["d b 5", "d b/c 6", "o b/c", "w b/c/x"],
            ],
            &["d a 1 =0", "d a/c 2 =1", "f a/c/x 3 =2", "d b 5 =3", "d b/c 6 =4"],
        ),
        (
            "what is not listed is hidden through a symbolic link",
            &[&["d a 1", "f a/x 2", "s b 4 a"], &["o b", "f b/z 6"]],
            &["d a 1 =0", "f a/z 6 =1", "s b 4 =2"],
        ),
        (
            "symbolic links stay inside",
            &[&["s out 1 ../../../etc", "s abs 2 /etc/.", "f out/a 3", "f abs/b 4"]],
            &["s abs 2 =0", "d etc 0 =1", "f etc/a 3 =2", "f etc/b 4 =3", "s out 1 =4"],
        ),
        (
            "the last name is not followed",
            &[&["f a 1", "s b 2 a"], &["f b 3"]],
            &["f a 1 =0", "f b 3 =1"],
        ),
        ("a hard link", &[&["f a 1", "h b 0 a"]], &["f a 1 =0", "f b 1 =0"]),
        ("a hard link to a symbolic one", &[&["s a 1 x", "h b 0 a"]], &["s a 1 =0", "s b 1 =0"]),
        ("a hard link to a lower layer", &[&["f a 1"], &["h b 0 a"]], &["f a 1 =0", "f b 1 =0"]),
        ("replacing one name", &[&["f a 1"], &["h b 0 a"], &["f a 2"]], &["f a 2 =0", "f b 1 =1"]),
        ("replacing the other", &[&["f a 1", "h b 0 a"], &["f b 2"]], &["f a 1 =0", "f b 2 =1"]),
        ("hiding one name", &[&["f a 1", "h b 0 a"], &["w a"]], &["f b 1 =0"]),
        ("a target replaced after", &[&["f a 1", "h b 0 a", "f a 2"]], &["f a 2 =0", "f b 1 =1"]),
        ("a target replaced before", &[&["f a 1", "f a 2", "h b 0 a"]], &["f a 2 =0", "f b 2 =0"]),
        ("a target that comes later", &[&["h b 0 a", "f a 1"]], &["f a 1 =0", "f b 1 =0"]),
        (
            "a chain that comes later",
            &[&["h c 0 b", "h b 0 a", "f a 1", "h d 0 c"]],
            &["f a 1 =0", "f b 1 =0", "f c 1 =0", "f d 1 =0"],
        ),
        (
            "a link that waits and is replaced",
            &[&["h b 0 a", "f b 2", "f a 1"]],
            &["f a 1 =0", "f b 2 =1"],
        ),
        ("a link to itself", &[&["f a 1", "h a 0 a"]], &["f a 1 =0"]),
        (
            "a renamed file",
            &[&["d d 1", "f d/a 2"], &["w d/a", "h d/b 0 d/a"]],
            &["d d 1 =0", "f d/b 2 =1"],
        ),
        (
            "a target in a hidden directory",
            &[&["d d 1", "f d/a 2"], &["h b 0 d/a", "w d"]],
            &["f b 2 =0"],
        ),
        (
            "a link for a directory",
            &[&["d a 1", "f a/x 2", "f b 3"], &["h a 0 b"]],
            &["f a 3 =0", "f b 3 =0"],
        ),
    ];
    for (what, layers, expected) in table {
        assert_eq!(listing(&stack(layers).unwrap()), *expected, "{what}");
    }
}

#[test]
fn errors_name_entry_and_target() {
    let table: &[(&[&[&str]], &str)] = &[
        (
            &[&["h b 0 a"]],
            "layer layer0: entry `/b` at byte 0: a hard link to `/a`, which is neither",
        ),
        (&[&["h b 0 a", "h a 0 b"]], "which is neither in this layer nor in a lower one"),
        (
            &[&["d a 1"], &["h b 0 a"]],
            "layer layer1: entry `/b` at byte 0: a hard link to `/a`, which is a directory",
        ),
        (&[&["h b 0 ."]], "which is a directory"),
        (&[&["f . 0"]], "the root of an image must be a directory"),
        (&[&["f a 1", "h . 0 a"]], "the root of an image must be a directory"),
        (&[&["s a 1 b", "s b 1 a", "f a/x 2"]], "more than 40 symbolic links"),
    ];
    for (layers, expected) in table {
        let error = stack(layers).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    let deep = format!("f deep/{}x 1", "d/".repeat(10));
    let link = format!("s deep 1 {}", "d/".repeat(250));
    let error = stack(&[&[&link, &deep]]).unwrap_err().to_string();
    assert!(error.contains("more than 256 directories deep"), "{error}");
}

#[test]
fn attributes_of_other_systems_are_dropped_and_counted() {
    let mut root = entry(".", 5, EntryKind::Directory);
    for name in
        ["user.a", "com.apple.provenance", "user.", "system.nfs4_acl", "security.capability"]
    {
        root.metadata.xattrs.insert(name.as_bytes().into(), (*b"x").into());
    }
    let mut overlay = Overlay::new();
    overlay.apply("l", vec![root]).unwrap();
    assert_eq!(overlay.dropped_xattrs(), 3);
    overlay.apply("m", vec![entry("x", 1, file())]).unwrap();
    let tree = overlay.finish();
    let root = &tree[Tree::ROOT].metadata;
    assert_eq!((root.mtime.seconds, root.permissions, root.xattrs.len()), (5, 0o700, 2));
    assert_eq!((tree.len(), Overlay::new().finish()[Tree::ROOT].metadata.permissions), (2, 0o755));
}

/// The same rules without sharing, waiting or symbolic links: a map of paths.
#[derive(Default)]
struct Model {
    files: BTreeMap<String, (char, i64, usize)>,
    inodes: usize,
}

impl Model {
    fn remove_below(&mut self, at: &str) {
        self.files.retain(|path, _| !path.starts_with(&format!("{at}/")));
    }

    fn parents(&mut self, at: &str) {
        for (slash, _) in at.match_indices('/') {
            let parent = &at[..slash];
            if self.files.get(parent).is_none_or(|(kind, ..)| *kind != 'd') {
                self.inodes += 1;
                self.files.insert(parent.into(), ('d', 0, self.inodes));
            }
        }
    }

    fn apply(&mut self, layer: &[(char, String, String, i64)]) {
        for (kind, at, ..) in layer {
            match kind {
                'w' => {
                    self.files.remove(at);
                    self.remove_below(at);
                }
                'o' => self.remove_below(at),
                _ => {}
            }
        }
        for (kind, at, target, mtime) in layer {
            match kind {
                'd' => {
                    self.parents(at);
                    self.inodes += 1;
                    let old =
                        self.files.get(at).filter(|(kind, ..)| *kind == 'd').map(|file| file.2);
                    self.files.insert(at.clone(), ('d', *mtime, old.unwrap_or(self.inodes)));
                }
                'f' => {
                    self.parents(at);
                    self.remove_below(at);
                    self.inodes += 1;
                    self.files.insert(at.clone(), ('f', *mtime, self.inodes));
                }
                'h' => {
                    let target = self.files[target];
                    self.parents(at);
                    self.remove_below(at);
                    self.files.insert(at.clone(), target);
                }
                _ => {}
            }
        }
    }

    fn listing(&self) -> Vec<String> {
        let mut ids: Vec<usize> = Vec::new();
        // Order by components instead of bytes, as if `/` sorted before all bytes.
        let mut files: Vec<_> = self.files.iter().collect();
        files.sort_by_key(|(path, _)| path.split('/').collect::<Vec<_>>());
        let line = |(path, (kind, mtime, id)): (&String, &(char, i64, usize))| {
            let number = ids.iter().position(|known| known == id).unwrap_or_else(|| {
                ids.push(*id);
                ids.len() - 1
            });
            format!("{kind} {path} {mtime} ={number}")
        };
        files.into_iter().map(line).collect()
    }
}

fn paths() -> impl Strategy<Value = String> {
    prop::collection::vec(prop::sample::select(vec!["a", "b", "c"]), 1..4)
        .prop_map(|names| names.join("/"))
}

fn layers() -> impl Strategy<Value = Vec<Vec<(char, String, String, i64)>>> {
    let kind = prop::sample::select(vec!['d', 'd', 'f', 'f', 'h', 'w', 'o']);
    prop::collection::vec(prop::collection::vec((kind, paths(), paths(), 1..1000i64), 0..12), 1..5)
}

proptest! {
    #[test]
    fn any_layers_stack_as_in_the_model(layers in layers()) {
        let mut model = Model::default();
        let mut overlay = Overlay::new();
        for layer in layers {
            // Keep only links whose target exists when they are read: the model does not defer
            // links.
            let mut sane = Vec::new();
            for line in layer {
                let mut ahead = Model { files: model.files.clone(), inodes: model.inodes };
                ahead.apply(&sane);
                let hidden = sane.iter().any(|(kind, ..)| matches!(kind, 'w' | 'o'));
                let target = ahead.files.get(&line.2);
                let usable = target.is_some_and(|(kind, ..)| *kind == 'f') && !line.1.starts_with(&format!("{}/", line.2));
                match line.0 {
                    'h' if !usable || hidden => {}
                    'w' | 'o' if sane.iter().any(|(kind, ..)| *kind == 'h') => {}
                    _ => sane.push(line),
                }
            }
            let entries = sane.iter().map(|(kind, at, target, mtime)| {
                parse(&format!("{kind} {at} {mtime} {target}"))
            });
            overlay.apply("layer", entries.collect()).unwrap();
            model.apply(&sane);
        }
        prop_assert_eq!(listing(&overlay.finish()), model.listing());
    }
}
