//! The list of files to prefetch, from standard input.

use std::io::Read as _;

use anyhow::{Context, Result, bail};
use lazuli_builder::EntryPath;
use lazuli_image::{InodeId, Tree};

use super::PrefetchPolicy;

/// Bytes of standard input: a path for each file of an image that has two hundred thousand.
const LIMIT: u64 = 16 << 20;

/// Absolute paths, one in each line; empty if the policy is `none`.
pub(super) fn patterns(policy: PrefetchPolicy) -> Result<Vec<EntryPath>> {
    if policy == PrefetchPolicy::None {
        return Ok(Vec::new());
    }
    let mut input = Vec::new();
    std::io::stdin().take(LIMIT + 1).read_to_end(&mut input).context("cannot read the patterns")?;
    if input.len() as u64 > LIMIT {
        bail!("the patterns of what to prefetch have more than {LIMIT} bytes");
    }
    let lines = input.split(|byte| *byte == b'\n').map(<[u8]>::trim_ascii);
    let path = |line: &[u8]| {
        let shown = line.escape_ascii();
        if !line.starts_with(b"/") {
            bail!("the pattern `{shown}` of what to prefetch is not an absolute path");
        }
        EntryPath::parse(line).with_context(|| format!("the pattern `{shown}` of what to prefetch"))
    };
    lines.filter(|line| !line.is_empty()).map(path).collect()
}

/// The inodes at these paths. A directory stands for everything below it.
pub(super) fn find(tree: &Tree, patterns: &[EntryPath]) -> Vec<InodeId> {
    let mut found = Vec::new();
    for (number, path) in patterns.iter().enumerate() {
        let earlier = &patterns[..number];
        let is_in = |other: &EntryPath| {
            let mut names = path.components();
            other.components().all(|name| names.next() == Some(name))
        };
        if !earlier.iter().any(is_in) {
            found.extend(tree.find(path.components()));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use lazuli_image::{Inode, Kind, Metadata, Name};

    use super::*;

    #[test]
    fn repeated_and_missing_paths_are_left_out() {
        let mut tree = Tree::new(Metadata::default());
        let mut add = |parent, name: &[u8]| {
            let kind = Kind::Directory(Default::default());
            let id = tree.add(Inode { metadata: Metadata::default(), kind });
            tree.children_mut(parent).unwrap().insert(Name::new(name).unwrap(), id);
            id
        };
        let a = add(Tree::ROOT, b"a");
        let (b, ab) = (add(a, b"b"), add(Tree::ROOT, b"ab"));
        let found = |paths: &[&str]| {
            let paths: Vec<_> =
                paths.iter().map(|path| EntryPath::parse(path.as_bytes()).unwrap()).collect();
            find(&tree, &paths)
        };
        assert_eq!(found(&["/a", "/a/b", "/ab", "/no"]), [a, ab]);
        assert_eq!(found(&["/a/b", "/a"]), [b, a]);
        assert_eq!(found(&["/", "/a"]), [Tree::ROOT]);
    }
}
