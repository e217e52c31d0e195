//! Answers that several questions share, while they are fetched and for some seconds afterwards.
//!
//! containerd asks for a manifest several times during one pull, and the mirror asks for what comes
//! next before containerd does. Each is one request to the registry. Waiters share a failure, which
//! is not kept.

use std::{
    collections::HashMap,
    hash::Hash,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use futures_util::{
    FutureExt as _,
    future::{BoxFuture, Shared},
};
use lazuli_registry::RegistryError;
use tokio::time::Instant;

/// A registry's failure, shared by its waiters.
pub(crate) type Failure = Arc<RegistryError>;

/// A shared answer, complete or in flight.
pub(crate) type Coming<V> = Shared<BoxFuture<'static, Result<V, Failure>>>;

/// Whether an answer was known, or in flight, when it was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lookup {
    Hit,
    Miss,
}

/// An answer that was asked for.
pub(crate) struct Asked<V> {
    pub(crate) answer: Coming<V>,
    pub(crate) lookup: Lookup,
}

/// Answers by key. Complete answers take at most `limit` bytes.
pub(crate) struct Answers<K, V> {
    limit: usize,
    state: Mutex<KnownAnswers<K, V>>,
}

struct KnownAnswers<K, V> {
    known: HashMap<K, Known<V>>,
    bytes: usize,
    numbers: u64,
}

struct Known<V> {
    coming: Coming<V>,
    number: u64,
    /// When it came, its bytes, and until when it is good.
    came: Option<(usize, Instant)>,
}

impl<K, V> Answers<K, V>
where
    K: Clone + Eq + Hash + Send + 'static,
    V: Clone + Send + Sync + 'static,
{
    pub(crate) fn new(limit: usize) -> Arc<Self> {
        let state = KnownAnswers { known: HashMap::new(), bytes: 0, numbers: 0 };
        Arc::new(Answers { limit, state: Mutex::new(state) })
    }

    /// Returns the answer to `key`. On a miss, `ask` starts now, and continues even if this future
    /// is dropped. It also returns the size of the answer in bytes and how long to keep it.
    pub(crate) fn get<F>(self: &Arc<Self>, key: K, ask: impl FnOnce() -> F) -> Asked<V>
    where
        F: Future<Output = Result<(V, usize, Duration), RegistryError>> + Send + 'static,
    {
        let now = Instant::now();
        let mut state = self.lock();
        state.forget(|known| known.came.is_some_and(|(_, until)| until <= now));
        if let Some(known) = state.known.get(&key) {
            return Asked { answer: known.coming.clone(), lookup: Lookup::Hit };
        }
        state.numbers += 1;
        let number = state.numbers;
        let (answers, at, asked) = (self.clone(), key.clone(), ask());
        let task = tokio::spawn(async move {
            let answer = asked.await;
            answers.settle(
                &at,
                number,
                answer.as_ref().ok().map(|(_, bytes, life)| (*bytes, *life)),
            );
            answer.map(|(value, ..)| value).map_err(Arc::new)
        });
        let coming = async move { task.await.unwrap_or_else(|error| Err(ended(&error))) };
        let coming = coming.boxed().shared();
        state.known.insert(key, Known { coming: coming.clone(), number, came: None });
        Asked { answer: coming, lookup: Lookup::Miss }
    }

    /// Records that an answer arrived, or that its request failed.
    fn settle(&self, key: &K, number: u64, came: Option<(usize, Duration)>) {
        let mut state = self.lock();
        match (state.known.get_mut(key).filter(|known| known.number == number), came) {
            (Some(known), Some((bytes, life))) => {
                known.came = Some((bytes, Instant::now() + life));
                state.bytes += bytes;
            }
            (Some(_), None) => {
                state.known.remove(key);
            }
            (None, _) => {}
        }
        while state.bytes > self.limit {
            let oldest = state.known.values().filter(|known| known.came.is_some());
            let Some(oldest) = oldest.map(|known| known.number).min() else { break };
            state.forget(|known| known.number == oldest);
        }
    }

    fn lock(&self) -> MutexGuard<'_, KnownAnswers<K, V>> {
        // No panic can leave the state half changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<K, V> KnownAnswers<K, V> {
    fn forget(&mut self, which: impl Fn(&Known<V>) -> bool) {
        let mut freed = 0;
        self.known.retain(|_, known| {
            let goes = which(known);
            freed += known.came.filter(|_| goes).map_or(0, |(bytes, _)| bytes);
            !goes
        });
        self.bytes -= freed;
    }
}

fn ended(error: &tokio::task::JoinError) -> Failure {
    Arc::new(RegistryError::Interrupted {
        place: "the mirror".to_owned(),
        object: "an answer".to_owned(),
        cause: error.to_string(),
    })
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    const LIFE: Duration = Duration::from_secs(5);

    fn missing() -> RegistryError {
        RegistryError::Missing { place: "p".to_owned(), object: "o".to_owned() }
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_is_shared_while_it_comes_and_for_its_lifetime() {
        let (answers, asked) = (Answers::new(100), Arc::new(AtomicUsize::new(0)));
        let get = || {
            let asked = asked.clone();
            answers.get("a", || async move {
                asked.fetch_add(1, Ordering::Relaxed);
                tokio::time::sleep(Duration::from_secs(1)).await;
                Ok((7, 10, LIFE))
            })
        };
        let (one, two) = (get(), get());
        assert_eq!((one.lookup, two.lookup), (Lookup::Miss, Lookup::Hit));
        let (one, two) = tokio::join!(one.answer, two.answer);
        assert_eq!((one.unwrap(), two.unwrap()), (7, 7));
        tokio::time::advance(LIFE / 2).await;
        assert_eq!(get().answer.await.unwrap(), 7);
        assert_eq!(asked.load(Ordering::Relaxed), 1);
        tokio::time::advance(LIFE).await;
        assert_eq!(get().answer.await.unwrap(), 7);
        assert_eq!(asked.load(Ordering::Relaxed), 2);
        assert_eq!(answers.lock().bytes, 10);
    }

    #[tokio::test]
    async fn a_failure_is_shared_and_not_kept() {
        let answers: Arc<Answers<&str, u8>> = Answers::new(100);
        let (one, two) = (
            answers.get("a", || async { Err(missing()) }).answer,
            answers.get("a", || async { Err(missing()) }).answer,
        );
        assert!(one.await.is_err() && two.await.is_err());
        assert!(answers.lock().known.is_empty());
        let again = answers.get("a", || async { Ok((1, 1, LIFE)) }).answer;
        assert_eq!(again.await.unwrap(), 1);
    }

    #[tokio::test]
    async fn an_abandoned_request_is_still_answered_for_others() {
        let answers = Answers::new(100);
        drop(answers.get("a", || async { Ok((1, 1, LIFE)) }));
        let again = answers.get("a", || async { Ok((2, 1, LIFE)) });
        assert_eq!((again.answer.await.unwrap(), again.lookup), (1, Lookup::Hit));
    }

    #[tokio::test]
    async fn the_oldest_answers_go_when_there_is_no_room() {
        let answers = Answers::new(100);
        for key in 0..4 {
            answers.get(key, || async move { Ok((key, 40, LIFE)) }).answer.await.unwrap();
        }
        let state = answers.lock();
        let mut left: Vec<_> = state.known.keys().copied().collect();
        left.sort_unstable();
        assert_eq!((left, state.bytes), (vec![2, 3], 80));
    }
}
