use std::{thread, time::Duration};

use anyhow::{Result, bail};
use clap::Args;
use indicatif::BinaryBytes;
use lazuli_runtime::daemon::{PrefetchRequest, PrefetchStatus, Request, Response};

use crate::{Session, daemon, image_args, progress};

/// Fetch a whole image into the node's cache, as fast as the link allows
///
/// Containers that start from it later need no registry. Readers of other images go first. If the
/// image has no index, the node makes one while it pulls.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// An image or artifact: a registry reference or oci:DIR[:TAG]
    #[arg(value_name = "IMAGE")]
    image: String,
    /// Wait until everything is in the cache and on the disk
    #[arg(long)]
    wait: bool,
    #[command(flatten)]
    access: image_args::Access,
}

/// Interval for asking the daemon for its progress.
const STEP: Duration = Duration::from_millis(100);

pub(crate) fn run(session: &Session, arguments: &Arguments) -> Result<()> {
    let image = &arguments.image;
    let request = PrefetchRequest {
        image: image_args::absolute_image(image)?,
        platform: arguments.access.platform.clone(),
        plain_http: arguments.access.plain_http,
    };
    if arguments.wait {
        println!("{image} is here ({})", BinaryBytes(all_of(session, request)?));
        return Ok(());
    }
    let PrefetchStatus { bytes_total, done, .. } = ask(session, &Request::Prefetch(request))?;
    match done {
        true => println!("{image} is here ({})", BinaryBytes(bytes_total)),
        false => println!("{image} is being fetched"),
    }
    Ok(())
}

/// Fetches all of an image, and shows the progress. Returns the image's bytes.
pub(super) fn all_of(session: &Session, request: PrefetchRequest) -> Result<u64> {
    let request = Request::Prefetch(request);
    let bar = progress::bytes(Some(0), "fetching");
    loop {
        let PrefetchStatus { bytes_here, bytes_total, done } = ask(session, &request)?;
        bar.set_length(bytes_total);
        bar.set_position(bytes_here);
        if done {
            bar.finish_and_clear();
            return Ok(bytes_total);
        }
        thread::sleep(STEP);
    }
}

fn ask(session: &Session, request: &Request) -> Result<PrefetchStatus> {
    // Anew each time: a worker that died has a successor.
    match daemon::connect(session)?.call(request)? {
        Response::Prefetch(status) => Ok(status),
        other => bail!("the daemon answered {other:?} to a prefetch; is it another version?"),
    }
}
