use std::{thread, time::Duration};

use anyhow::{Result, bail};
use clap::Args;
use indicatif::BinaryBytes;
use lazuli_runtime::daemon::{PrefetchRequest, PrefetchStatus, Request, Response};

use crate::{Session, daemon, image_args, progress};

/// Fetch a whole image into the node's cache, as fast as the link allows
///
/// Containers that start from it later need no registry. Readers of other images go first.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// A lazy image: a registry reference or oci:DIR[:TAG]
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
    let request = Request::Prefetch(PrefetchRequest {
        image: image_args::absolute_image(&arguments.image)?,
        platform: arguments.access.platform.clone(),
        plain_http: arguments.access.plain_http,
    });
    let bar = progress::bytes(Some(0), "fetching");
    loop {
        // Anew each time: a worker that died has a successor.
        let PrefetchStatus { bytes_here, bytes_total, done } =
            match daemon::connect(session)?.call(&request)? {
                Response::Prefetch(status) => status,
                other => {
                    bail!("the daemon answered {other:?} to a prefetch; is it another version?")
                }
            };
        bar.set_length(bytes_total);
        bar.set_position(bytes_here);
        if done {
            bar.finish_and_clear();
            println!("{} is here ({})", arguments.image, BinaryBytes(bytes_total));
            return Ok(());
        }
        if !arguments.wait {
            bar.finish_and_clear();
            println!("{} is being fetched", arguments.image);
            return Ok(());
        }
        thread::sleep(STEP);
    }
}
