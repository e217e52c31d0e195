use std::{
    fs::{File, Permissions},
    io::{self, BufWriter, IsTerminal as _, Write},
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    time::Instant,
};

use anyhow::{Context, Result, bail};
use bytes::Bytes;
use clap::Args;
use indicatif::BinaryBytes;
use lazuli_builder::unpack::{self, EntryOrder};
use lazuli_image::oci::{FlatImage, ImageConfig, annotation, media_type};
use lazuli_registry::{BlobContent, ImageName};
use tempfile::NamedTempFile;
use tokio::runtime::Runtime;

use crate::{
    Session,
    image::{
        open::{self, OpenedImage},
        read_chunks::FetchedChunks,
        scratch,
    },
    image_args,
    interrupt::Temporary,
    path_context::PathContext as _,
    progress,
};

/// Make something plain of a lazy image: a directory, a tar, or an ordinary image
///
/// Everything is fetched in large ranges and checked; no daemon is asked. A directory gets owners,
/// modes, times, extended attributes, hard links and device nodes, so it takes root; the others do
/// not. A tar cannot have sockets. The same image gives the same bytes.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// A lazy image: a registry reference or oci:DIR[:TAG]
    #[arg(value_name = "IMAGE")]
    image: String,
    /// A directory that is empty or does not exist; tar:FILE, or tar:- for standard output;
    /// oci:DIR[:TAG] for an image of one layer
    #[arg(value_name = "TARGET")]
    target: String,
    #[command(flatten)]
    access: image_args::Access,
}

enum Destination {
    Directory(PathBuf),
    Output,
    Tar(PathBuf),
    Image(ImageName),
}

impl Destination {
    fn parse(text: &str) -> Result<Self> {
        let path = |path: &str| match path {
            "" => bail!("`{text}`: a path is expected after the prefix, as in tar:rootfs.tar"),
            path => Ok(PathBuf::from(path)),
        };
        if let Some(file) = text.strip_prefix("tar:") {
            return Ok(if file == "-" {
                Destination::Output
            } else {
                Destination::Tar(path(file)?)
            });
        }
        if text.starts_with("oci:") {
            return Ok(Destination::Image(text.parse()?));
        }
        path(text.strip_prefix("dir:").unwrap_or(text)).map(Destination::Directory)
    }
}

pub(crate) fn run(session: &Session, arguments: &Arguments) -> Result<()> {
    let started = Instant::now();
    let target = Destination::parse(&arguments.target)?;
    if matches!(target, Destination::Output) && io::stdout().is_terminal() {
        bail!("a tar is not for a terminal: send it to a file or a program");
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let image = open::open(&arguments.image, &arguments.access, &session.config, &runtime)?;
    image.image.must_be_whole(image.name.to_string())?;
    let tree = image.image.bootstrap.tree()?;
    let order = EntryOrder::new(&tree);
    let bar = progress::bytes(Some(order.bytes()), "unpacking");
    let used = |bytes| bar.inc(bytes);
    let mut chunks = FetchedChunks::fetch(
        image.repository.clone(),
        &image.image,
        &order.chunks(),
        &used,
        &runtime,
    );
    let unpacked = match &target {
        Destination::Directory(path) => unpack::directory(&order, path, &mut chunks),
        Destination::Output => tar(&order, &mut io::stdout().lock(), &mut chunks),
        Destination::Tar(path) => tar_file(&order, path, &mut chunks),
        Destination::Image(name) => {
            flat(&image, &order, name, &mut chunks, &runtime, session, arguments)
        }
    };
    bar.finish_and_clear();
    unpacked.with_context(|| format!("{} was not unpacked to {}", image.name, arguments.target))?;

    let mut report = format!("{}\n", arguments.target);
    let content = BinaryBytes(order.bytes());
    report += &format!("  content   {} names, {content} in files\n", order.names());
    let sockets = order.sockets();
    if !sockets.is_empty() && !matches!(target, Destination::Directory(_)) {
        report += &format!("  skipped   sockets, which a tar cannot have: {}\n", sockets.join(" "));
    }
    let (seconds, fetched) = (started.elapsed().as_secs_f64(), BinaryBytes(chunks.fetched()));
    report += &format!("  time      {seconds:.1} s, fetched {fetched}");
    match target {
        Destination::Output => eprintln!("{report}"),
        _ => println!("{report}"),
    }
    Ok(())
}

fn tar(order: &EntryOrder<'_>, out: &mut impl Write, chunks: &mut FetchedChunks<'_>) -> Result<()> {
    let mut out = BufWriter::with_capacity(1 << 20, out);
    unpack::tar(order, &mut out, chunks)?;
    Ok(out.flush()?)
}

/// Writes a tar that appears whole or not at all, unless `path` is a device or a pipe.
fn tar_file(order: &EntryOrder<'_>, path: &Path, chunks: &mut FetchedChunks<'_>) -> Result<()> {
    let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    if path.metadata().is_ok_and(|found| !found.is_file()) {
        let context = || format!("cannot write to {}", path.display());
        let mut file = File::options().write(true).open(&path).with_context(context)?;
        return tar(order, &mut file, chunks);
    }
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    let directory = directory.unwrap_or(Path::new("."));
    let mut file = partial(directory)?;
    tar(order, file.as_file_mut(), chunks)?;
    file.into_inner().persist(&path).cannot("write", &path)?;
    Ok(())
}

fn partial(directory: &Path) -> Result<Temporary<NamedTempFile>> {
    let mut builder = tempfile::Builder::new();
    // The umask decides who else may read it, as for any file.
    builder.prefix(".lazuli-unpack-").permissions(Permissions::from_mode(0o666));
    Temporary::new(|| builder.tempfile_in(directory)).cannot("write to", directory)
}

/// Stores an ordinary image of one layer.
fn flat(
    image: &OpenedImage,
    order: &EntryOrder<'_>,
    name: &ImageName,
    chunks: &mut FetchedChunks<'_>,
    runtime: &Runtime,
    session: &Session,
    arguments: &Arguments,
) -> Result<()> {
    let mut file = partial(&scratch::parent())?;
    let layer = unpack::layer(order, file.as_file_mut(), chunks)?;
    let config = runtime.block_on(lazuli_registry::config(&*image.repository, &image.manifest))?;
    let config = ImageConfig::parse(&config)?;
    let mut notes = image.manifest.parsed.annotations.clone();
    // Its chunks are of the lazy image.
    notes.remove(annotation::GUESS);
    let flat = FlatImage::new(&config, layer.digest, layer.size, layer.diff_id, notes)?;
    let target = lazuli_registry::open(name, &arguments.access.options(&session.config)?)?;
    let content = BlobContent::File(file.path().to_owned());
    runtime.block_on(async {
        target.push_blob(&layer.digest, layer.size, content, None, &|_| {}).await?;
        let (size, content) = (flat.config.len() as u64, Bytes::from(flat.config));
        let content = BlobContent::Bytes(content);
        target.push_blob(&flat.config_digest, size, content, None, &|_| {}).await?;
        target.push_manifest(flat.manifest.into(), media_type::MANIFEST).await
    })?;
    Ok(())
}
