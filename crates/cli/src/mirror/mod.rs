//! The node's mirror, and its requests to the worker.

mod hosts;

use std::{path::PathBuf, sync::Arc};

use anyhow::Result;
use lazuli_mirror::{Activity, Mirror, Node, Settings};
use lazuli_registry::{ImageName, Login, Manifest, Options, Reference};
use lazuli_runtime::daemon::{Images, MirrorStatus, Worker};
use tokio::task::JoinHandle;

pub(crate) use hosts::HostsDirectories;

use crate::Session;

/// The mirror's directory.
pub(crate) fn directory(session: &Session) -> PathBuf {
    session.root.join("mirror")
}

/// Answers pulls, if configured. The task ends when another worker takes over. Images are served
/// even if this fails.
pub(crate) fn serve(
    session: &Session,
    registry: &Options,
    worker: &mut Worker,
) -> Option<(Arc<Mirror>, JoinHandle<()>)> {
    let listener = worker.mirror()?;
    let images = worker.images();
    let mirror = match open(session, registry, images.clone()) {
        Ok(mirror) => mirror?,
        Err(error) => {
            tracing::error!(
                error = format!("{error:#}"),
                "there is no mirror: pulls go to registries"
            );
            return None;
        }
    };
    if let Ok(listen) = listener.local_addr() {
        tracing::info!(%listen, "answering pulls");
        let of = mirror.clone();
        images.mirrored_by(Arc::new(move || {
            let Activity { hits, misses, stale, bytes } = of.activity();
            MirrorStatus { listen, hits, misses, stale, bytes }
        }));
    }
    let serving = mirror.clone();
    let task = tokio::spawn(async move { serving.serve(listener, images.leaving()).await });
    Some((mirror, task))
}

fn open(session: &Session, registry: &Options, images: Images) -> Result<Option<Arc<Mirror>>> {
    let Some(table) = &session.config.mirror else { return Ok(None) };
    let settings = Settings {
        directory: directory(session),
        address: table.listen,
        registry: registry.clone(),
        lazy: table.lazy()?,
        stale: table.stale(),
    };
    Ok(Some(Mirror::open(settings, Arc::new(Pulls(images)))?))
}

/// Images that clients of the mirror are about to pull.
#[derive(Debug)]
struct Pulls(Images);

impl Node for Pulls {
    fn expect(&self, image: Reference, manifest: Manifest, login: Option<Login>) {
        self.0.expect(ImageName::Registry(image), manifest, login);
    }
}
