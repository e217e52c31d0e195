//! The logins of pulls, for the node's own reads of these images.

use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use lazuli_registry::{Login, Reference};
use tokio::time::Instant;

/// Time limit for containerd from an image's manifest to its snapshots: it may download other
/// layers in between.
const LIFE: Duration = Duration::from_secs(900);

/// PullLogins that are remembered.
const MOST: usize = 4096;

/// Logins by the image that they were shown for, which has a digest.
#[derive(Debug, Default)]
pub(crate) struct PullLogins(Mutex<HashMap<String, (Login, Instant)>>);

impl PullLogins {
    /// A client with this login was answered with the manifest of `image`.
    pub(crate) fn record_login(&self, image: &Reference, login: Login) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if known.len() >= MOST {
            known.retain(|_, (_, since)| since.elapsed() < LIFE);
        }
        if known.len() >= MOST {
            let oldest = known.iter().min_by_key(|(_, (_, since))| *since);
            if let Some(oldest) = oldest.map(|(image, _)| image.clone()) {
                known.remove(&oldest);
            }
        }
        known.insert(key(image), (login, Instant::now()));
    }

    /// The login that the newest pull of `image` had, if it had one.
    pub(crate) fn login(&self, image: &Reference) -> Option<Login> {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (login, since) = known.get(&key(image))?;
        (since.elapsed() < LIFE).then(|| login.clone())
    }
}

/// Whatever tag an image was pulled under.
fn key(image: &Reference) -> String {
    format!("{}/{}@{}", image.registry(), image.repository(), image.selector())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(name: &str, digit: usize) -> Reference {
        format!("{name}@sha256:{digit:064x}").parse().unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn a_login_is_for_one_image_and_for_some_time() {
        let pulls = PullLogins::default();
        pulls.record_login(&image("r.example/a:1", 1), Login::new("ann", "1"));
        pulls.record_login(&image("r.example/a:1", 1), Login::new("bob", "2"));
        let found = |name: &str, digit| pulls.login(&image(name, digit));
        assert_eq!(found("r.example/a:2", 1), Some(Login::new("bob", "2")));
        assert_eq!(found("r.example/a:1", 2), None);
        assert_eq!(found("r.example/b:1", 1), None);
        tokio::time::advance(LIFE).await;
        assert_eq!(found("r.example/a:1", 1), None);
    }

    #[tokio::test(start_paused = true)]
    async fn the_oldest_pull_is_forgotten_first() {
        let pulls = PullLogins::default();
        for digit in 0..=MOST {
            pulls.record_login(&image("r.example/a", digit), Login::new("ann", "1"));
            tokio::time::advance(Duration::from_millis(1)).await;
        }
        assert_eq!(pulls.login(&image("r.example/a", 0)), None);
        assert!(pulls.login(&image("r.example/a", 1)).is_some());
        assert_eq!(pulls.0.lock().unwrap().len(), MOST);
    }
}
