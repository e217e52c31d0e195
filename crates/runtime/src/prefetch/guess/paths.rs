//! Names in an image, followed as the kernel follows them in a container.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    ops::ControlFlow,
    sync::Arc,
};

use lazuli_image::{
    erofs::{FileType, InodeView, Nid},
    rafs::Bootstrap,
};

use crate::image::walk;

/// Maximum number of symbolic links in a path, as in Linux.
const LINKS: usize = 40;

/// Names in one path, before and after links.
const NAMES: usize = 1024;

/// Files that one pattern stands for.
const MATCHES: usize = 1024;

/// Directories below each other for which `**` stands.
const DEPTH: usize = 5;

/// Directories below which `**` does not look: tools for making images, and tests.
const NOT_AT_START: [&[u8]; 6] =
    [b"pip", b"setuptools", b"pkg_resources", b"_vendor", b"test", b"tests"];

/// The end of the names of directories with settings of which a server reads those that are linked
/// to elsewhere: `mods-available`.
const NOT_ENABLED: &[u8] = b"-available";

/// The end of the names of directories with these links, also to directories.
const ENABLED: &[u8] = b"-enabled";

/// Names that are looked up or listed for one image: well below a second. Real ones need some
/// hundred to 17,000; settings get a quarter of them at most.
pub(super) const STEPS: u32 = 200_000;

/// Look-ups that are answered from memory for one image: half a second. An application of 800
/// Python modules needs 730,000, and one of 1,100 with 90 compiled ones, whose constants are
/// searched, 1,540,000.
const ANSWERS: u32 = 4_000_000;

/// So many names of one stem are looked through for the price of one answer.
const NAMES_PER_ANSWER: u32 = 64;

/// Paths that are remembered with what they lead to, and the longest of them.
const RESOLVED: usize = 1 << 16;
const LONGEST: usize = 256;

/// Names in a directory, by the part before their first dot.
type Listing<'a> = HashMap<&'a [u8], Vec<&'a [u8]>>;

/// The directories of all regular files by their names; `None` for a name in several of them.
type Everywhere = HashMap<Vec<u8>, Option<Arc<[u8]>>>;

/// The names of an image.
#[derive(Debug)]
pub(super) struct Paths<'a, B> {
    bootstrap: &'a Bootstrap<B>,
    /// The remainder of [`STEPS`].
    steps: u32,
    /// The remainder of [`ANSWERS`].
    answers: u32,
    /// Directories that were listed.
    listed: HashMap<Vec<u8>, Listing<'a>>,
    /// All files, once they were listed.
    everywhere: Option<Everywhere>,
    /// Paths that were resolved: modules name the same packages over and over.
    resolved: HashMap<Vec<u8>, Option<(Vec<u8>, InodeView)>>,
}

/// A regular file, and where it really is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Found {
    /// Its inode.
    pub(super) nid: Nid,
    /// Its size in bytes.
    pub(super) size: u64,
    /// Whether any user may execute it.
    pub(super) is_executable: bool,
    /// Its absolute path, without links.
    pub(super) path: Vec<u8>,
}

impl Found {
    /// Its last name.
    pub(super) fn name(&self) -> &[u8] {
        self.path.rsplit(|byte| *byte == b'/').next().unwrap_or_default()
    }

    /// Returns whether it is a library by its name, as `libz.so.1`.
    pub(super) fn is_library(&self) -> bool {
        let has_version = |part: &[u8]| part.starts_with(b".so.") && part[4].is_ascii_digit();
        self.name().ends_with(b".so") || self.name().windows(5).any(has_version)
    }

    /// The path of its directory.
    pub(super) fn directory(&self) -> &[u8] {
        let end = self.path.iter().rposition(|byte| *byte == b'/').unwrap_or_default();
        &self.path[..end.max(1)]
    }
}

impl<'a, B: AsRef<[u8]>> Paths<'a, B> {
    pub(super) fn new(bootstrap: &'a Bootstrap<B>) -> Self {
        Paths {
            bootstrap,
            steps: STEPS,
            answers: ANSWERS,
            listed: HashMap::new(),
            everywhere: None,
            resolved: HashMap::new(),
        }
    }

