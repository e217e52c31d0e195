//! Sessions: one client's view of one repository.
//!
//! A session is a repository of a registry with one login, or with none. It asks the registry with
//! that login only, and its answers are used within the session only: a client with another login
//! asks for itself. Credentials of the node are never used.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use lazuli_image::Digest;
use lazuli_registry::{
    ImageName, Keyring, Layout, Login, Options, Pull, Reference, RegistryError, Repository,
};
use tokio::time::Instant;

use crate::{reply::Problem, seal::Seal};

/// How long an unused session lives. Tokens of registries are good for some minutes.
const IDLE: Duration = Duration::from_secs(300);

/// Maximum number of sessions: more than the pulls that a node runs at a time.
const MOST: usize = 4096;

/// How long a refusal of anonymous clients is remembered for a registry: private repositories stay
/// private, and a client without a login asks the registry itself.
const REFUSED: Duration = Duration::from_secs(3600);

/// Maximum number of repositories that are remembered to refuse anonymous clients.
const MOST_REFUSED: usize = 4096;

/// How long the mirror refuses a blob after it received wrong bytes for it, so that the client asks
/// the registry.
const WRONG_BYTES_BACKOFF: Duration = Duration::from_secs(60);

/// Sizes of blobs that a session remembers.
const SIZES: usize = 4096;

/// Upper bound for Retry-After: a longer one would keep a pull from the mirror after the registry
/// has recovered.
const LONGEST_RETRY: Duration = Duration::from_secs(600);

/// The session's key. It doesn't reveal the login.
pub(crate) type Key = String;

/// A repository with a login.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) key: Key,
    /// The repository, at no tag in particular.
    pub(crate) reference: Reference,
    pub(crate) login: Option<Login>,
    pub(crate) repository: Arc<dyn Pull>,
    options: Options,
    state: Mutex<SessionState>,
}

#[derive(Debug)]
struct SessionState {
    used: Instant,
    /// The registry asked for a pause until then.
    paused_until: Option<Instant>,
    sizes: HashMap<Digest, u64>,
    /// Blobs of which wrong bytes came, and when.
    wrong: HashMap<Digest, Instant>,
}

impl SessionState {
    fn new() -> Self {
        let (sizes, wrong) = Default::default();
        SessionState { used: Instant::now(), paused_until: None, sizes, wrong }
    }
}

impl Session {
    fn open(
        key: Key,
        reference: &Reference,
        login: Option<Login>,
        node: &Options,
    ) -> Result<Self, RegistryError> {
        let keyring = Keyring::default();
        let name = ImageName::Registry(reference.clone());
        if let Some(login) = &login {
            keyring.set("client", &name, login.clone());
        }
        let options = Options { keyring, credential_files: Vec::new(), ..node.clone() };
        let repository = lazuli_registry::open(&name, &options)?;
        let (reference, state) = (reference.clone(), Mutex::new(SessionState::new()));
        Ok(Session { key, reference, login, repository, options, state })
    }

    /// The repository, opened at what `reference` names.
    pub(crate) fn at(&self, reference: &Reference) -> Result<Arc<dyn Repository>, RegistryError> {
        lazuli_registry::open(&ImageName::Registry(reference.clone()), &self.options)
    }

    /// The same client's view of the repository's images in a bundle.
    pub(crate) fn bundled(&self, layout: Layout) -> Self {
        Session {
            key: format!("{}-bundled", self.key),
            reference: self.reference.clone(),
            login: self.login.clone(),
            repository: Arc::new(layout),
            options: self.options.clone(),
            state: Mutex::new(SessionState::new()),
        }
    }

    /// Returns whether the registry was away a moment ago.
    pub(crate) fn is_away(&self) -> bool {
        self.repository.request_policy().health().is_some_and(|health| !health.is_well())
    }

    /// Notes that the registry did not answer a question that was asked at `started`. It rests,
    /// unless it rested already.
    pub(crate) fn was_away(&self, started: Instant) {
        let policy = self.repository.request_policy();
        if let Some(health) = policy.health().filter(|health| health.is_well()) {
            health.failed(started, None);
        }
    }

