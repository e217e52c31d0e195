//! Images whose blobs were found in their registry during verification.

use std::{sync::Mutex, time::Duration};

use lazuli_registry::Login;
use tokio::time::Instant;

use crate::sync::lock;

/// How long a result counts: containerd creates the container at most this much later, or asks
/// again.
const AGE: Duration = Duration::from_secs(30);

/// An image by its name with a digest, the login that was used, and when.
type Entry = (String, Option<Login>, Instant);

/// What was found with a login counts for this login only.
#[derive(Debug, Default)]
pub(in crate::daemon) struct Checked(Mutex<Vec<Entry>>);

impl Checked {
    /// Notes that all blobs of `image` were found with `login`.
    pub(in crate::daemon) fn insert(&self, image: &str, login: Option<&Login>) {
        let mut entries = lock(&self.0);
        entries.retain(|(.., since)| since.elapsed() < AGE);
        entries.push((image.to_owned(), login.cloned(), Instant::now()));
    }

    /// Returns whether all blobs of `image` were just found with `login`. Each result counts once:
    /// a later pull looks again.
    pub(in crate::daemon) fn take(&self, image: &str, login: Option<&Login>) -> bool {
        let mut entries = lock(&self.0);
        entries.retain(|(.., since)| since.elapsed() < AGE);
        let found =
            entries.iter().position(|(name, with, _)| name == image && with.as_ref() == login);
        found.map(|at| entries.swap_remove(at)).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_result_counts_once_for_its_login_and_half_a_minute() {
        let [one, other] = ["one", "other"].map(|user| Login::new(user, "x"));
        let checked = Checked::default();
        checked.insert("r.example/a@sha256:1", Some(&one));
        assert!(!checked.take("r.example/a@sha256:1", Some(&other)));
        assert!(!checked.take("r.example/a@sha256:1", None));
        assert!(!checked.take("r.example/b@sha256:1", Some(&one)));
        assert!(checked.take("r.example/a@sha256:1", Some(&one)));
        assert!(!checked.take("r.example/a@sha256:1", Some(&one)));
        checked.insert("r.example/a@sha256:1", Some(&one));
        tokio::time::advance(AGE).await;
        assert!(!checked.take("r.example/a@sha256:1", Some(&one)));
    }
}
