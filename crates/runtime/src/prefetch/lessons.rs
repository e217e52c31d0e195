//! Lessons from the starts of one image for others.
//!
//! ```text
//! start is over ─▶ lesson: paths and marks of chunks
//!                   ├─▶ of the repository ─▶ its next version, here and elsewhere
//!                   └─▶ of each program that ran ─▶ images with the same program
//! ```
//!
//! Programs' lessons are shared between repositories only if every client may read the repository
//! of origin. A lesson is a hint: a wrong one costs bytes, up to
//! [`Settings::escalate_bytes`](super::Settings::escalate_bytes), and fades.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    path::Path,
    sync::Arc,
};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use lazuli_image::{
    Algorithm, Digest, Lesson, Trace,
    erofs::{FileType, Nid},
    lesson::{FileChunk, Mark, mark},
    oci::Descriptor,
    rafs::Bootstrap,
};
use lazuli_registry::{Referrers, RegistryError};

use super::{Image, fetch_in_order::ChunkAt, small_files::SmallFiles};
use crate::cache::CachedBlob;

/// The type of artifacts with lessons. Older versions ask only for traces, and never see them.
const ARTIFACT_TYPE: &str = "application/vnd.lazuli.trace.v2";

/// Its annotation with the lesson, in base64.
const ANNOTATION: &str = "vnd.lazuli.trace";

/// The common subject of a repository's lessons: the next version of an image has another manifest,
/// and doesn't know earlier ones.
const SUBJECT: &[u8] = b"lazuli: what starts of this repository's images read\n";

/// Maximum number of artifacts of one repository that are read.
const ARTIFACTS: usize = 16;

/// Maximum number of names per image, and of nested directories.
const NAMES: usize = 1 << 20;
const DEPTH: usize = 64;

/// Maximum number of programs per start whose lessons are kept: wrappers, a shell, an interpreter,
/// and their targets.
const PROGRAMS: usize = 8;

/// The clients that may read a repository.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Visibility {
    /// All: its lessons may help images of other repositories.
    Public,
    /// Those with a login.
    Private,
}

/// The lessons that this node keeps.
#[derive(Debug)]
pub(crate) struct Lessons(SmallFiles);

impl Lessons {
    /// Those in the state directory `root`.
    pub(crate) fn of(root: &Path) -> Self {
        Lessons(SmallFiles(root.join("lessons")))
    }

    /// The reads of starts of a repository's images.
    pub(super) fn of_repository(&self, repository: &str) -> Option<Lesson> {
        self.get(&of_repository(repository))
    }

    /// The reads of starts that ran the program with this first chunk.
    pub(super) fn of_program(&self, first: &Digest) -> Option<Lesson> {
        self.get(&of_program(first))
    }

    /// Adds a start of an image of `repository`, in which `programs` ran.
    pub(super) fn add(
        &self,
        repository: &str,
        start: &Lesson,
        programs: &[Digest],
        visibility: Visibility,
    ) -> std::io::Result<Lesson> {
        let lesson = self.merged(&of_repository(repository), start)?;
        if visibility == Visibility::Public {
            for program in programs {
                self.merged(&of_program(program), start)?;
            }
        }
        Ok(lesson)
    }

    /// Keeps a lesson that another node has taught.
    pub(super) fn put(&self, repository: &str, lesson: &Lesson) -> std::io::Result<()> {
        self.0.put(&of_repository(repository), &lesson.encode())
    }

    fn merged(&self, name: &Digest, start: &Lesson) -> std::io::Result<Lesson> {
        let lesson = match self.get(name) {
            Some(mut known) => {
                known.merge(start);
                known
            }
            None => start.clone(),
        };
        self.0.put(name, &lesson.encode())?;
        Ok(lesson)
    }

    fn get(&self, name: &Digest) -> Option<Lesson> {
        let lesson = Lesson::decode(&self.0.get(name)?);
        let path = self.0.path(name);
        lesson.inspect_err(|error| tracing::warn!(path = %path.display(), %error, "ignored")).ok()
    }
}

fn of_repository(name: &str) -> Digest {
    Algorithm::Sha256.digest(&[b"repository ", name.as_bytes()].concat())
}

fn of_program(first: &Digest) -> Digest {
    Algorithm::Sha256.digest(&[b"program ", &first.hash[..]].concat())
}

