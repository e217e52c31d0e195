use std::{
    fs::File,
    io::{BufWriter, Write as _},
    os::unix::fs::FileExt as _,
    path::PathBuf,
    vec,
};

use anyhow::{Context, Result, bail};
use clap::Args;
use lazuli_builder::unpack::{ChunkSource, EntryOrder, tar};
use lazuli_image::{Blob, ChunkRef, codec::Decoder};

use super::{
    Common,
    bootstrap::Given,
    directory::{self, Directory},
};
use crate::{image::read_chunks, path_context::PathContext as _};

/// Unpack an image, or a layer, to a tar file
#[derive(Debug, Args)]
pub(super) struct Arguments {
    #[command(flatten)]
    given: Given,
    /// Path of the tar file, or of a named pipe
    #[arg(long, value_name = "output")]
    output: PathBuf,
    /// Path of the only data blob
    #[arg(short, long, value_name = "blob", conflicts_with = "blob_dir")]
    blob: Option<PathBuf>,
    #[command(flatten)]
    directory: Directory,
    #[command(flatten)]
    pub(super) common: Common,
}

pub(super) fn run(arguments: &Arguments) -> Result<()> {
    let bootstrap = arguments.given.read()?;
    let tree = bootstrap.tree()?;
    let order = EntryOrder::of_layer(&tree);
    let mut content = LocalChunks::new(arguments, &order, bootstrap.blobs())?;
    let context = || format!("cannot write {}", arguments.output.display());
    let output = File::create(&arguments.output).with_context(context)?;
    let mut output = BufWriter::with_capacity(1 << 20, output);
    tar(&order, &mut output, &mut content)?;
    output.flush().with_context(context)
}

/// The chunks of files one after the other, read from the blob, decoded and checked.
struct LocalChunks<'a> {
    wanted: vec::IntoIter<ChunkRef>,
    /// In the order of the image's table of blobs.
    blobs: Vec<(&'a Blob, File)>,
    decoder: Decoder,
    stored: Vec<u8>,
    decoded: Vec<u8>,
}

impl<'a> LocalChunks<'a> {
    fn new(arguments: &Arguments, order: &EntryOrder<'_>, blobs: &'a [Blob]) -> Result<Self> {
        let from = arguments.given.path().display();
        let blobs = match (blobs, &arguments.blob, arguments.directory.path()) {
            ([], ..) => Vec::new(),
            ([blob], Some(path), _) => vec![(blob, File::open(path).cannot("read", path)?)],
            (blobs, _, Some(directory)) => {
                let open = |blob: &'a Blob| Ok((blob, directory::open(directory, &blob.id)?));
                blobs.iter().map(open).collect::<Result<_>>()?
            }
            ([blob], None, None) => {
                bail!("{from} has chunks in the blob {}: say --blob FILE", blob.id)
            }
            (blobs, ..) => bail!("{from} has chunks in {} blobs: say --blob-dir DIR", blobs.len()),
        };
        let wanted = order.chunks().into_iter();
        let (stored, decoded) = (Vec::new(), Vec::new());
        Ok(LocalChunks { wanted, blobs, decoder: Decoder::new(), stored, decoded })
    }
}

impl ChunkSource for LocalChunks<'_> {
    type Error = anyhow::Error;

    fn next(&mut self) -> Result<&[u8]> {
        let wanted = self.wanted.next().context("more chunks were used than the files have")?;
        let (blob, file) =
            self.blobs.get(usize::from(wanted.blob.0)).context("a chunk of no blob")?;
        let context = || format!("chunk {} of blob {}", wanted.number, blob.id);
        let chunk = blob.chunk(wanted.number).with_context(context)?;
        self.stored.resize(chunk.stored_size as usize, 0);
        file.read_exact_at(&mut self.stored, chunk.stored.0).with_context(context)?;
        let unit = self.decoder.unit(&blob.unit(chunk), &self.stored, &mut self.decoded);
        let unit = unit.with_context(context)?;
        read_chunks::verify(chunk, unit).with_context(|| format!("blob {}", blob.id))
    }
}
