//! The gate, which every served image has passed.

use std::{
    cell::RefCell,
    fs, io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use lazuli_image::Digest;
use lazuli_registry::ImageName;
use tokio::time::timeout;

use crate::{
    name::Asked,
    question::Question,
    rules::{Ground, Policy, PolicyError, Rule, read_file},
    search::Search,
    verdicts::Verdicts,
    verify::{Claim, Refused, Verified, verify},
};

/// Path of the policy, unless the configuration names another.
pub const DEFAULT_PATH: &str = "/etc/lazuli/policy.toml";

/// Time limit for a search for signatures.
pub(crate) const SEARCH_DEADLINE: Duration = Duration::from_secs(30);

/// Why an image may not run.
#[derive(Debug, thiserror::Error)]
pub enum GateError {
    /// The policy cannot be used.
    #[error(transparent)]
    Policy(#[from] Arc<PolicyError>),
    /// The policy refuses the image.
    #[error(transparent)]
    Refused(#[from] Box<Refused>),
    /// Registries took too long.
    #[error("{image} may not run: its signatures were not found within {} s", SEARCH_DEADLINE.as_secs())]
    TimedOut {
        /// Name and digest.
        image: String,
    },
    /// The verdict cannot be kept, or the caller is gone.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The operating system's reason.
        source: io::Error,
    },
}

/// Decides which images may run on the node.
#[derive(Debug)]
pub struct Gate {
    path: PathBuf,
    /// Whether the configuration names the file, which must exist then.
    is_named: bool,
    /// The directory for verdicts, if they are kept.
    kept: Option<PathBuf>,
    loaded: Mutex<Option<Loaded>>,
}

#[derive(Clone, Debug)]
struct Loaded {
    /// Stamps of the policy's files.
    stamps: Vec<(PathBuf, Option<Stamp>)>,
    policy: Option<Arc<Policy>>,
    verdicts: Option<Arc<Verdicts>>,
}

/// Identifies a version of a file: device, inode, size, and the time of its last change of any
/// kind.
type Stamp = (u64, u64, u64, i64, i64);

impl Gate {
    /// The gate with the policy at `path`, or at [`DEFAULT_PATH`] if there is one; verdicts are
    /// kept in `verdicts`.
    pub fn new(path: Option<PathBuf>, verdicts: Option<PathBuf>) -> Self {
        let is_named = path.is_some();
        let path = path.unwrap_or_else(|| DEFAULT_PATH.into());
        Gate { path, is_named, kept: verdicts, loaded: Mutex::default() }
    }

    /// The policy at this moment, if there is one. Reads files.
    ///
    /// # Errors
    /// It cannot be used, so nothing may run.
    pub fn policy(&self) -> Result<Option<Arc<Policy>>, GateError> {
        Ok(self.load()?.policy)
    }

    /// Returns whether a lazy image may replace the ordinary image that it refers to: whether the
    /// policy's rule for `name` accepts conversion statements. Reads files.
    pub fn takes_statements(&self, name: &ImageName) -> bool {
        let policy = self.policy().ok().flatten();
        policy.is_some_and(|policy| policy.takes_statements(name))
    }

    /// Finds out whether an image may run, once for each name, manifest and policy.
    ///
    /// # Errors
    /// It may not, or that cannot be found out.
    pub async fn admit(self: &Arc<Self>, question: Question) -> Result<Verified, GateError> {
        let manifest = question.manifest.digest;
        let asked = Asked::of(&question.name);
        let (gate, wanted) = (self.clone(), asked.clone());
        let known = blocking(&self.path, move || gate.recall(&wanted, manifest)).await?;
        let (policy, verdicts) = match known {
            Known::Verified(verified) => return Ok(verified),
            Known::Open(policy, verdicts) => (policy, verdicts),
        };
        let claim = Claim { name: &question.name, manifest, index: None, replaces: None };
        let is_evidence_wanted = matches!(policy.rule(&asked).1,
            Rule::Require(requirement) if !requirement.accepts_anything());
        if !is_evidence_wanted {
            return Ok(verify(&policy, &claim, &crate::Evidence::default())?);
        }
        let found = timeout(SEARCH_DEADLINE, Search::new(&policy, &question).run()).await;
        let image = || format!("{asked}@{manifest}");
        let verified = found.map_err(|_| GateError::TimedOut { image: image() })??;
        tracing::info!(image = image(), by = %verified, "verified");
        if let (Some(verdicts), false) = (verdicts, asks_a_program(&policy, &asked)) {
            blocking(&self.path, move || {
                verdicts.keep(&asked, &manifest);
                Ok(())
            })
            .await?;
        }
        Ok(verified)
    }

    fn recall(&self, asked: &Asked, manifest: Digest) -> Result<Known, GateError> {
        let Loaded { policy, verdicts, .. } = self.load()?;
        let Some(policy) = policy else {
            return Ok(Known::Verified(Verified::new(manifest, "there is no policy")));
        };
        let is_known = verdicts.as_ref().is_some_and(|kept| kept.has(asked, &manifest));
        Ok(match is_known {
            true => Known::Verified(Verified::new(manifest, "an earlier verdict")),
            false => Known::Open(policy, verdicts),
        })
    }

    /// Returns the cached policy, or reads it again if one of its files has changed.
    fn load(&self) -> Result<Loaded, GateError> {
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        let is_same = |(path, seen): &(PathBuf, Option<Stamp>)| stamp(path) == *seen;
        if let Some(known) = loaded.as_ref().filter(|known| known.stamps.iter().all(is_same)) {
            return Ok(known.clone());
        }
        // Cache only a policy that can be used: a faulty one is read again for each image.
        *loaded = None;
        let now = self.read()?;
        Ok(loaded.insert(now).clone())
    }

    fn read(&self) -> Result<Loaded, GateError> {
        let stamps = RefCell::new(Vec::new());
        // Stamp each file before reading it: a change in between causes another read the next time.
        let read = |path: &Path, limit: usize| {
            stamps.borrow_mut().push((path.to_owned(), stamp(path)));
            read_file(path, limit)
        };
        let policy = match Policy::load(&self.path, &read) {
            Ok(policy) => policy,
            Err(PolicyError::Io { source, .. })
                if source.kind() == io::ErrorKind::NotFound && !self.is_named =>
            {
                let stamps = stamps.into_inner();
                return Ok(Loaded { stamps, policy: None, verdicts: None });
            }
            Err(error) => return Err(Arc::new(error).into()),
        };
        let stamps = stamps.into_inner();
        let open = |root: &PathBuf| {
            let io = |source| GateError::Io { path: root.clone(), source };
            Verdicts::open(root, &policy.hash()).map(Arc::new).map_err(io)
        };
        let verdicts = self.kept.as_ref().map(open).transpose()?;
        tracing::info!(policy = %self.path.display(), hash = %policy.hash(), "policy in force");
        Ok(Loaded { stamps, policy: Some(Arc::new(policy)), verdicts })
    }
}

/// The verdict on an image without a request.
enum Known {
    Verified(Verified),
    Open(Arc<Policy>, Option<Arc<Verdicts>>),
}

/// Returns whether a verifier program decides. Its answer may change, because it has a policy of
/// its own.
fn asks_a_program(policy: &Policy, asked: &Asked) -> bool {
    let (_, Rule::Require(requirement)) = policy.rule(asked) else { return false };
    matches!(requirement.ground, Some(Ground::ExternalVerifier(_)))
}

fn stamp(path: &Path) -> Option<Stamp> {
    let metadata = fs::metadata(path).ok()?;
    let changed = (metadata.ctime(), metadata.ctime_nsec());
    Some((metadata.dev(), metadata.ino(), metadata.size(), changed.0, changed.1))
}

/// Runs file access on a thread of its own, so that slow disks don't delay readers.
async fn blocking<T: Send + 'static>(
    path: &Path,
    work: impl FnOnce() -> Result<T, GateError> + Send + 'static,
) -> Result<T, GateError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|panic| {
        Err(GateError::Io { path: path.to_owned(), source: io::Error::other(panic) })
    })
}