    /// Returns whether the look-up budget is spent, so that nothing is found any more.
    pub(super) fn is_spent(&self) -> bool {
        self.steps == 0 || self.answers == 0
    }

    /// The regular file that `path` leads to from the directory `base`. Damaged parts don't exist.
    pub(super) fn file(&mut self, base: &[u8], path: &[u8]) -> Option<Found> {
        let (path, inode) = self.follow(base, path)?;
        let is_executable = inode.permissions & 0o111 != 0;
        let found = Found { nid: inode.nid, size: inode.size, is_executable, path };
        (inode.file_type == FileType::Regular).then_some(found)
    }

    /// Returns whether `path` leads to anything from the directory `base`.
    pub(super) fn exists(&mut self, base: &[u8], path: &[u8]) -> bool {
        self.follow(base, path).is_some()
    }

    /// The remainder of [`STEPS`].
    pub(super) fn steps_left(&self) -> u32 {
        self.steps
    }

    /// The absolute path, without links, of the directory that `path` leads to from the directory
    /// `base`.
    pub(super) fn directory(&mut self, base: &[u8], path: &[u8]) -> Option<Vec<u8>> {
        let (path, inode) = self.follow(base, path)?;
        let path = if path.is_empty() { b"/".to_vec() } else { path };
        (inode.file_type == FileType::Directory).then_some(path)
    }

    /// The names in a directory that are `stem`, or begin with it and a dot. Each directory is
    /// listed once, so looking for many names in it costs little.
    pub(super) fn named(&mut self, directory: &[u8], stem: &[u8]) -> &[&'a [u8]] {
        let Some(by_stem) = self.listing(directory) else { return &[] };
        by_stem.get(stem).map(Vec::as_slice).unwrap_or_default()
    }