    /// Notes an answer of the registry's own, which ends its rest.
    pub(crate) fn heard<T>(&self, answer: Result<T, RegistryError>) -> Result<T, RegistryError> {
        let problem = answer.as_ref().err().map(Problem::of);
        if !matches!(problem, Some(Problem::Away(_) | Problem::Busy(_)))
            && let Some(health) = self.repository.request_policy().health()
        {
            health.worked();
        }
        answer
    }

    /// Returns whether the registry has answered any question since `then`.
    pub(crate) fn has_heard_since(&self, then: Instant) -> bool {
        let policy = self.repository.request_policy();
        policy.health().is_some_and(|health| health.has_worked_since(then))
    }

    /// How registries are reached for this client.
    pub(crate) fn options(&self) -> &Options {
        &self.options
    }

    /// Notes that the registry asks for a pause.
    pub(crate) fn pause_for(&self, pause: Duration) {
        self.lock().paused_until = Some(Instant::now() + pause.min(LONGEST_RETRY));
    }

    /// Remaining time of the pause that the registry asked for.
    pub(crate) fn busy_for(&self) -> Option<Duration> {
        let left = self.lock().paused_until?.saturating_duration_since(Instant::now());
        (!left.is_zero()).then_some(left)
    }

    /// Remembers the sizes of blobs that a manifest lists.
    pub(crate) fn record_sizes(&self, sizes: impl Iterator<Item = (Digest, u64)>) {
        let known = &mut self.lock().sizes;
        for (digest, size) in sizes {
            if known.len() < SIZES {
                known.insert(digest, size);
            }
        }
    }

    /// The size of a blob, if a manifest told.
    pub(crate) fn size(&self, digest: &Digest) -> Option<u64> {
        self.lock().sizes.get(digest).copied()
    }

    /// Records that a source sent wrong bytes for a blob.
    pub(crate) fn record_wrong_bytes(&self, digest: &Digest) {
        let mut state = self.lock();
        state.wrong.retain(|_, when| when.elapsed() < WRONG_BYTES_BACKOFF);
        state.wrong.insert(*digest, Instant::now());
        // The recorded size may be what was wrong.
        state.sizes.remove(digest);
    }

    /// Returns whether wrong bytes came for a blob a moment ago.
    pub(crate) fn is_wrong(&self, digest: &Digest) -> bool {
        self.lock().wrong.get(digest).is_some_and(|when| when.elapsed() < WRONG_BYTES_BACKOFF)
    }

    fn lock(&self) -> MutexGuard<'_, SessionState> {
        // No panic can leave the state half changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The sessions of a node.
#[derive(Debug)]
pub(crate) struct Sessions {
    node: Options,
    known: Mutex<HashMap<Key, Arc<Session>>>,
    /// Anonymous sessions that the registry refused, and when. They outlast the session.
    refused: Mutex<HashMap<Key, Instant>>,
}

impl Sessions {
    pub(crate) fn new(node: Options) -> Self {
        Sessions { node, known: Mutex::default(), refused: Mutex::default() }
    }

    /// The registry refused a client.
    pub(crate) fn refuse(&self, session: &Session) {
        if session.login.is_some() {
            return;
        }
        let mut refused = self.refused.lock().unwrap_or_else(PoisonError::into_inner);
        if refused.len() >= MOST_REFUSED {
            refused.retain(|_, when| when.elapsed() < REFUSED);
        }
        if refused.len() < MOST_REFUSED {
            refused.insert(session.key.clone(), Instant::now());
        }
    }

    /// Returns whether the registry refused this session lately. Only sessions without a login are
    /// remembered.
    pub(crate) fn refuses(&self, session: &Session) -> bool {
        let refused = self.refused.lock().unwrap_or_else(PoisonError::into_inner);
        refused.get(&session.key).is_some_and(|when| when.elapsed() < REFUSED)
    }

