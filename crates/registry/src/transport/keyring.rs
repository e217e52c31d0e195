//! The logins of a node, and the tokens that they got.

use std::{
    collections::HashMap,
    fmt,
    sync::{Arc, Mutex, PoisonError, Weak},
};

use crate::{
    name::{ImageName, Reference},
    route::server::Server,
    transport::{
        credentials::Login,
        logins::{self, Logins},
        token::Authorizer,
    },
};

/// Logins beside those in files, each for one repository of a registry, and the tokens that they
/// got. Clones share one collection.
#[derive(Clone, Default)]
pub struct Keyring {
    logins: Logins,
    /// By server and repository: several images of one repository need one token.
    authorizers: Arc<Mutex<HashMap<String, Weak<Authorizer>>>>,
}

impl Keyring {
    /// Uses `login` for the repository of `image` first, until there is a newer one or it is
    /// [removed](Keyring::remove). Forgets the earlier login of `owner`. Images in directories need
    /// no login.
    pub fn set(&self, owner: &str, image: &ImageName, login: Login) {
        self.logins.set(owner, image, login);
    }

    /// The login of `owner`.
    pub fn held_by(&self, owner: &str) -> Option<Login> {
        self.logins.held_by(owner)
    }

    /// Forgets the login of `owner`.
    pub fn remove(&self, owner: &str) {
        self.logins.remove(owner);
    }

    /// The logins alone.
    pub(crate) fn logins(&self) -> &Logins {
        &self.logins
    }

    /// The authorizer for a repository at a server; `make` makes it on the first call.
    pub(crate) fn authorizer(
        &self,
        server: &Server,
        reference: &Reference,
        make: impl FnOnce() -> Authorizer,
    ) -> Arc<Authorizer> {
        let key = format!("{} {}", server.root, logins::repository(reference));
        // No panic can leave the map half changed.
        let mut authorizers = self.authorizers.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = authorizers.get(&key).and_then(Weak::upgrade) {
            return known;
        }
        authorizers.retain(|_, known| known.strong_count() > 0);
        let authorizer = Arc::new(make());
        authorizers.insert(key, Arc::downgrade(&authorizer));
        authorizer
    }
}

impl fmt::Debug for Keyring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Keyring({:?})", self.logins)
    }
}
