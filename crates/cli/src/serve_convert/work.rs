//! Works on jobs.

use std::sync::Arc;

use anyhow::{Context as _, Result, bail};
use lazuli_registry::{ImageName, Options, Reference, Repository, Selector};
use tokio::{sync::watch, time::timeout};

use super::{
    Form, Settings,
    child::{self, Ended},
    deleted,
    lacking::{self, Lacking},
    leaves,
    queue::{Queue, Taken},
    sync,
};
use crate::{Session, daemon::Template};

/// Attempts within which a tag has to name what the event says. CNCF distribution sends the event
/// before it writes the tag; later, the tag has moved on.
const SETTLING: u32 = 3;

/// Works on the jobs of a queue.
#[derive(Debug)]
pub(super) struct Worker {
    settings: Arc<Settings>,
    queue: Arc<Queue>,
    /// How the registry is reached.
    access: Options,
    program: Template,
}

impl Worker {
    pub(super) fn new(
        session: &Session,
        settings: Arc<Settings>,
        queue: Arc<Queue>,
        access: Options,
    ) -> Self {
        Worker { settings, queue, access, program: Template::new(session) }
    }

    /// Does one job after another until the server leaves.
    pub(super) async fn run(self: Arc<Self>, mut leaving: watch::Receiver<bool>) {
        loop {
            let taken = tokio::select! {
                biased;
                () = leaves(&mut leaving) => return,
                taken = self.queue.next() => taken,
            };
            let Some(outcome) = self.work(&taken, leaving.clone()).await.transpose() else {
                return;
            };
            let queue = self.queue.clone();
            let noting = tokio::task::spawn_blocking(move || match outcome {
                Ok(()) => queue.done(&taken),
                Err(error) => queue.failed(&taken, format!("{error:#}")),
            });
            if let Err(error) = noting.await {
                tracing::error!(%error, "the end of a job is not noted");
            }
        }
    }

    /// Returns nothing if the server leaves.
    async fn work(&self, taken: &Taken, leaving: watch::Receiver<bool>) -> Result<Option<()>> {
        let image = &taken.image;
        // The configuration may have changed since the job was added.
        if !self.settings.has(image) {
            tracing::info!(%image, "dropped: not in convert.repositories any more");
            return Ok(Some(()));
        }
        let name = ImageName::Registry(image.clone());
        match image.tag().and_then(|tag| name.tagged(tag)) {
            Some(tagged) => self.make_lazy(taken, &tagged, leaving).await,
            None => self.clean_up(image, leaving).await,
        }
    }

    async fn clean_up(
        &self,
        image: &Reference,
        mut leaving: watch::Receiver<bool>,
    ) -> Result<Option<()>> {
        let Selector::Digest(digest) = image.selector() else { return Ok(Some(())) };
        let repository = lazuli_registry::open(&ImageName::Registry(image.clone()), &self.access)?;
        let cleaning = timeout(self.settings.deadline, deleted::clean_up(&*repository, &digest));
        let count = tokio::select! {
            count = cleaning => count.context("the registry does not answer")??,
            () = leaves(&mut leaving) => return Ok(None),
        };
        if count > 0 {
            tracing::info!(%image, count, "its indexes are deleted");
        }
        Ok(Some(()))
    }

    async fn make_lazy(
        &self,
        taken: &Taken,
        image: &ImageName,
        mut leaving: watch::Receiver<bool>,
    ) -> Result<Option<()>> {
        let Settings { form, sign, deadline, .. } = &*self.settings;
        let repository = lazuli_registry::open(image, &self.access)?;
        // What is here is made lazy also while its source is away.
        let followed = self.follow(taken, image, &*repository, leaving.clone()).await;
        if let Ok(None) = followed {
            return Ok(None);
        }
        let finding = timeout(*deadline, lacking::find(&*repository, *form, sign.is_some()));
        let (named, lacking) = tokio::select! {
            found = finding => found.context("the registry does not answer")??,
            () = leaves(&mut leaving) => return Ok(None),
        };
        if self.fill(image, lacking, leaving).await?.is_none() {
            return Ok(None);
        }
        followed?;
        match taken.image.selector() {
            Selector::Digest(pushed) if named != Some(pushed) && taken.tries < SETTLING => {
                bail!("it does not name {pushed} yet, as the event says")
            }
            _ => Ok(Some(())),
        }
    }

    /// Copies the image again if it has a source that names another one.
    async fn follow(
        &self,
        taken: &Taken,
        image: &ImageName,
        repository: &dyn Repository,
        mut leaving: watch::Receiver<bool>,
    ) -> Result<Option<()>> {
        let Settings { syncs, deadline, .. } = &*self.settings;
        let Some(source) = syncs.iter().find_map(|sync| sync.source_of(&taken.image)) else {
            return Ok(Some(()));
        };
        let source: ImageName = source.parse()?;
        let at_source = lazuli_registry::open(&source, &self.access)?;
        let comparing = timeout(*deadline, sync::newer(&*at_source, repository));
        let newer = tokio::select! {
            newer = comparing => newer.context("the registries do not answer")??,
            () = leaves(&mut leaving) => return Ok(None),
        };
        let Some(digest) = newer else { return Ok(Some(())) };
        let verb = child::copy(&source.pinned_to(digest).to_string(), &image.to_string());
        let (name, scratch) = (image.to_string(), self.queue.scratch());
        match child::run(&self.program, &verb, &name, &scratch, *deadline, leaving).await? {
            Ended::Done => Ok(Some(())),
            Ended::Failed(problem) => bail!(problem),
            Ended::Left => Ok(None),
        }
    }

    async fn fill(
        &self,
        image: &ImageName,
        lacking: Lacking,
        leaving: watch::Receiver<bool>,
    ) -> Result<Option<()>> {
        let Settings { form, sign, deadline, .. } = &*self.settings;
        let key = sign.as_deref();
        // Manifests are named by their digests, since the tag may move.
        let verbs: Vec<_> = match lacking {
            Lacking::Nothing(reason) => {
                tracing::info!(%image, reason, "nothing to do");
                return Ok(Some(()));
            }
            Lacking::Indexes(manifests) => {
                let names = manifests.into_iter().map(|digest| image.pinned_to(digest).to_string());
                names.map(|name| child::index(&name, key)).collect()
            }
            Lacking::LazyForm(digest) => {
                vec![child::convert(&image.pinned_to(digest).to_string(), &image.to_string(), key)]
            }
        };
        let (name, scratch) = (image.to_string(), self.queue.scratch());
        let mut problems = Vec::new();
        for verb in verbs {
            let leaving = leaving.clone();
            match child::run(&self.program, &verb, &name, &scratch, *deadline, leaving).await? {
                Ended::Done => {}
                Ended::Failed(problem) => problems.push(problem),
                Ended::Left => return Ok(None),
            }
        }
        if !problems.is_empty() {
            bail!(problems.join("; "));
        }
        let form = if *form == Form::Both { "both" } else { "index" };
        tracing::info!(%image, form, "starts lazily");
        Ok(Some(()))
    }
}
