//! Manifests that are answered while the registry is away.
//!
//! ```text
//! ROOT/mirror/answers/REPOSITORY/CLIENT/MANIFEST
//! ```
//! Each name is a keyed hash: of the repository, of the repository with the client's login, of the
//! tag or digest. A file holds a line with its type, then the manifest. Its modification time is
//! when the registry last confirmed it. A client gets only what the registry answered to the same
//! login, and nothing once the registry has refused that login.

use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, SystemTime},
};

use lazuli_image::Digest;
use lazuli_registry::{Document, Reference, manifest::DOCUMENT_LIMIT};
use serde::{Deserialize, Serialize};

use crate::{files, seal::Seal, sessions::Session};

/// Manifests that are kept, and their bytes.
const MOST: usize = 4096;
const MOST_BYTES: u64 = 32 << 20;

/// The number of answers after which the directory is checked again.
const LOOK_EVERY: u64 = 64;

/// How far a file's time may lag behind the registry's last confirmation, so that a pull does not
/// write for each request.
const LAG: Duration = Duration::from_secs(600);

/// See the module.
#[derive(Debug)]
pub(crate) struct OutageAnswers {
    directory: PathBuf,
    lifetime: Duration,
    stored: AtomicU64,
}

/// The file of an answer.
#[derive(Clone, Debug)]
pub(crate) struct AnswerFile {
    repository: PathBuf,
    client: PathBuf,
    file: PathBuf,
}

#[derive(Serialize, Deserialize)]
struct Head {
    media_type: String,
    digest: Digest,
}

impl OutageAnswers {
    /// Answers in `directory` are good for `lifetime` after the registry's last word.
    pub(crate) fn new(directory: PathBuf, lifetime: Duration) -> Self {
        OutageAnswers { directory, lifetime, stored: AtomicU64::new(0) }
    }

    /// Returns the file of the answer to `session` for `reference`.
    pub(crate) fn answer_file(
        &self,
        session: &Session,
        reference: &Reference,
        seal: &Seal,
    ) -> AnswerFile {
        let (registry, repository) = (reference.registry(), reference.repository());
        let repository = seal.name(&[b"repository", registry.as_bytes(), repository.as_bytes()]);
        let repository = self.directory.join(repository);
        let client = repository.join(&session.key);
        let selector = reference.selector().to_string();
        let file = client.join(seal.name(&[b"manifest", selector.as_bytes()]));
        AnswerFile { repository, client, file }
    }

    /// Keeps an answer of the registry. Blocks.
    pub(crate) fn store(&self, answer_file: &AnswerFile, document: &Document) -> io::Result<()> {
        if self.lifetime.is_zero() {
            return Ok(());
        }
        let head = Head { media_type: document.media_type.clone(), digest: document.digest };
        let mut content = serde_json::to_vec(&head)?;
        content.push(b'\n');
        if is_same(&answer_file.file, &content, document.raw.len())? {
            return Ok(());
        }
        content.extend_from_slice(&document.raw);
        files::directory(&answer_file.client)?;
        files::write(&answer_file.file, &content)?;
        if self.stored.fetch_add(1, Ordering::Relaxed).is_multiple_of(LOOK_EVERY) {
            self.shrink()?;
        }
        Ok(())
    }

    /// The answer that is kept, if it is good. Blocks.
    pub(crate) fn find(&self, answer_file: &AnswerFile) -> Option<Document> {
        let age =
            fs::metadata(&answer_file.file).ok()?.modified().ok()?.elapsed().unwrap_or_default();
        if age >= self.lifetime {
            return None;
        }
        let content = files::read(&answer_file.file, DOCUMENT_LIMIT + (1 << 10)).ok()?;
        let end = content.iter().position(|byte| *byte == b'\n')?;
        let head: Head = serde_json::from_slice(&content[..end]).ok()?;
        let raw = content[end + 1..].to_vec();
        // A power cut may have damaged it.
        let Head { media_type, digest } = head;
        digest.matches(&raw).then(|| Document { raw: raw.into(), digest, media_type })
    }

    /// Returns whether an answer of the same repository is kept for some client. Blocks.
    pub(crate) fn is_known(&self, answer_file: &AnswerFile) -> bool {
        !self.lifetime.is_zero()
            && fs::read_dir(&answer_file.repository)
                .is_ok_and(|mut clients| clients.next().is_some())
    }

