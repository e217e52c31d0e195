use std::time::Instant;

use anyhow::Result;
use clap::Args;
use indicatif::BinaryBytes;
use lazuli_registry::{ImageName, Options, copy::Count};

use crate::{
    Session,
    image::{copy::WholeCopy, push},
    progress,
};

/// Copy an image from one place to another, for all platforms and with its traces
///
/// Any image, lazy or not. Manifests are copied byte for byte, so digests stay the same. Artifacts
/// that refer to the image are copied too: traces, signatures (including those that cosign 2 keeps
/// under tags), statements, lists of its parts. Content that DST has is not sent, content of
/// another repository of the same registry is linked, and the rest is streamed without touching the
/// disk.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// A registry reference or oci:DIR[:TAG]
    #[arg(value_name = "SRC")]
    source: String,
    /// The same; what it named before is replaced
    #[arg(value_name = "DST")]
    target: String,
    /// Talk HTTP to the registries; loopback addresses always do
    #[arg(long)]
    plain_http: bool,
}

pub(crate) fn run(session: &Session, arguments: &Arguments) -> Result<()> {
    let started = Instant::now();
    let (source, target): (ImageName, ImageName) =
        (arguments.source.parse()?, arguments.target.parse()?);
    let options = Options { plain_http: arguments.plain_http, ..session.config.registries()? };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let copy = runtime.block_on(WholeCopy::plan(&source, None, &options))?;
    let bar = progress::bytes(Some(copy.bytes()), "copying");
    let mount_from = push::mount_source(&source, &target);
    let open = |name: &ImageName| Ok(lazuli_registry::open(name, &options)?);
    let progress = |bytes| bar.inc(bytes);
    let copied = runtime.block_on(copy.run(&target, open, mount_from, &progress))?;
    bar.finish_and_clear();

    println!("{target}");
    println!("  digest    {}", copy.image.digest());
    let print = |what, Count { objects, bytes }| {
        println!("  {what:<8}  {} in {objects} blobs and manifests", BinaryBytes(bytes));
    };
    print("sent", copied.sent);
    print("mounted", copied.mounted);
    print("there", copied.existed);
    let artifacts = copy.image.referrers() + copy.attachments.len();
    if artifacts > 0 {
        println!("  with it   {artifacts} artifacts that refer to it");
    }
    println!("  time      {:.1} s", started.elapsed().as_secs_f64());
    Ok(())
}