/// The lesson of one start of an image, and the first chunks of the programs that ran.
pub(super) fn of_start(image: &Image, start: &Trace) -> (Lesson, Vec<Digest>) {
    let bootstrap = &*image.bootstrap;
    let blobs = bootstrap.blobs();
    let mut touched: HashMap<(usize, u32), u32> = HashMap::new();
    for touch in start.touches() {
        let id = start.blobs()[usize::from(touch.blob)];
        if let Some(blob) = blobs.iter().position(|blob| blob.id == id) {
            touched.insert((blob, touch.number), touch.at);
        }
    }
    let (mut read, mut programs) = (Vec::new(), Vec::new());
    walk(bootstrap, |path, nid| {
        let Ok(chunks) = bootstrap.chunks(nid) else { return };
        for ((chunk, _), number) in chunks.flatten().zip(0..) {
            let blob = usize::from(chunk.blob.0);
            // A chunk of several files counts for the first one.
            let Some(at) = touched.remove(&(blob, chunk.number)) else { continue };
            let Some(chunk) = blobs[blob].chunk(chunk.number) else { continue };
            let is_program = bootstrap.inode(nid).is_ok_and(|inode| inode.permissions & 0o111 != 0);
            if number == 0 && is_program && !path.windows(3).any(|name| name == b".so") {
                programs.push((at, chunk.digest));
            }
            read.push(FileChunk {
                path: path.into(),
                number,
                mark: mark(&chunk.digest),
                at,
                starts: 1,
            });
        }
    });
    programs.sort_by_key(|(at, _)| *at);
    let programs = programs.into_iter().take(PROGRAMS).map(|(_, digest)| digest).collect();
    (Lesson::of_start(read), programs)
}

/// Calls `file` with the path and the inode of each regular file, up to a limit. Skips damaged
/// parts.
fn walk<B: AsRef<[u8]>>(bootstrap: &Bootstrap<B>, mut file: impl FnMut(&[u8], Nid)) {
    let mut names = NAMES;
    let mut ahead: Vec<(Vec<u8>, Nid, usize)> = vec![(Vec::new(), bootstrap.root(), 0)];
    while let Some((path, nid, depth)) = ahead.pop() {
        for entry in bootstrap.read_dir(nid, 0).into_iter().flatten().flatten().take(names) {
            names -= 1;
            let below = match path.is_empty() {
                true => entry.name.to_vec(),
                false => [&path[..], b"/", entry.name].concat(),
            };
            match entry.file_type {
                FileType::Regular => file(&below, entry.nid),
                FileType::Directory if !entry.is_dot() && depth < DEPTH => {
                    ahead.push((below, entry.nid, depth + 1));
                }
                _ => {}
            }
        }
    }
}

/// The places in an image of a lesson's hot chunks: those at the same position in files of the same
/// names, and those that moved elsewhere. Together they have at most `most` missing stored bytes.
pub(super) fn places<B: AsRef<[u8]>>(
    lesson: &Lesson,
    bootstrap: &Bootstrap<B>,
    blobs: &[Arc<CachedBlob>],
    most: u64,
) -> Vec<ChunkAt> {
    let by_path: Vec<_> = lesson.hot().map(|chunk| by_path(chunk, bootstrap, blobs)).collect();
    let lost = lesson.hot().zip(&by_path).filter(|(_, place)| place.is_none());
    let by_mark = by_mark(lost.map(|(chunk, _)| chunk.mark).collect(), blobs);
    let found = lesson.hot().zip(by_path);
    let found =
        found.filter_map(|(chunk, place)| place.or_else(|| by_mark.get(&chunk.mark).copied()));
    let mut left = most;
    let mut fits = |(blob, chunk): &ChunkAt| {
        let size =
            if blobs[*blob].has(*chunk) { 0 } else { blobs[*blob].chunk(*chunk).stored_share() };
        let rest = left.checked_sub(size);
        left = rest.unwrap_or(left);
        rest.is_some()
    };
    found.filter(|place| fits(place)).collect()
}

