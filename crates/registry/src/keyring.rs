//! Logins that came with images, and who is logged in where.

use std::{
    collections::HashMap,
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
};

use crate::{
    auth::Login,
    name::{ImageName, Reference},
    server::Server,
    token::Authorizer,
};

/// Logins for one repository that are tried, at most: each one costs a request when they are refused.
const TRIED: usize = 4;

/// Logins beside those in files, each for one repository of a registry, and the tokens that were got for them. Clones are
/// the same collection.
#[derive(Clone, Default)]
pub struct Keyring(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    /// The newest last.
    logins: Vec<Owned>,
    /// Grows with each change.
    generation: u64,
    /// By server and repository: who reads several images of one repository needs one token.
    authorizers: HashMap<String, Weak<Authorizer>>,
}

struct Owned {
    owner: String,
    repository: String,
    login: Login,
}

impl Keyring {
    /// Uses `login` for the repository of `image` first, until there is a newer one or it is [removed](Keyring::remove).
    /// What `owner` had before is forgotten. Images in directories need no login.
    pub fn set(&self, owner: &str, image: &ImageName, login: Login) {
        let ImageName::Registry(reference) = image else { return };
        let mut state = self.lock();
        state.logins.retain(|known| known.owner != owner);
        let (owner, repository) = (owner.to_owned(), repository(reference));
        state.logins.push(Owned { owner, repository, login });
        state.generation += 1;
    }

    /// Forgets the login of `owner`.
    pub fn remove(&self, owner: &str) {
        self.lock().logins.retain(|known| known.owner != owner);
    }

    /// Those for a repository, the newest first, without repetitions.
    pub(crate) fn logins(&self, reference: &Reference) -> Vec<Login> {
        let repository = repository(reference);
        let mut found: Vec<Login> = Vec::new();
        let state = self.lock();
        for owned in state.logins.iter().rev().filter(|owned| owned.repository == repository) {
            if found.len() < TRIED && !found.contains(&owned.login) {
                found.push(owned.login.clone());
            }
        }
        found
    }

    /// Another number whenever there may be something new.
    pub(crate) fn generation(&self) -> u64 {
        self.lock().generation
    }

    /// The one for a repository at a server, made by `make` if there is none.
    pub(crate) fn authorizer(
        &self,
        server: &Server,
        reference: &Reference,
        make: impl FnOnce() -> Authorizer,
    ) -> Arc<Authorizer> {
        let key = format!("{} {}", server.root, repository(reference));
        let mut state = self.lock();
        if let Some(known) = state.authorizers.get(&key).and_then(Weak::upgrade) {
            return known;
        }
        state.authorizers.retain(|_, known| known.strong_count() > 0);
        let authorizer = Arc::new(make());
        state.authorizers.insert(key, Arc::downgrade(&authorizer));
        authorizer
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // No panic can leave the state half changed.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Keyring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Keyring({} logins)", self.lock().logins.len())
    }
}

fn repository(reference: &Reference) -> String {
    format!("{}/{}", reference.registry(), reference.repository())
}
