//! Mounts the file system, or continues with that of the worker before.

use std::{
    fs::DirBuilder,
    io,
    os::unix::fs::DirBuilderExt as _,
    path::{Path, PathBuf},
    sync::{Arc, Weak},
    time::Duration,
};

use lazuli_sys::mountinfo;
use rustix::io::Errno;
use tokio::runtime::Handle;

use super::answers::Answers;
use crate::{
    daemon::{images::Images, node::Node},
    keeper::{Descriptors, Link},
    kernel::{
        layer_store::{KIND, Left, Session},
        mount,
    },
};

/// Pause between looks for layers that nobody uses.
const SWEEP: Duration = Duration::from_secs(60);

/// The file system of an earlier worker, if its connection is open.
#[derive(Debug)]
pub(in crate::daemon) struct Leftover(Option<Left>);

impl Leftover {
    /// Takes it out of `given`.
    pub(in crate::daemon) fn find(given: &mut Descriptors, link: &Link) -> Self {
        Leftover(Left::find(given, link))
    }
}

impl Node {
    /// Serves the layer store, if it is configured. Images are served even if this fails.
    pub(in crate::daemon) async fn serve_layers(self: &Arc<Self>, left: Leftover) {
        let node = self.clone();
        let runtime = Handle::current();
        let serve = move || {
            let _runtime = runtime.enter();
            node.start_layers(left.0, runtime.clone())
        };
        match tokio::task::spawn_blocking(serve).await.map_err(io::Error::other).flatten() {
            Ok(true) => {
                tokio::spawn(sweep(Arc::downgrade(self)));
            }
            Ok(false) => {}
            Err(error) => {
                tracing::error!(%error, "there is no layer store: podman pulls all layers itself");
            }
        }
    }

    /// Returns whether the layer store is served.
    fn start_layers(self: &Arc<Self>, left: Option<Left>, runtime: Handle) -> io::Result<bool> {
        let (store, link) = (&self.layer_store, &self.drivers.link);
        let wanted = store.settings.as_ref();
        let wanted = wanted.map(|settings| real_path(&settings.directory)).transpose()?;
        let mounted = self.mounted_layers()?;
        let answers = Arc::new(Answers { images: Images(self.clone()), runtime });
        let is_same = |directory: &PathBuf| mounted == [directory.clone()];
        let left = left.filter(|_| wanted.as_ref().is_some_and(is_same));
        let resumed = left.and_then(|left| {
            let resumed = Session::resume(answers.clone(), left, link);
            let failed =
                |error: &io::Error| tracing::error!(%error, "the layer store is mounted anew");
            resumed.inspect_err(failed).ok()
        });
        let session = match resumed {
            Some(session) => session,
            None => {
                // Without a connection nobody waits for an answer.
                Left::release(link);
                mounted.iter().try_for_each(|path| detach(path))?;
                let Some(directory) = wanted else { return Ok(false) };
                let source = self.root.display().to_string();
                let session = Session::mount(answers, &directory, &source, link)?;
                tracing::info!(directory = %directory.display(), "serving layers");
                session
            }
        };
        // Lives as long as the process.
        let _ = store.session.set(session);
        Ok(true)
    }

    /// Where layer stores of this daemon are mounted.
    fn mounted_layers(&self) -> io::Result<Vec<PathBuf>> {
        let mounts = mountinfo::list()?;
        let ours = mounts.into_iter().filter(|it| it.kind == KIND && it.source == self.root);
        Ok(ours.map(|mount| mount.target).collect())
    }

    /// Removes the layer store for good.
    pub(in crate::daemon) fn end_layers(&self) {
        let all = self.mounted_layers();
        let detached = all.and_then(|all| all.iter().try_for_each(|path| detach(path)));
        if let Err(error) = detached {
            tracing::warn!(%error, "the layer store stays mounted");
        }
    }
}

/// Detaches a mount, if it is still there.
fn detach(path: &Path) -> io::Result<()> {
    match mount::detach(path) {
        Err(error) if Errno::from_io_error(&error) == Some(Errno::INVAL) => Ok(()),
        detached => detached,
    }
}

/// The path as the mount table has it. Its last part is not looked at: what is mounted there may be
/// ours to answer.
fn real_path(directory: &Path) -> io::Result<PathBuf> {
    let (Some(parent), Some(name)) = (directory.parent(), directory.file_name()) else {
        return Ok(directory.to_owned());
    };
    DirBuilder::new().recursive(true).mode(0o755).create(parent)?;
    Ok(parent.canonicalize()?.join(name))
}

/// Removes layers that nobody uses, for as long as the node serves: a client may end between
/// finding a layer and using it.
async fn sweep(node: Weak<Node>) {
    loop {
        tokio::time::sleep(SWEEP).await;
        let Some(node) = node.upgrade() else { return };
        node.layer_store.window.expire();
        let images = Images(node.clone());
        for layer in node.layer_store.unused() {
            images.remove_held(&layer).await;
        }
    }
}