fn by_path<B: AsRef<[u8]>>(
    wanted: &FileChunk,
    bootstrap: &Bootstrap<B>,
    blobs: &[Arc<CachedBlob>],
) -> Option<ChunkAt> {
    let names = wanted.path.split(|byte| *byte == b'/');
    let step = |nid, name| bootstrap.lookup(nid, name).ok().flatten();
    let nid = names.take(DEPTH + 1).try_fold(bootstrap.root(), step)?;
    if bootstrap.inode(nid).ok()?.file_type != FileType::Regular {
        return None;
    }
    let (chunk, _) = bootstrap.chunks(nid).ok()?.nth(wanted.number as usize)?.ok()?;
    let blob = usize::from(chunk.blob.0);
    Some((blob, blobs.get(blob)?.position(chunk.number)?))
}

/// Returns the places of the chunks with these marks.
fn by_mark(marks: HashSet<Mark>, blobs: &[Arc<CachedBlob>]) -> HashMap<Mark, ChunkAt> {
    let mut found = HashMap::new();
    if marks.is_empty() {
        return found;
    }
    for (position, blob) in blobs.iter().enumerate() {
        for at in 0..blob.stats().chunks_total as usize {
            let mark = mark(&blob.chunk(at).digest);
            if marks.contains(&mark) {
                found.entry(mark).or_insert((position, at));
            }
        }
    }
    found
}

fn subject() -> Descriptor {
    const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
    Descriptor::plain(MANIFEST, Algorithm::Sha256.digest(SUBJECT), SUBJECT.len() as u64)
}

/// The lesson of a repository that other nodes have put there.
pub(super) async fn find(repository: &dyn Referrers) -> Result<Option<Lesson>, RegistryError> {
    Ok(found(repository).await?.map(|(lesson, _)| lesson))
}

async fn found(repository: &dyn Referrers) -> Result<Option<(Lesson, Descriptor)>, RegistryError> {
    let artifacts = repository.referrers(&subject().digest, Some(ARTIFACT_TYPE)).await?;
    let mut found: Option<(Lesson, Descriptor)> = None;
    for artifact in artifacts.into_iter().take(ARTIFACTS) {
        let Some(text) = artifact.annotations.get(ANNOTATION) else { continue };
        let bytes = STANDARD.decode(text).map_err(|error| error.to_string());
        match bytes.and_then(|bytes| Lesson::decode(&bytes).map_err(|error| error.to_string())) {
            Ok(lesson) => match &mut found {
                Some((known, _)) => known.merge(&lesson),
                None => found = Some((lesson, artifact)),
            },
            Err(problem) => tracing::warn!(artifact = %artifact.digest, problem, "ignored"),
        }
    }
    Ok(found)
}

/// Adds one start to the published lesson of a repository.
pub(super) async fn publish(
    repository: &dyn Referrers,
    start: &Lesson,
) -> Result<Digest, RegistryError> {
    let (lesson, before) = match found(repository).await? {
        Some((mut known, artifact)) => {
            known.merge(start);
            (known, Some(artifact.digest))
        }
        None => (start.clone(), None),
    };
    let annotation = (ANNOTATION.to_owned(), STANDARD.encode(lesson.encode()));
    let annotations = BTreeMap::from([annotation]);
    repository.push_referrer(&subject(), ARTIFACT_TYPE, &annotations, before.as_ref()).await
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lesson(path: &str) -> Lesson {
        let chunk =
            FileChunk { path: path.as_bytes().into(), number: 0, mark: [1; 8], at: 0, starts: 1 };
        Lesson::of_start([chunk])
    }

    #[test]
    fn lessons_of_a_private_repository_stay_private() {
        let root = tempfile::tempdir().unwrap();
        let lessons = Lessons::of(root.path());
        let program = Digest::sha256([7; 32]);
        lessons
            .add("registry/private", &lesson("secret"), &[program], Visibility::Private)
            .unwrap();
        assert_eq!(lessons.of_repository("registry/private"), Some(lesson("secret")));
        assert_eq!(lessons.of_repository("registry/other"), None);
        assert_eq!(lessons.of_program(&program), None);
        lessons.add("registry/open", &lesson("known"), &[program], Visibility::Public).unwrap();
        assert_eq!(lessons.of_program(&program), Some(lesson("known")));
    }

    #[test]
    fn unreadable_lesson_is_ignored() {
        let root = tempfile::tempdir().unwrap();
        let lessons = Lessons::of(root.path());
        lessons.put("a", &lesson("x")).unwrap();
        std::fs::write(lessons.0.path(&of_repository("a")), b"lazuli trace 3\n").unwrap();
        assert_eq!(lessons.of_repository("a"), None);
    }
}