    fn listing(&mut self, directory: &[u8]) -> Option<&Listing<'a>> {
        if self.is_spent() {
            return None;
        }
        if !self.listed.contains_key(directory) {
            let mut by_stem = Listing::new();
            for name in self.list(directory, b"*") {
                by_stem.entry(stem_of(name)).or_default().push(name);
            }
            self.listed.insert(directory.to_vec(), by_stem);
        }
        self.answers = self.answers.saturating_sub(1);
        self.listed.get(directory)
    }

    /// The names in a directory.
    pub(super) fn names_in(&mut self, directory: &[u8]) -> HashSet<Vec<u8>> {
        let names = self.listing(directory).into_iter().flat_map(|by_stem| by_stem.values());
        names.flatten().map(|name| name.to_vec()).collect()
    }

    /// [`Paths::file`], for many look-ups in few directories, most of them without success.
    pub(super) fn known(&mut self, directory: &[u8], path: &[u8]) -> Option<Found> {
        if self.may_have(directory, path) { self.file(directory, path) } else { None }
    }

    /// Returns whether `path` leads to a directory from the directory `base`, at the same low cost.
    pub(super) fn known_directory(&mut self, base: &[u8], path: &[u8]) -> bool {
        self.may_have(base, path) && self.directory(base, path).is_some()
    }

    /// Returns whether `directory` has the first name of the relative `path`, at the same low cost.
    pub(super) fn may_have(&mut self, directory: &[u8], path: &[u8]) -> bool {
        let first = path.split(|byte| *byte == b'/').next().unwrap_or_default();
        if matches!(first, b"." | b"..") {
            return true;
        }
        let names = self.named(directory, stem_of(first));
        let (is_there, looked_at) = (names.contains(&first), names.len());
        self.answers = self.answers.saturating_sub(looked_at as u32 / NAMES_PER_ANSWER);
        is_there
    }

    /// The directories whose absolute paths match `pattern`, without links, see
    /// [`Paths::matching`].
    pub(super) fn directories(&mut self, pattern: &[u8]) -> Vec<Vec<u8>> {
        let paths = self.expand(pattern);
        let mut found: Vec<Vec<u8>> = Vec::new();
        for path in paths {
            if let Some(path) = self.directory(b"/", &path)
                && !found.contains(&path)
            {
                found.push(path);
            }
        }
        found
    }

    /// The regular files whose absolute paths match `pattern`, in the order of their names. `*`
    /// stands for any part of a name, `**` for any number of directories, or none.
    pub(super) fn matching(&mut self, pattern: &[u8]) -> Vec<Found> {
        let paths = self.expand(pattern);
        paths.iter().filter_map(|path| self.file(b"/", path)).collect()
    }

    /// The regular files in the directory `path` and those below it, with the names that they, or
    /// links to them, have there.
    pub(super) fn below(&mut self, path: &[u8]) -> Vec<(Vec<u8>, Found)> {
        let paths = self.expand(&[path, b"/**/*"].concat());
        let file = |path: Vec<u8>| {
            let name = path.rsplit(|byte| *byte == b'/').next().unwrap_or_default().to_vec();
            Some((name, self.file(b"/", &path)?))
        };
        paths.into_iter().filter_map(file).collect()
    }

    /// The only regular file of the image with this name.
    pub(super) fn only(&mut self, name: &[u8]) -> Option<Found> {
        if self.is_spent() {
            return None;
        }
        let bootstrap = self.bootstrap;
        let names = self.everywhere.get_or_insert_with(|| all_names(bootstrap));
        self.answers = self.answers.saturating_sub(1);
        let directory = names.get(name)?.clone()?;
        self.file(&directory, name)
    }

    /// Paths that match `pattern`, as far as it has stars.
    fn expand(&mut self, pattern: &[u8]) -> Vec<Vec<u8>> {
        let mut paths = vec![Vec::new()];
        for part in pattern.split(|byte| *byte == b'/').filter(|part| !part.is_empty()) {
            let mut longer = Vec::new();
            for path in paths {
                if longer.len() >= MATCHES {
                    break;
                }
                if part == b"**" {
                    self.descend(path, &mut longer);
                    continue;
                }
                let names = match part.contains(&b'*') {
                    true => self.list(&path, part),
                    false => vec![part],
                };
                longer.extend(names.iter().map(|name| [path.as_slice(), name].join(&b'/')));
            }
            longer.truncate(MATCHES);
            paths = longer;
        }
        paths
    }

    /// Adds the directory `path` and those below it.
    fn descend(&mut self, path: Vec<u8>, found: &mut Vec<Vec<u8>>) {
        let mut level = vec![path];
        for _ in 0..=DEPTH {
            let mut below = Vec::new();
            for path in &level {
                for (name, file_type) in self.entries(path, b"*") {
                    let is_left_out = NOT_AT_START.contains(&name) || name.ends_with(NOT_ENABLED);
                    let is_directory = file_type == FileType::Directory
                        || file_type == FileType::Symlink && path.ends_with(ENABLED);
                    if is_directory && !is_left_out {
                        below.push([path.as_slice(), name].join(&b'/'));
                    }
                }
            }
            found.append(&mut level);
            if found.len() > MATCHES {
                return;
            }
            level = below;
        }
    }

    /// The names in the directory `path` that match `pattern`.
    fn list(&mut self, path: &[u8], pattern: &[u8]) -> Vec<&'a [u8]> {
        self.entries(path, pattern).into_iter().map(|(name, _)| name).collect()
    }

    fn entries(&mut self, path: &[u8], pattern: &[u8]) -> Vec<(&'a [u8], FileType)> {
        let Some((_, inode)) = self.follow(b"/", path) else { return Vec::new() };
        let entries = self.bootstrap.read_dir(inode.nid, 0).into_iter().flatten().flatten();
        let steps = &mut self.steps;
        entries
            .take_while(|_| {
                *steps = steps.saturating_sub(1);
                *steps > 0
            })
            .filter(|entry| !entry.is_dot() && matches(pattern, entry.name))
            .map(|entry| (entry.name, entry.file_type))
            .collect()
    }

    /// Resolves `path` from the directory `base`. Returns the inode, and the path without links.
    fn follow(&mut self, base: &[u8], path: &[u8]) -> Option<(Vec<u8>, InodeView)> {
        if self.is_spent() {
            return None;
        }
        let base = if path.starts_with(b"/") { b"" } else { base };
        let whole = [base, b"/", path].concat();
        if let Some(known) = self.resolved.get(&whole) {
            self.answers = self.answers.saturating_sub(1);
            return known.clone();
        }
        let found = self.walk(&whole);
        if whole.len() <= LONGEST && self.resolved.len() < RESOLVED {
            self.resolved.insert(whole, found.clone());
        }
        found
    }

    /// Looks up the names of a path from the root.
    fn walk(&mut self, path: &[u8]) -> Option<(Vec<u8>, InodeView)> {
        let mut ahead = VecDeque::new();
        prepend(&mut ahead, path);
        let root = self.bootstrap.root();
        // From the root down, without the root.
        let mut trail: Vec<(Vec<u8>, Nid)> = Vec::new();
        let mut links = LINKS;
        while let Some(name) = ahead.pop_front() {
            self.steps = self.steps.checked_sub(1)?;
            if ahead.len() + trail.len() > NAMES {
                return None;
            }
            match name.as_slice() {
                b"." => continue,
                b".." => {
                    trail.pop();
                    continue;
                }
                _ => {}
            }
            let above = trail.last().map_or(root, |(_, nid)| *nid);
            let nid = self.bootstrap.lookup(above, &name).ok()??;
            if self.bootstrap.inode(nid).ok()?.file_type != FileType::Symlink {
                trail.push((name, nid));
                continue;
            }
            links = links.checked_sub(1)?;
            let target = self.bootstrap.read_link(nid).ok()?;
            if target.starts_with(b"/") {
                trail.clear();
            }
            prepend(&mut ahead, target);
        }
        let nid = trail.last().map_or(root, |(_, nid)| *nid);
        let path = trail.iter().flat_map(|(name, _)| [b"/", name.as_slice()].concat()).collect();
        Some((path, self.bootstrap.inode(nid).ok()?))
    }
}

