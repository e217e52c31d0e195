//! Stacks layers into one tree, as OCI specifies and as tar would extract them.
//!
//! A layer's whiteouts act first and on lower layers only, wherever they stand in the archive. Then
//! its entries are applied in order: a later one of the same name wins. Directories merge; a
//! directory that a layer does not list stays as the lower layer has it. Symbolic links on the way
//! to an entry are followed inside the image, as every unpacker does (`lib/x` over `lib -> usr/lib`
//! is `usr/lib/x`).

use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet, HashMap},
};

use lazuli_image::{Inode, InodeId, Kind, Metadata, Mtime, Name, Tree};

use crate::{
    entry::{Entry, EntryKind, EntryPath},
    error::{BuildError, OverlayProblem},
};

/// Maximum number of symbolic links on one path, as in Linux.
const MAX_LINKS: u32 = 40;

/// The tree of the layers applied so far.
#[derive(Debug)]
pub(crate) struct Overlay {
    tree: Tree,
    /// Metadata of directories that no layer lists.
    implied: Metadata,
    dropped_xattrs: u64,
}

/// State while one layer is applied.
#[derive(Default)]
struct Pass {
    /// Inodes removed by whiteouts, by directory and name. They remain valid hard link targets.
    removed: HashMap<(InodeId, Name), InodeId>,
    /// Hard links whose target did not exist yet when they were read, by their own path.
    deferred: BTreeMap<EntryPath, Link>,
}

struct Link {
    target: EntryPath,
    offset: u64,
}

impl Overlay {
    /// No layers: an empty root directory.
    pub(crate) fn new() -> Self {
        Self::with_implied(implied())
    }

    /// An overlay for the tree of a single layer, which is stacked on others later: directories
    /// that the layer does not list are [marked](is_unlisted).
    pub(crate) fn of_one_layer() -> Self {
        Self::with_implied(unlisted())
    }

    fn with_implied(implied: Metadata) -> Self {
        Overlay { tree: Tree::new(implied.clone()), implied, dropped_xattrs: 0 }
    }

    /// Number of extended attributes dropped so far, because Linux has no namespace for them.
    pub(crate) fn dropped_xattrs(&self) -> u64 {
        self.dropped_xattrs
    }

    /// Puts a layer on top.
    pub(crate) fn apply(&mut self, layer: &str, entries: Vec<Entry>) -> Result<(), BuildError> {
        let fail = |entry: &EntryPath, offset: u64, problem: OverlayProblem| BuildError::Overlay {
            layer: layer.to_owned(),
            entry: entry.clone(),
            offset,
            problem,
        };
        let mut pass = Pass::default();
        let is_directory = |entry: &&Entry| matches!(entry.kind, EntryKind::Directory);
        let listed = entries.iter().filter(is_directory).map(|entry| &entry.path).collect();
        for entry in &entries {
            self.hide(entry, &listed, &mut pass)
                .map_err(|problem| fail(&entry.path, entry.offset, problem))?;
        }
        for entry in entries {
            let (path, offset) = (entry.path.clone(), entry.offset);
            self.put(entry, &mut pass).map_err(|problem| fail(&path, offset, problem))?;
        }
        while let Some((path, link)) = pass.deferred.pop_first() {
            let offset = link.offset;
            self.settle(path.clone(), link, &mut pass)
                .map_err(|problem| fail(&path, offset, problem))?;
        }
        Ok(())
    }

    /// Returns the tree without inodes that upper layers have hidden or replaced.
    pub(crate) fn finish(mut self) -> Tree {
        let nothing = || Inode { metadata: Metadata::default(), kind: Kind::Fifo };
        let mut take = |id: InodeId| std::mem::replace(&mut self.tree[id], nothing());
        let root = take(Tree::ROOT);
        let mut compact = Tree::new(root.metadata);
        compact[Tree::ROOT].kind = root.kind;
        let mut moved = HashMap::new();
        let mut todo = vec![Tree::ROOT];
        while let Some(directory) = todo.pop() {
            let mut children =
                compact.children_mut(directory).map(std::mem::take).unwrap_or_default();
            for id in children.values_mut() {
                *id = *moved.entry(*id).or_insert_with(|| compact.add(take(*id)));
                if compact.children(*id).is_some() {
                    todo.push(*id);
                }
            }
            compact[directory].kind = Kind::Directory(children);
        }
        compact
    }

