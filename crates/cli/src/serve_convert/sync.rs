//! Repositories that follow those of other registries.
//!
//! ```text
//! from, every so often: list of tags ─▶ queue: one job for each tag of `to` ─▶ work
//! ```
//!
//! The queue only has the names of tags here. A job looks up where its tag comes from, and copies
//! it if the source names something else.

use std::{sync::Arc, time::Duration};

use anyhow::{Result, anyhow};
use lazuli_image::Digest;
use lazuli_registry::{
    ImageName, Options, Parsed, Reference, RegistryError, Repository, is_beside_image,
};
use tokio::{sync::watch, time::sleep};

use super::{
    leaves,
    queue::{Queue, Refused},
    repositories::fits,
};

/// Most tags that are listed of a repository.
const TAGS: usize = 10_000;

/// Jobs that are due from which on no more are added: the rest of the queue is for events.
const JOBS: usize = 1000;

/// Pause until the queue is looked at again.
const ROOM: Duration = Duration::from_secs(1);

/// Longest pause after a list could not be fetched.
const PAUSE: Duration = Duration::from_secs(600);

/// A repository of the server's registry that follows another one.
#[derive(Clone, Debug)]
pub(crate) struct RepositorySync {
    /// The other one, with its registry.
    pub(crate) from: String,
    /// Without its registry.
    pub(crate) to: String,
    /// Patterns of tags, with `*` for any letters.
    pub(crate) tags: Vec<String>,
    pub(crate) every: Duration,
}

impl RepositorySync {
    /// The image that one of the server's registry is a copy of.
    pub(super) fn source_of(&self, image: &Reference) -> Option<String> {
        let tag = image.tag()?;
        (image.repository() == self.to && self.has(tag)).then(|| format!("{}:{tag}", self.from))
    }

    pub(super) fn has(&self, tag: &str) -> bool {
        self.tags.iter().any(|pattern| fits(pattern, tag))
    }

    /// Adds jobs for its tags, again and again, until the server leaves.
    pub(super) async fn follow(
        self,
        registry: String,
        queue: Arc<Queue>,
        access: Options,
        mut leaving: watch::Receiver<bool>,
    ) {
        loop {
            let pause = tokio::select! {
                added = self.add(&registry, &queue, &access) => match added {
                    Ok(()) => self.every,
                    Err(error) => {
                        let (from, error) = (&self.from, format!("{error:#}"));
                        tracing::warn!(from, error, "its tags are not followed now");
                        self.every.min(PAUSE)
                    }
                },
                () = leaves(&mut leaving) => return,
            };
            tokio::select! {
                () = sleep(pause) => {}
                () = leaves(&mut leaving) => return,
            }
        }
    }

    async fn add(&self, registry: &str, queue: &Arc<Queue>, access: &Options) -> Result<()> {
        for tag in self.tags(access).await? {
            let Ok(image) = format!("{registry}/{}:{tag}", self.to).parse::<Reference>() else {
                tracing::warn!(from = self.from, tag, "left out: not a name of a tag");
                continue;
            };
            while queue.due() >= JOBS {
                sleep(ROOM).await;
            }
            let queue = queue.clone();
            let added = tokio::task::spawn_blocking(move || queue.add(&image)).await?;
            added.map_err(|refused| match refused {
                Refused::Full => anyhow!("there are too many jobs"),
                Refused::Disk(error) => error,
            })?;
        }
        Ok(())
    }

    /// The tags that are named, and those that the registry lists and a pattern has.
    async fn tags(&self, access: &Options) -> Result<Vec<String>> {
        let (patterns, mut tags): (Vec<_>, Vec<_>) =
            self.tags.iter().cloned().partition(|tag| tag.contains('*'));
        if patterns.is_empty() {
            return Ok(tags);
        }
        let source: ImageName = self.from.parse()?;
        let mut listed = lazuli_registry::open(&source, access)?.tags(TAGS).await?;
        listed.retain(|tag| self.has(tag) && !tags.contains(tag) && !is_beside_image(tag));
        tags.extend(listed);
        Ok(tags)
    }
}

/// What a tag has to be replaced by.
///
/// # Errors
/// One of the registries cannot be asked.
pub(super) async fn newer(
    source: &dyn Repository,
    target: &dyn Repository,
) -> Result<Option<Digest>, RegistryError> {
    let wanted = match source.digest().await {
        Ok(digest) => digest,
        // A tag that the source has lost stays here.
        Err(error) if error.is_missing() => return Ok(None),
        Err(error) => return Err(error),
    };
    let found = match target.document(None).await {
        Ok(document) => document,
        Err(error) if error.is_missing() => return Ok(Some(wanted)),
        Err(error) => return Err(error),
    };
    let has_it = found.digest == wanted
        || match found.parse(&target.describe())? {
            // Both forms under one tag.
            Parsed::Index(_, entries) => entries.iter().any(|entry| entry.digest == wanted),
            Parsed::Image(_) => false,
        };
    Ok((!has_it).then_some(wanted))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tag_has_its_source_if_a_pattern_has_it() {
        let sync = RepositorySync {
            from: "r.example/a/redis".into(),
            to: "b/redis".into(),
            tags: vec!["7.*".into(), "latest".into()],
            every: Duration::from_secs(60),
        };
        for (image, source) in [
            ("s.example/b/redis:7.2", Some("r.example/a/redis:7.2")),
            ("s.example/b/redis:latest", Some("r.example/a/redis:latest")),
            ("s.example/b/redis:8.0", None),
            ("s.example/b/redis-x:7.2", None),
        ] {
            let found = sync.source_of(&image.parse().unwrap());
            assert_eq!(found.as_deref(), source, "{image}");
        }
    }
}
