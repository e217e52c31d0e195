//! Compares two trees.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fmt,
};

use crate::{ChunkRef, Digest, Inode, InodeId, Kind, Metadata, Tree};

/// A tree with the contents of its chunks.
pub trait Content {
    /// The tree.
    fn tree(&self) -> &Tree;
    /// Digest and size of a chunk of the tree; `None` if the chunk does not exist.
    fn chunk(&self, chunk: ChunkRef) -> Option<(Digest, u32)>;
}

/// One difference between two trees.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// Where, from `/`.
    pub path: Vec<u8>,
    /// The kind of difference.
    pub what: What,
}

/// How the trees differ at a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum What {
    /// The path is missing from the second tree. Its children are not listed.
    OnlyFirst,
    /// The path is missing from the first tree. Its children are not listed.
    OnlySecond,
    /// The path exists in both. The text is `first, second`: the values of both trees.
    Changed(Aspect, String),
}

/// In which way two inodes differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Aspect {
    /// Directory, file, symbolic link, …
    Type,
    /// Bytes of a file, target of a symbolic link, number of a device.
    Content,
    /// Permissions.
    Mode,
    /// User or group.
    Owner,
    /// Time of last modification.
    Time,
    /// Extended attributes, ACLs among them.
    Xattr,
    /// The names that are the same file.
    Links,
}

impl Aspect {
    /// In one word.
    pub const fn name(self) -> &'static str {
        match self {
            Aspect::Type => "type",
            Aspect::Content => "content",
            Aspect::Mode => "mode",
            Aspect::Owner => "owner",
            Aspect::Time => "time",
            Aspect::Xattr => "xattr",
            Aspect::Links => "links",
        }
    }
}

impl fmt::Display for What {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            What::OnlyFirst => f.write_str("only in the first"),
            What::OnlySecond => f.write_str("only in the second"),
            What::Changed(_, how) => f.write_str(how),
        }
    }
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.path.escape_ascii(), self.what)
    }
}

/// Compares every entry: type, permissions, owner, time, extended attributes, link targets, device
/// numbers, content, and which names are the same file. Stops after `limit` differences.
pub fn compare(left: &dyn Content, right: &dyn Content, limit: usize) -> Vec<Difference> {
    let mut comparison = Comparison {
        left,
        right,
        limit,
        differences: Vec::new(),
        partners: [HashMap::new(), HashMap::new()],
    };
    comparison.inodes(b"/", Tree::ROOT, Tree::ROOT);
    let mut pending = vec![(b"/".to_vec(), Tree::ROOT, Tree::ROOT)];
    while let Some((path, left, right)) = pending.pop() {
        if comparison.differences.len() >= limit {
            break;
        }
        comparison.directories(&path, left, right, &mut pending);
    }
    comparison.differences.truncate(limit);
    comparison.differences
}

struct Comparison<'a> {
    left: &'a dyn Content,
    right: &'a dyn Content,
    limit: usize,
    differences: Vec<Difference>,
    /// The inode of the other tree that an inode was found equal to: hard links have to agree.
    partners: [HashMap<InodeId, InodeId>; 2],
}

impl Comparison<'_> {
    fn note(&mut self, path: &[u8], what: What) {
        if self.differences.len() < self.limit {
            self.differences.push(Difference { path: path.to_vec(), what });
        }
    }

    fn directories(
        &mut self,
        path: &[u8],
        left: InodeId,
        right: InodeId,
        pending: &mut Vec<(Vec<u8>, InodeId, InodeId)>,
    ) {
        let (l, r) = (self.left.tree().children(left), self.right.tree().children(right));
        let (Some(l), Some(r)) = (l, r) else { return };
        let names: BTreeSet<_> = l.keys().chain(r.keys()).collect();
        for name in names {
            let mut child = path.to_vec();
            if child != b"/" {
                child.push(b'/');
            }
            child.extend(name.as_bytes());
            match (l.get(name), r.get(name)) {
                (Some(&l), Some(&r)) => {
                    if self.inodes(&child, l, r) {
                        pending.push((child, l, r));
                    }
                }
                (Some(_), None) => self.note(&child, What::OnlyFirst),
                (None, _) => self.note(&child, What::OnlySecond),
            }
        }
    }

    /// Compares two inodes. Returns whether their children remain to be compared.
    fn inodes(&mut self, path: &[u8], left: InodeId, right: InodeId) -> bool {
        let seen = [self.partners[0].get(&left), self.partners[1].get(&right)];
        match seen {
            [Some(&l), Some(&r)] if l == right && r == left => return false,
            [None, None] => {
                self.partners[0].insert(left, right);
                self.partners[1].insert(right, left);
            }
            _ => {
                let how = "not the same hard links".to_owned();
                self.note(path, What::Changed(Aspect::Links, how));
            }
        }
        let (l, r) = (&self.left.tree()[left], &self.right.tree()[right]);
        for (aspect, how) in metadata(&l.metadata, &r.metadata) {
            self.note(path, What::Changed(aspect, how));
        }
        if let Some(how) = self.kinds(l, r) {
            let aspect =
                if l.kind.mode() == r.kind.mode() { Aspect::Content } else { Aspect::Type };
            self.note(path, What::Changed(aspect, how));
        }
        matches!((&l.kind, &r.kind), (Kind::Directory(_), Kind::Directory(_)))
    }

    fn kinds(&self, left: &Inode, right: &Inode) -> Option<String> {
        match (&left.kind, &right.kind) {
            (Kind::Directory(_), Kind::Directory(_)) => None,
            (Kind::Regular { size: l, chunks: lc }, Kind::Regular { size: r, chunks: rc }) => {
                if l != r {
                    return Some(format!("{l} bytes, {r} bytes"));
                }
                let same = lc.len() == rc.len()
                    && lc.iter().zip(rc).all(|(&l, &r)| {
                        let pair = (self.left.chunk(l), self.right.chunk(r));
                        matches!(pair, (Some(l), Some(r)) if l == r)
                    });
                (!same).then(|| "not the same content".to_owned())
            }
            (l, r) if l == r => None,
            (l, r) => Some(format!("{}, {}", describe(l), describe(r))),
        }
    }
}

