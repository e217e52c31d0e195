//! Reports failed reads in the log and in `status`: the container, the file, the image, and the
//! cause.

use std::{
    collections::BTreeSet,
    error::Error,
    path::Path,
    sync::{Arc, Weak},
};

use tokio::sync::mpsc::Receiver;

use super::container::{Container, LOGS};
use crate::{
    cache::FailedRead,
    daemon::{api::FailedReadStatus, node::Node, served::image::ServedImage},
    metrics::ReadFailure,
};

/// Files and images of one read that are named.
const SHOWN: usize = 3;

/// Logs failed reads as they arrive, as long as the node exists.
pub(in crate::daemon) async fn log(node: Weak<Node>, mut reads: Receiver<FailedRead>) {
    while let Some(read) = reads.recv().await {
        let Some(node) = node.upgrade() else { return };
        let found = node.images.all().await;
        let images: Vec<_> = found.into_iter().filter(|image| image.has_blob(&read.blob)).collect();
        let names = node.mounts.names_of(&images).await;
        let latest = node.status.latest_failures.clone();
        drop(node);
        let described = tokio::task::spawn_blocking(move || describe(&read, &names, &images));
        match described.await {
            Ok(read) => latest.add(read),
            Err(error) => tracing::error!(%error, "a failed read cannot be described"),
        }
    }
}

/// Logs a failed read, and returns its description, without a number. Blocks.
fn describe(
    read: &FailedRead,
    names: &BTreeSet<String>,
    images: &[Arc<ServedImage>],
) -> FailedReadStatus {
    let FailedRead { blob, range, error, thread, groups, unreported } = read;
    let Container { id, name, pod, pod_uid } = Container::of(groups, Path::new(LOGS));
    let mut files = Vec::new();
    for image in images {
        // One more than shown reveals that there are others.
        image.files_with(blob, range, SHOWN + 1, &mut files);
    }
    let (image, file) = (shown(names.iter().cloned().collect()), shown(files));
    let (container, cause) = (name.or(id), ReadFailure::of(error).name());
    tracing::error!(
        image,
        file,
        pod = pod.as_ref().or(pod_uid.as_ref()),
        container,
        thread,
        %blob,
        bytes = %format_args!("{}..{}", range.start, range.end),
        cause,
        error = chain(error),
        unreported = (*unreported > 0).then_some(unreported),
        "a read fails",
    );
    FailedReadStatus { number: 0, pod, pod_uid, container, image, file, cause: cause.to_owned() }
}

/// The first [`SHOWN`] names; `None` without names.
fn shown(mut names: Vec<String>) -> Option<String> {
    let all = names.len();
    names.truncate(SHOWN);
    let more = if all > SHOWN { " and others" } else { "" };
    (all > 0).then(|| format!("{}{more}", names.join(", ")))
}

/// An error with its causes.
fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        next = cause.source();
    }
    text
}