/// Lists all files.
fn all_names<B: AsRef<[u8]>>(bootstrap: &Bootstrap<B>) -> Everywhere {
    let mut names = Everywhere::new();
    walk(bootstrap, Arc::from(&b""[..]), |directory: &Arc<[u8]>, entry| {
        if entry.file_type == FileType::Regular {
            let name = names.entry(entry.name.to_vec());
            name.and_modify(|known| *known = None).or_insert_with(|| Some(directory.clone()));
        }
        let below = match entry.file_type {
            FileType::Directory => [directory, &b"/"[..], entry.name].concat().into(),
            _ => directory.clone(),
        };
        ControlFlow::<(), _>::Continue(below)
    });
    names
}

/// The part of a name before its first dot; a leading dot doesn't count.
fn stem_of(name: &[u8]) -> &[u8] {
    let dot = name.iter().skip(1).position(|byte| *byte == b'.');
    dot.map_or(name, |dot| &name[..dot + 1])
}

/// Puts the names in `path` before those that are there.
fn prepend(ahead: &mut VecDeque<Vec<u8>>, path: &[u8]) {
    for name in path.split(|byte| *byte == b'/').rev().filter(|name| !name.is_empty()) {
        ahead.push_front(name.to_vec());
    }
}

/// Returns whether `name` matches `pattern`.
pub(super) fn matches(pattern: &[u8], name: &[u8]) -> bool {
    let mut parts = pattern.split(|byte| *byte == b'*');
    let first = parts.next().unwrap_or_default();
    let Some(mut rest) = name.strip_prefix(first) else { return false };
    let Some(last) = parts.next_back() else { return rest.is_empty() };
    for part in parts.filter(|part| !part.is_empty()) {
        let Some(at) = rest.windows(part.len()).position(|window| window == part) else {
            return false;
        };
        rest = &rest[at + part.len()..];
    }
    rest.ends_with(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stars_stand_for_parts_of_names() {
        for (pattern, name, expected) in [
            ("a", "a", true),
            ("a", "ab", false),
            ("*", "", true),
            ("*.conf", "a.conf", true),
            ("*.conf", ".conf", true),
            ("*.conf", "a.conf~", false),
            ("site.*.pyc", "site.cpython-311.pyc", true),
            ("site.*.pyc", "site.pyc", false),
            ("a*a", "a", false),
            ("*b*b*", "abcb", true),
            ("*b*b*", "abc", false),
        ] {
            assert_eq!(matches(pattern.as_bytes(), name.as_bytes()), expected, "{pattern} {name}");
        }
    }
}