fn metadata(left: &Metadata, right: &Metadata) -> Vec<(Aspect, String)> {
    let mut differences = Vec::new();
    let mut field = |aspect, name: &str, left: String, right: String| {
        if left != right {
            differences.push((aspect, format!("{name} {left}, {right}")));
        }
    };
    let time = |m: &Metadata| format!("{}.{:09}", m.mtime.seconds, m.mtime.nanoseconds);
    field(
        Aspect::Mode,
        "mode",
        format!("{:04o}", left.permissions),
        format!("{:04o}", right.permissions),
    );
    field(Aspect::Owner, "uid", left.uid.to_string(), right.uid.to_string());
    field(Aspect::Owner, "gid", left.gid.to_string(), right.gid.to_string());
    field(Aspect::Time, "mtime", time(left), time(right));
    field(Aspect::Xattr, "xattrs", xattrs(&left.xattrs), xattrs(&right.xattrs));
    differences
}

fn xattrs(xattrs: &BTreeMap<Box<[u8]>, Box<[u8]>>) -> String {
    let entries = xattrs.iter().map(|(k, v)| format!("{}={}", k.escape_ascii(), v.escape_ascii()));
    format!("{{{}}}", entries.collect::<Vec<_>>().join(" "))
}

fn describe(kind: &Kind) -> String {
    match kind {
        Kind::Directory(_) => "directory".to_owned(),
        Kind::Regular { .. } => "file".to_owned(),
        Kind::Symlink(target) => format!("symbolic link to {}", target.escape_ascii()),
        Kind::CharDevice(device) => format!("character device {}:{}", device.major, device.minor),
        Kind::BlockDevice(device) => format!("block device {}:{}", device.major, device.minor),
        Kind::Fifo => "fifo".to_owned(),
        Kind::Socket => "socket".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Algorithm, BlobIndex, Mtime, Name};

    struct Fixture(Tree);

    impl Content for Fixture {
        fn tree(&self) -> &Tree {
            &self.0
        }

        fn chunk(&self, chunk: ChunkRef) -> Option<(Digest, u32)> {
            Some((Algorithm::Blake3.digest(&chunk.number.to_le_bytes()), 1))
        }
    }

    fn tree(files: &[(&str, u32)], link: Option<(&str, &str)>) -> Fixture {
        let mut tree = Tree::new(Metadata::default());
        let insert = |tree: &mut Tree, name: &str, id| {
            let name = Name::new(name.as_bytes()).unwrap();
            tree.children_mut(Tree::ROOT).unwrap().insert(name, id);
        };
        for &(name, number) in files {
            let chunks = vec![ChunkRef { blob: BlobIndex(0), number }];
            let kind = Kind::Regular { size: 1, chunks };
            let id = tree.add(Inode { metadata: Metadata::default(), kind });
            insert(&mut tree, name, id);
        }
        if let Some((name, to)) = link {
            let id = tree.find([to.as_bytes()]).unwrap();
            insert(&mut tree, name, id);
        }
        Fixture(tree)
    }

    fn differences(left: &Fixture, right: &Fixture) -> Vec<String> {
        compare(left, right, 10).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn each_difference_is_listed_with_its_path() {
        let base = tree(&[("a", 1), ("b", 2)], Some(("c", "a")));
        assert_eq!(differences(&base, &base), Vec::<String>::new());
        let other = tree(&[("a", 1), ("b", 3)], Some(("c", "a")));
        assert_eq!(differences(&base, &other), ["/b: not the same content"]);
        let other = tree(&[("a", 1), ("b", 2), ("c", 1)], None);
        assert_eq!(differences(&base, &other), ["/c: not the same hard links"]);
        let other = tree(&[("a", 1), ("c", 2)], None);
        assert_eq!(differences(&base, &other)[0], "/b: only in the first");
        assert_eq!(compare(&base, &other, 1).len(), 1);
        let mut other = tree(&[("a", 1), ("b", 2)], Some(("c", "a")));
        other.0[Tree::ROOT].metadata.mtime = Mtime { seconds: -1, nanoseconds: 5 };
        assert_eq!(differences(&base, &other), ["/: mtime 0.000000000, -1.000000005"]);
    }
}