    /// The session of a client with `login` at the repository of `reference`.
    pub(crate) fn get(
        &self,
        reference: &Reference,
        login: Option<Login>,
        seal: &Seal,
    ) -> Result<Arc<Session>, RegistryError> {
        let key = key(reference, login.as_ref(), seal);
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(session) = known.get(&key) {
            session.lock().used = Instant::now();
            return Ok(session.clone());
        }
        known.retain(|_, session| session.lock().used.elapsed() < IDLE);
        if known.len() >= MOST {
            let oldest = known.values().min_by_key(|session| session.lock().used);
            if let Some(oldest) = oldest.map(|session| session.key.clone()) {
                known.remove(&oldest);
            }
        }
        let session = Arc::new(Session::open(key.clone(), reference, login, &self.node)?);
        known.insert(key, session.clone());
        Ok(session)
    }
}

/// The key of a session.
fn key(reference: &Reference, login: Option<&Login>, seal: &Seal) -> Key {
    let login = login.map(|login| serde_json::to_vec(login).unwrap_or_default());
    let (registry, repository) = (reference.registry(), reference.repository());
    let is_known: &[u8] = if login.is_some() { b"1" } else { b"0" };
    seal.name(&[registry.as_bytes(), repository.as_bytes(), is_known, &login.unwrap_or_default()])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::seal::SECRET;

    #[tokio::test(start_paused = true)]
    async fn a_session_is_for_one_repository_and_one_login() {
        let (sessions, seal) =
            (Sessions::new(Options::default()), Seal::new(&[1; SECRET]).unwrap());
        let get = |image: &str, login: Option<Login>| {
            sessions.get(&image.parse().unwrap(), login, &seal).unwrap()
        };
        let ann = || Some(Login::new("ann", "pass-of-ann"));
        let first = get("r.example/a:1", ann());
        assert!(Arc::ptr_eq(&first, &get("r.example/a:2", ann())));
        for other in [
            get("r.example/a:1", None),
            get("r.example/a:1", Some(Login::new("ann", "2"))),
            get("r.example/b:1", ann()),
            get("s.example/a:1", ann()),
        ] {
            assert!(!Arc::ptr_eq(&first, &other));
            assert_ne!(first.key, other.key);
        }
        assert!(!format!("{first:?}").contains("pass-of"), "{first:?}");
        tokio::time::advance(IDLE).await;
        get("r.example/c:1", None);
        assert_eq!(sessions.known.lock().unwrap().len(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_refused_login_stays_refused_after_its_session_ended() {
        let (sessions, seal) =
            (Sessions::new(Options::default()), Seal::new(&[1; SECRET]).unwrap());
        let get = |image: &str, login: Option<Login>| {
            sessions.get(&image.parse().unwrap(), login, &seal).unwrap()
        };
        sessions.refuse(&get("r.example/a:1", None));
        sessions.refuse(&get("r.example/b:1", Some(Login::new("ann", "1"))));
        tokio::time::advance(IDLE).await;
        assert!(sessions.refuses(&get("r.example/a:2", None)));
        for (image, login) in [
            ("r.example/a:1", Some(Login::new("ann", "1"))),
            ("r.example/b:1", Some(Login::new("ann", "1"))),
            ("r.example/b:1", None),
        ] {
            assert!(!sessions.refuses(&get(image, login)), "{image}");
        }
        tokio::time::advance(REFUSED).await;
        assert!(!sessions.refuses(&get("r.example/a:1", None)));
    }

    #[tokio::test(start_paused = true)]
    async fn the_node_has_no_credentials_for_clients() {
        let node =
            Options { credential_files: vec!["/etc/config.json".into()], ..Options::default() };
        node.keyring.set(
            "a mount",
            &"r.example/a:1".parse().unwrap(),
            Login::new("node", "secret"),
        );
        let (sessions, seal) = (Sessions::new(node), Seal::new(&[1; SECRET]).unwrap());
        let session = sessions.get(&"r.example/a:1".parse().unwrap(), None, &seal).unwrap();
        assert!(session.options.credential_files.is_empty());
        assert_eq!(format!("{:?}", session.options.keyring), "Keyring(0 logins)");
    }
}