    /// Applies a whiteout to the layers below, of a layer that has the directories `listed`.
    fn hide(
        &mut self,
        entry: &Entry,
        listed: &BTreeSet<&EntryPath>,
        pass: &mut Pass,
    ) -> Result<(), OverlayProblem> {
        match entry.kind {
            EntryKind::Whiteout => {
                let parent = entry.path.parent();
                let Some(directory) = self.below(&parent, listed)? else { return Ok(()) };
                let children = self.tree.children_mut(directory);
                let hidden = children.and_then(|children| children.remove_entry(entry.path.last()));
                pass.removed.extend(hidden.map(|(name, id)| ((directory, name), id)));
            }
            EntryKind::Opaque => {
                let Some(directory) = self.below(&entry.path, listed)? else { return Ok(()) };
                let children =
                    self.tree.children_mut(directory).map(std::mem::take).unwrap_or_default();
                pass.removed.extend(children.into_iter().map(|(name, id)| ((directory, name), id)));
            }
            _ => {}
        }
        Ok(())
    }

    /// Returns the directory of the lower layers that shows through at `path`, if any. `listed` are
    /// the directories of the upper layer: a listed directory replaces a symbolic link, so nothing
    /// of the link's target shows through.
    fn below(
        &mut self,
        path: &EntryPath,
        listed: &BTreeSet<&EntryPath>,
    ) -> Result<Option<InodeId>, OverlayProblem> {
        if path.is_root() {
            return Ok(Some(Tree::ROOT));
        }
        let Some(parent) = self.below(&path.parent(), listed)? else { return Ok(None) };
        let Some(id) = self.child(parent, path.last()) else { return Ok(None) };
        match self.tree[id].kind {
            Kind::Directory(_) => Ok(Some(id)),
            Kind::Symlink(_) if !listed.contains(path) => self.existing(path),
            _ => Ok(None),
        }
    }

    fn put(&mut self, entry: Entry, pass: &mut Pass) -> Result<(), OverlayProblem> {
        let Entry { path, offset, mut metadata, kind } = entry;
        if matches!(kind, EntryKind::Whiteout | EntryKind::Opaque) {
            return Ok(());
        }
        pass.deferred.remove(&path);
        let before = metadata.xattrs.len();
        metadata.xattrs.retain(|name, _| is_storable(name));
        self.dropped_xattrs += (before - metadata.xattrs.len()) as u64;
        if path.is_root() {
            return match kind {
                EntryKind::Directory => {
                    self.tree[Tree::ROOT].metadata = metadata;
                    Ok(())
                }
                _ => Err(OverlayProblem::Root),
            };
        }
        let kind = match kind {
            EntryKind::HardLink(target) => {
                match self.target(&target)? {
                    Some(id) => self.name(&path, id)?,
                    None => {
                        pass.deferred.insert(path, Link { target, offset });
                    }
                }
                return Ok(());
            }
            kind => kind.into_node(),
        };
        let Some(kind) = kind else { return Ok(()) };
        let directory = self.made(&path.parent())?;
        let existing = self.child(directory, path.last());
        match existing.filter(|&id| self.tree.children(id).is_some()) {
            Some(id) if matches!(kind, Kind::Directory(_)) => self.tree[id].metadata = metadata,
            _ => {
                let id = self.tree.add(Inode { metadata, kind });
                self.insert(directory, path.last(), id)?;
            }
        }
        Ok(())
    }

    /// Resolves a deferred link, and the deferred links that it depends on.
    fn settle(
        &mut self,
        path: EntryPath,
        link: Link,
        pass: &mut Pass,
    ) -> Result<(), OverlayProblem> {
        let mut chain = vec![path];
        let mut target = link.target;
        while let Some(next) = pass.deferred.remove(&target) {
            chain.push(std::mem::replace(&mut target, next.target));
        }
        let id = match self.target(&target)? {
            Some(id) => id,
            None => {
                self.removed_target(&target, pass).ok_or(OverlayProblem::MissingTarget(target))?
            }
        };
        chain.iter().try_for_each(|path| self.name(path, id))
    }

    /// The inode that a hard link to `path` shares.
    fn target(&mut self, path: &EntryPath) -> Result<Option<InodeId>, OverlayProblem> {
        let Some(directory) = self.existing(&path.parent())? else { return Ok(None) };
        let id = if path.is_root() { Some(directory) } else { self.child(directory, path.last()) };
        match id {
            Some(id) if self.tree.children(id).is_some() => {
                Err(OverlayProblem::DirectoryTarget(path.clone()))
            }
            id => Ok(id),
        }
    }

    /// Finds a hard link target below paths that this layer's whiteouts removed: the layer was made
    /// while the target existed.
    fn removed_target(&self, path: &EntryPath, pass: &Pass) -> Option<InodeId> {
        let id = path.components().try_fold(Tree::ROOT, |at, name| {
            let removed = || pass.removed.get(&(at, Name::new(name).ok()?)).copied();
            self.child(at, name).or_else(removed)
        });
        id.filter(|&id| self.tree.children(id).is_none())
    }

