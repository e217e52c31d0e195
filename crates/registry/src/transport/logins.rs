//! Logins that came with images.

use std::{
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use crate::{
    name::{ImageName, Reference},
    transport::credentials::Login,
};

/// Maximum number of logins tried for one repository: each refused login costs a request.
const TRIED: usize = 4;

/// Logins beside those in files, each for one repository of a registry. Clones share one
/// collection.
#[derive(Clone, Default)]
pub(crate) struct Logins(Arc<Mutex<LoginList>>);

#[derive(Default)]
struct LoginList {
    /// The newest last.
    logins: Vec<Owned>,
    /// Grows with each change.
    generation: u64,
}

struct Owned {
    owner: String,
    repository: String,
    login: Login,
}

impl Logins {
    /// Tries `login` first for the repository of `image`, until there is a newer one or it is
    /// [removed](Logins::remove). Replaces an earlier login of `owner`. Images in directories need
    /// no login.
    pub(crate) fn set(&self, owner: &str, image: &ImageName, login: Login) {
        let ImageName::Registry(reference) = image else { return };
        let mut state = self.lock();
        state.logins.retain(|known| known.owner != owner);
        let (owner, repository) = (owner.to_owned(), repository(reference));
        state.logins.push(Owned { owner, repository, login });
        state.generation += 1;
    }

    /// The login of `owner`.
    pub(crate) fn held_by(&self, owner: &str) -> Option<Login> {
        let state = self.lock();
        state.logins.iter().find(|known| known.owner == owner).map(|known| known.login.clone())
    }

    /// Forgets the login of `owner`.
    pub(crate) fn remove(&self, owner: &str) {
        self.lock().logins.retain(|known| known.owner != owner);
    }

    /// Those for a repository, the newest first, without repetitions.
    pub(crate) fn of(&self, reference: &Reference) -> Vec<Login> {
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

    fn lock(&self) -> MutexGuard<'_, LoginList> {
        // No panic can leave the state half changed.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Logins {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} logins", self.lock().logins.len())
    }
}

pub(crate) fn repository(reference: &Reference) -> String {
    format!("{}/{}", reference.registry(), reference.repository())
}
