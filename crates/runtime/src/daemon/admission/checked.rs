//! Images whose blobs are looked for in their registry during verification.

use std::{sync::Mutex, time::Duration};

use lazuli_registry::Login;
use tokio::{sync::oneshot, time::Instant};

use crate::sync::lock;

/// How long a result counts: containerd creates the container at most this much later, or asks
/// again.
const AGE: Duration = Duration::from_secs(30);

/// A search for all blobs of an image.
#[derive(Debug)]
struct Search {
    /// By its name with a digest.
    image: String,
    /// What is found with a login counts for this login only.
    login: Option<Login>,
    began: Instant,
    found: oneshot::Receiver<()>,
}

impl Search {
    fn is_recent(&self) -> bool {
        self.began.elapsed() < AGE
    }

    fn is_for(&self, image: &str, login: Option<&Login>) -> bool {
        self.image == image && self.login.as_ref() == login
    }
}

/// Each search counts for one mount: a later pull looks again.
#[derive(Debug, Default)]
pub(in crate::daemon) struct Checked(Mutex<Vec<Search>>);

impl Checked {
    /// Notes that the blobs of `image` are looked for with `login`. The caller sends a message when
    /// all are found, and drops the sender if they aren't. containerd may ask for each layer of an
    /// image before it asks for the mount: the last search counts, and nothing is left for a later
    /// pull.
    pub(in crate::daemon) fn begin(
        &self,
        image: &str,
        login: Option<&Login>,
    ) -> oneshot::Sender<()> {
        let (tell, found) = oneshot::channel();
        let (image, login) = (image.to_owned(), login.cloned());
        let mut searches = lock(&self.0);
        searches.retain(|it| it.is_recent() && !it.is_for(&image, login.as_ref()));
        searches.push(Search { image, login, began: Instant::now(), found });
        tell
    }

    /// Waits for a search for the blobs of `image` with `login`, if there is one. Returns whether
    /// it found all of them.
    pub(in crate::daemon) async fn take(&self, image: &str, login: Option<&Login>) -> bool {
        let search = {
            let mut searches = lock(&self.0);
            searches.retain(Search::is_recent);
            let at = searches.iter().position(|search| search.is_for(image, login));
            at.map(|at| searches.swap_remove(at))
        };
        match search {
            Some(search) => search.found.await.is_ok(),
            None => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const IMAGE: &str = "r.example/a@sha256:1";

    #[tokio::test(start_paused = true)]
    async fn a_result_counts_once_for_its_login_and_half_a_minute() {
        let [one, other] = ["one", "other"].map(|user| Login::new(user, "x"));
        let checked = Checked::default();
        checked.begin(IMAGE, Some(&one)).send(()).unwrap();
        assert!(!checked.take(IMAGE, Some(&other)).await);
        assert!(!checked.take(IMAGE, None).await);
        assert!(!checked.take("r.example/b@sha256:1", Some(&one)).await);
        assert!(checked.take(IMAGE, Some(&one)).await);
        assert!(!checked.take(IMAGE, Some(&one)).await);
        checked.begin(IMAGE, Some(&one)).send(()).unwrap();
        tokio::time::advance(AGE).await;
        assert!(!checked.take(IMAGE, Some(&one)).await);
    }

    #[tokio::test]
    async fn searches_for_each_layer_leave_nothing_for_the_next_pull() {
        let checked = Checked::default();
        checked.begin(IMAGE, None).send(()).unwrap();
        checked.begin(IMAGE, None).send(()).unwrap();
        assert!(checked.take(IMAGE, None).await);
        assert!(!checked.take(IMAGE, None).await);
    }

    #[tokio::test]
    async fn a_search_that_has_not_ended_is_waited_for() {
        let checked = Checked::default();
        for found in [true, false] {
            let tell = checked.begin(IMAGE, None);
            let later = async {
                tokio::task::yield_now().await;
                if found {
                    tell.send(()).unwrap();
                } else {
                    drop(tell);
                }
            };
            assert_eq!(tokio::join!(checked.take(IMAGE, None), later).0, found);
            assert!(!checked.take(IMAGE, None).await);
        }
    }
}