    /// Forgets everything that the registry told this client about the repository. Blocks.
    pub(crate) fn forget(&self, answer_file: &AnswerFile) -> io::Result<()> {
        let removed = fs::remove_dir_all(&answer_file.client);
        // Fails when others are left.
        let _ = fs::remove_dir(&answer_file.repository);
        match removed {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// Removes expired files, and the oldest ones above the limit.
    fn shrink(&self) -> io::Result<()> {
        let mut all = Vec::new();
        for repository in directories(&self.directory)? {
            for client in directories(&repository)? {
                for file in fs::read_dir(&client)?.flatten() {
                    let Ok(metadata) = file.metadata() else { continue };
                    all.push((metadata.modified()?, metadata.len(), file.path()));
                }
            }
        }
        all.sort_by_key(|(when, ..)| std::cmp::Reverse(*when));
        let (mut count, mut bytes) = (0, 0);
        for (when, size, path) in all {
            (count, bytes) = (count + 1, bytes + size);
            let age = when.elapsed().unwrap_or_default();
            if age < self.lifetime && count <= MOST && bytes <= MOST_BYTES {
                continue;
            }
            fs::remove_file(&path)?;
            // Directories in which something is left stay.
            for above in path.ancestors().skip(1).take(2) {
                let _ = fs::remove_dir(above);
            }
        }
        Ok(())
    }
}

/// Returns whether the file has this content already, and refreshes its time if so.
fn is_same(path: &Path, head: &[u8], raw: usize) -> io::Result<bool> {
    let metadata = match fs::metadata(path) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(error),
    };
    if metadata.len() != (head.len() + raw) as u64 {
        return Ok(false);
    }
    let content = files::read(path, metadata.len())?;
    if !content.starts_with(head) {
        return Ok(false);
    }
    if metadata.modified()?.elapsed().unwrap_or_default() > LAG {
        File::options().append(true).open(path)?.set_modified(SystemTime::now())?;
    }
    Ok(true)
}

fn directories(path: &Path) -> io::Result<Vec<PathBuf>> {
    match fs::read_dir(path) {
        Ok(entries) => {
            Ok(entries.flatten().map(|entry| entry.path()).filter(|p| p.is_dir()).collect())
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use lazuli_image::Algorithm;
    use lazuli_registry::{Login, Options};

    use super::*;
    use crate::{seal::SECRET, sessions::Sessions};

    const DAY: Duration = Duration::from_secs(24 * 3600);

    struct Scene {
        _directory: tempfile::TempDir,
        answers: OutageAnswers,
        sessions: Sessions,
        seal: Seal,
    }

    impl Scene {
        fn new(lifetime: Duration) -> Self {
            let directory = tempfile::tempdir().unwrap();
            let answers = OutageAnswers::new(directory.path().join("answers"), lifetime);
            let (sessions, seal) =
                (Sessions::new(Options::default()), Seal::new(&[1; SECRET]).unwrap());
            Scene { _directory: directory, answers, sessions, seal }
        }

        fn answer_file(&self, image: &str, user: &str) -> AnswerFile {
            let (reference, login) = (image.parse().unwrap(), Login::new(user, "secret"));
            let login = (!user.is_empty()).then_some(login);
            let session = self.sessions.get(&reference, login, &self.seal).unwrap();
            self.answers.answer_file(&session, &reference, &self.seal)
        }
    }

    fn document(content: &'static str) -> Document {
        let raw = Bytes::from_static(content.as_bytes());
        let digest = Algorithm::Sha256.digest(&raw);
        Document { raw, digest, media_type: "application/json".to_owned() }
    }

    #[tokio::test]
    async fn an_answer_is_for_the_client_that_had_it() {
        let scene = Scene::new(DAY);
        let ann = scene.answer_file("r.example/a:1", "ann");
        scene.answers.store(&ann, &document("{}")).unwrap();
        let found = scene.answers.find(&ann).unwrap();
        assert_eq!((&found.raw[..], found.digest), (&b"{}"[..], document("{}").digest));
        for (image, user) in [
            ("r.example/a:1", "bob"),
            ("r.example/a:1", ""),
            ("r.example/a:2", "ann"),
            ("r.example/b:1", "ann"),
        ] {
            assert!(
                scene.answers.find(&scene.answer_file(image, user)).is_none(),
                "{image} {user}"
            );
        }
        let knows = |image: &str| scene.answers.is_known(&scene.answer_file(image, ""));
        assert_eq!((knows("r.example/a:1"), knows("r.example/b:1")), (true, false));
    }

    #[tokio::test]
    async fn a_client_that_was_refused_has_nothing_left() {
        let scene = Scene::new(DAY);
        let [ann, bob] = ["ann", "bob"].map(|user| scene.answer_file("r.example/a:1", user));
        for answer_file in [&ann, &bob] {
            scene.answers.store(answer_file, &document("{}")).unwrap();
        }
        scene.answers.forget(&ann).unwrap();
        scene.answers.forget(&ann).unwrap();
        assert!(scene.answers.find(&ann).is_none());
        assert!(scene.answers.find(&bob).is_some());
    }

    #[tokio::test]
    async fn answers_end_with_their_lifetime() {
        let scene = Scene::new(DAY);
        let answer_file = scene.answer_file("r.example/a:1", "ann");
        scene.answers.store(&answer_file, &document("{}")).unwrap();
        let file = File::options().append(true).open(&answer_file.file).unwrap();
        file.set_modified(SystemTime::now() - DAY).unwrap();
        assert!(scene.answers.find(&answer_file).is_none());
        // The registry answers the same again.
        scene.answers.store(&answer_file, &document("{}")).unwrap();
        assert!(scene.answers.find(&answer_file).is_some());
        let none = Scene::new(Duration::ZERO);
        let answer_file = none.answer_file("r.example/a:1", "ann");
        none.answers.store(&answer_file, &document("{}")).unwrap();
        assert!(none.answers.find(&answer_file).is_none() && !answer_file.file.exists());
    }

    #[tokio::test]
    async fn damaged_files_and_old_ones_are_no_answers() {
        let scene = Scene::new(DAY);
        let answer_file = scene.answer_file("r.example/a:1", "ann");
        scene.answers.store(&answer_file, &document("{}")).unwrap();
        let content = fs::read(&answer_file.file).unwrap();
        for damaged in [&content[..content.len() - 1], b"", b"\n{}", b"{}\n{}"] {
            fs::write(&answer_file.file, damaged).unwrap();
            assert!(scene.answers.find(&answer_file).is_none(), "{damaged:?}");
        }
        scene.answers.store(&answer_file, &document("{}")).unwrap();
        File::options()
            .append(true)
            .open(&answer_file.file)
            .unwrap()
            .set_modified(SystemTime::now() - 2 * DAY)
            .unwrap();
        scene.answers.shrink().unwrap();
        assert!(!answer_file.repository.exists());
    }
}