    /// Makes `path` a name of `id`.
    fn name(&mut self, path: &EntryPath, id: InodeId) -> Result<(), OverlayProblem> {
        if path.is_root() {
            return Err(OverlayProblem::Root);
        }
        let directory = self.made(&path.parent())?;
        self.insert(directory, path.last(), id)
    }

    fn insert(
        &mut self,
        directory: InodeId,
        name: &[u8],
        id: InodeId,
    ) -> Result<(), OverlayProblem> {
        let name = Name::new(name).map_err(OverlayProblem::Name)?;
        if let Some(children) = self.tree.children_mut(directory) {
            children.insert(name, id);
        }
        Ok(())
    }

    fn child(&self, directory: InodeId, name: &[u8]) -> Option<InodeId> {
        self.tree.children(directory)?.get(name).copied()
    }

    /// The directory at `path` if there is one.
    fn existing(&mut self, path: &EntryPath) -> Result<Option<InodeId>, OverlayProblem> {
        self.walk(path, |_, _, _| Ok(None))
    }

    /// The directory at `path`, made if need be. Something else in its place is replaced.
    fn made(&mut self, path: &EntryPath) -> Result<InodeId, OverlayProblem> {
        let made = self.walk(path, |overlay, directory, name| {
            let kind = Kind::Directory(BTreeMap::new());
            let id = overlay.tree.add(Inode { metadata: overlay.implied.clone(), kind });
            overlay.insert(directory, name, id).map(|()| Some(id))
        });
        Ok(made?.unwrap_or(Tree::ROOT))
    }

    /// Walks to a directory through symbolic links, with `/` as the top. Calls `missing` for absent
    /// names; returns `None` if that does.
    fn walk(
        &mut self,
        path: &EntryPath,
        missing: impl Fn(&mut Self, InodeId, &[u8]) -> Result<Option<InodeId>, OverlayProblem>,
    ) -> Result<Option<InodeId>, OverlayProblem> {
        let mut todo: Vec<Cow<'_, [u8]>> = path.components().rev().map(Cow::Borrowed).collect();
        let mut at = vec![Tree::ROOT];
        let mut links = 0;
        while let Some(name) = todo.pop() {
            match &name[..] {
                b"" | b"." => continue,
                b".." => {
                    at.truncate(at.len().saturating_sub(1).max(1));
                    continue;
                }
                _ => {}
            }
            let directory = *at.last().unwrap_or(&Tree::ROOT);
            let child = self.child(directory, &name);
            let id = match child.map(|id| (id, &self.tree[id].kind)) {
                Some((id, Kind::Directory(_))) => Some(id),
                Some((_, Kind::Symlink(target))) => {
                    links += 1;
                    if links > MAX_LINKS {
                        return Err(OverlayProblem::Loop(path.clone()));
                    }
                    if target.starts_with(b"/") {
                        at.truncate(1);
                    }
                    let parts = target.split(|&byte| byte == b'/').rev();
                    todo.extend(parts.map(|part| Cow::Owned(part.to_vec())));
                    continue;
                }
                _ => missing(self, directory, &name)?,
            };
            let Some(id) = id else { return Ok(None) };
            at.push(id);
            if at.len() > EntryPath::MAX_DEPTH {
                return Err(OverlayProblem::TooDeep);
            }
        }
        Ok(at.last().copied())
    }
}

/// Metadata of a directory that no layer lists.
fn implied() -> Metadata {
    Metadata { permissions: 0o755, ..Metadata::default() }
}

/// The same in the tree of one layer. The format has no word for it, and no layer lists a directory
/// of this very time.
fn unlisted() -> Metadata {
    Metadata { mtime: Mtime { seconds: 0, nanoseconds: 1 }, ..implied() }
}

/// Returns whether a directory in the tree of one layer is unlisted: it exists only because the
/// layer has entries below it.
pub(crate) fn is_unlisted(directory: &Inode) -> bool {
    matches!(directory.kind, Kind::Directory(_)) && directory.metadata == unlisted()
}

/// Returns whether Linux has a namespace for the attribute. Attributes of other systems
/// (`com.apple.…`) would be refused by Linux at unpacking.
fn is_storable(name: &[u8]) -> bool {
    let with_prefix = |prefix: &[u8]| name.len() > prefix.len() && name.starts_with(prefix);
    [&b"user."[..], b"trusted.", b"security."].into_iter().any(with_prefix)
        || matches!(name, b"system.posix_acl_access" | b"system.posix_acl_default")
}

#[cfg(test)]
mod tests;
