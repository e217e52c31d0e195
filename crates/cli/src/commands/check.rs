use std::{io::Read, ops::Range};

use anyhow::{Context, Result, bail};
use clap::Args;
use indicatif::BinaryBytes;
use lazuli_image::{
    codec::Decoder,
    compare::compare,
    rafs::{self, BlobRecord, Bootstrap, layout::Origin},
    units::units,
};
use lazuli_registry::{Pull, into_blocking};

use crate::{
    Session,
    config::Config,
    convert::source,
    image::{
        open::{self, OpenedImage, Shown},
        read_chunks,
    },
    image_args, progress,
};

/// Verify a lazy image: its format, every digest, and optionally that it shows what its source
/// holds
///
/// Reads all of the image. With --against, every entry of the two file trees is compared: type,
/// mode, owner, size, time, extended attributes, link target, hard links, device number and
/// content.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// A lazy image: a registry reference or oci:DIR[:TAG]
    #[arg(value_name = "IMAGE")]
    image: String,
    /// The source of the image
    #[arg(long, value_name = "SOURCE")]
    against: Option<String>,
    #[command(flatten)]
    access: image_args::Access,
}

/// Maximum number of differences that are listed.
const DIFFERENCES: usize = 20;

pub(crate) fn run(session: &Session, arguments: &Arguments) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let opened = open::open(&arguments.image, &arguments.access, &session.config, &runtime)?;
    let OpenedImage { name, image, repository, .. } = &opened;
    let bootstrap = &image.bootstrap;
    if arguments.against.is_some() && bootstrap.origin() == Origin::Seekable {
        bail!(
            "--against compares chunk by chunk, and {name} is cut differently: compare what `lazuli unpack` makes of it"
        );
    }
    let summary = rafs::check(bootstrap).with_context(|| format!("the bootstrap of {name}"))?;
    let records = bootstrap.blob_records();
    let total = records.iter().map(|record| record.blob.stored_size).sum();
    let bar = progress::bytes(Some(total), "checking");
    for record in &records {
        let size = opened.stored_size(&record.blob);
        blob(&**repository, record, size, &runtime, &|bytes| bar.inc(bytes))
            .with_context(|| format!("blob {} of {name}", record.blob.id))?;
    }
    bar.finish_and_clear();
    println!(
        "{name}: {}, {} names, {} files with {}, {} chunks in {} blobs: every digest is right",
        bootstrap.origin(),
        summary.names,
        summary.files,
        BinaryBytes(summary.file_bytes),
        summary.chunks,
        records.len()
    );
    if let Some(text) = &arguments.against {
        against(text, bootstrap, arguments, &session.config, &runtime)?;
        println!("{name} shows the same tree as {text}");
    }
    Ok(())
}

/// Reads a blob of `size` bytes once: its own digest, every chunk of the chunk table, and the
/// tables at its end, or in the index of an ordinary layer.
fn blob(
    repository: &dyn Pull,
    record: &BlobRecord,
    size: u64,
    runtime: &tokio::runtime::Runtime,
    progress: &dyn Fn(u64),
) -> Result<()> {
    let BlobRecord { blob, tail } = record;
    let reader = runtime.block_on(repository.blob(&blob.id, size))?;
    let mut reader = RangeReader::new(into_blocking(reader, runtime.handle().clone()));
    let (mut decoder, mut buffer) = (Decoder::new(), Vec::new());
    for unit in units(blob.chunks.iter(), |chunk| *chunk) {
        let chunk = *unit.furthest();
        let stored = reader.range(chunk.stored.0..chunk.stored_end().0)?;
        let bytes = decoder.unit(&blob.unit(chunk), stored, &mut buffer);
        let bytes = bytes.with_context(|| format!("chunk {} at {}", chunk.number, chunk.stored))?;
        for chunk in unit.into_chunks() {
            read_chunks::verify(chunk, bytes)?;
            progress(chunk.stored_share());
        }
    }
    // At its end the reader compares the digest of the whole blob.
    let rest = match (tail.index, tail.ci_size) {
        (None, 1..) => reader.rest(tail.ci_offset)?,
        (index, _) => {
            reader.skip_rest()?;
            let Some(index) = index else { return Ok(()) };
            let reader = runtime.block_on(repository.blob(&index.digest, index.size))?;
            let reader = into_blocking(reader, runtime.handle().clone());
            RangeReader::new(reader).rest(tail.ci_offset)?
        }
    };
    rafs::check_blob(&rest, record)?;
    Ok(())
}

/// Reads ranges of a blob in one pass. Ranges come in the order of their starts and may overlap.
struct RangeReader<R> {
    reader: R,
    /// The offset of `bytes`.
    start: u64,
    bytes: Vec<u8>,
}

impl<R: Read> RangeReader<R> {
    fn new(reader: R) -> Self {
        RangeReader { reader, start: 0, bytes: Vec::new() }
    }

    fn range(&mut self, range: Range<u64>) -> Result<&[u8]> {
        self.skip_to(range.start)?;
        let (size, here) = ((range.end - range.start) as usize, self.bytes.len());
        if size > here {
            self.bytes.resize(size, 0);
            self.reader.read_exact(&mut self.bytes[here..])?;
        }
        Ok(&self.bytes[..size])
    }

    fn skip_to(&mut self, start: u64) -> Result<()> {
        let behind = start.saturating_sub(self.start);
        let here = behind.min(self.bytes.len() as u64);
        self.bytes.drain(..here as usize);
        std::io::copy(&mut (&mut self.reader).take(behind - here), &mut std::io::sink())?;
        self.start = self.start.max(start);
        Ok(())
    }

    fn rest(mut self, start: u64) -> Result<Vec<u8>> {
        self.skip_to(start)?;
        self.reader.read_to_end(&mut self.bytes)?;
        Ok(self.bytes)
    }

    fn skip_rest(mut self) -> Result<()> {
        std::io::copy(&mut self.reader, &mut std::io::sink())?;
        Ok(())
    }
}

fn against<B: AsRef<[u8]>>(
    text: &str,
    bootstrap: &Bootstrap<B>,
    arguments: &Arguments,
    config: &Config,
    runtime: &tokio::runtime::Runtime,
) -> Result<()> {
    let (platform, access) = (arguments.access.platform()?, arguments.access.options(config)?);
    let source = source::open(&text.parse()?, platform, &access, runtime)?;
    let bar = progress::bytes(source.stored_size(), "comparing");
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let merged = lazuli_builder::merge(
        source.layers,
        bootstrap.chunk_size(),
        bootstrap.digest_algorithm(),
        threads,
        &progress::Reading(&bar),
    )?;
    bar.finish_and_clear();
    let ours = Shown { tree: bootstrap.tree()?, bootstrap };
    let differences = compare(&ours, &merged, DIFFERENCES);
    if differences.is_empty() {
        return Ok(());
    }
    let lines: Vec<_> = differences.iter().map(|difference| format!("\n  {difference}")).collect();
    bail!("{} (first) is not {text} (second):{}", arguments.image, lines.concat())
}
