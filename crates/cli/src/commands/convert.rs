use std::{collections::BTreeMap, ffi::OsString, path::PathBuf, time::Instant};

use anyhow::Result;
use clap::Args;
use indicatif::BinaryBytes;
use lazuli_registry::ImageName;

use crate::{
    Session,
    convert::{Conversion, ConversionRequest, MadeOfArtifact, Order, Ordered, Published},
    image::{sign, trace},
    image_args,
};

/// Convert an image into a lazy one and store it
///
/// SOURCE is a registry reference, oci:DIR[:TAG], docker-archive:FILE, tar:FILE, tar:- for standard
/// input, or dir:PATH; TARGET a registry reference or oci:DIR[:TAG]. Layers and chunks that a lazy
/// image in TARGET's repository has are not made again: the image that has TARGET's name now, or
/// those with the nearest tags. The same input, and the same images there, give the same bytes. An
/// artifact whose layers are files, such as a model, becomes an image that has these layers as they
/// are.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// What to convert
    #[arg(value_name = "SOURCE")]
    source: String,
    /// Where the lazy image goes
    #[arg(value_name = "TARGET")]
    target: String,
    /// Also reuse the chunks of this lazy image in TARGET's registry
    #[arg(long, value_name = "IMAGE", conflicts_with_all = ["trace", "trace_run"])]
    dict: Option<String>,
    /// Compress neighbouring small files in batches of up to this many KiB, a power of two: smaller
    /// images, but a start fetches more, and Nydus before 2.3 cannot mount them. By default, each
    /// file is compressed on its own
    #[arg(long, value_name = "KIB", default_value_t = 0, hide_default_value = true)]
    batch: u32,
    /// Put the hot chunks of this trace first in each blob. The trace is of SOURCE, converted
    /// without this option
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Run the image once, without a network, to record what a start reads, and put that first in
    /// each blob. Runs CMD, or the image's command by default, until it exits or reads nothing new
    /// for 5 s. Must be the last option; needs root and runc
    #[arg(
        long,
        value_name = "CMD",
        num_args = 0..,
        allow_hyphen_values = true,
        conflicts_with = "trace"
    )]
    trace_run: Option<Vec<OsString>>,
    /// Store the image itself, too: TARGET becomes an index of both, of which nodes without Lazuli
    /// take the ordinary one. SOURCE is an image in a registry or oci:DIR
    #[arg(long)]
    keep_oci: bool,
    #[command(flatten)]
    sign: sign::Sign,
    #[command(flatten)]
    access: image_args::Access,
}

impl Arguments {
    fn request(&self, session: &Session) -> Result<ConversionRequest> {
        let source = self.source.parse()?;
        let target: ImageName = self.target.parse()?;
        let access = self.access.options(&session.config)?;
        let signer = self.sign.signer(&target, &access)?;
        let order = match (&self.trace, &self.trace_run) {
            (Some(path), _) => Order::Trace(Box::new(trace::read(path)?), path.clone()),
            (None, Some(command)) => Order::TrialRun(command.clone()),
            (None, None) => Order::Source,
        };
        Ok(ConversionRequest {
            source,
            target,
            access,
            platform: self.access.platform()?,
            policy: session.config.policy.clone(),
            dict: self.dict.as_deref().map(str::parse).transpose()?,
            batch_size: self.batch.saturating_mul(1 << 10),
            order,
            keep_oci: self.keep_oci,
            signer,
            stated: self.stated(),
        })
    }

    /// The options that change the image, for the statement of the conversion. The trace has a
    /// place of its own there.
    fn stated(&self) -> BTreeMap<String, String> {
        let batch = (self.batch > 0).then(|| self.batch.to_string());
        let keep_oci = self.keep_oci.then(|| "true".to_owned());
        let (platform, dict) = (self.access.platform.clone(), self.dict.clone());
        let options =
            [("batch", batch), ("dict", dict), ("keep-oci", keep_oci), ("platform", platform)];
        options.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?))).collect()
    }
}

pub(crate) fn run(session: &Session, arguments: &Arguments) -> Result<()> {
    let started = Instant::now();
    lazuli_sys::heap::give_back();
    let request = arguments.request(session)?;
    let name = request.target.clone();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let mut conversion = Conversion::prepare(request, &runtime)?;
    let source_size = conversion.source_size();
    if conversion.is_of_artifact() {
        report_artifact(&name, &conversion.publish_artifact()?, source_size, started);
        return Ok(());
    }
    let built = conversion.build()?;
    let ordered = conversion.order_by_trace(built)?;
    let published = conversion.publish(&ordered)?;
    report(&name, &ordered, &published, source_size, started);
    Ok(())
}

fn report_artifact(
    name: &ImageName,
    MadeOfArtifact { layers, files, made, uploaded }: &MadeOfArtifact,
    source_size: Option<u64>,
    started: Instant,
) {
    println!("{name}");
    let source = BinaryBytes(source_size.unwrap_or_default());
    println!("  artifact  {source} in {layers} layers, which stay as they are");
    println!("  image     {} for {files} files and directories", BinaryBytes(*made));
    let (seconds, uploaded) = (started.elapsed().as_secs_f64(), BinaryBytes(*uploaded));
    println!("  time      {seconds:.1} s, uploaded {uploaded}");
}

fn report(
    name: &ImageName,
    Ordered { built, hot, .. }: &Ordered,
    Published { stored, uploaded }: &Published,
    source_size: Option<u64>,
    started: Instant,
) {
    let report = &built.report;
    println!("{name}");
    if let Some(source) = source_size {
        let known = match report.layers - report.read_layers {
            0 => String::new(),
            known => format!(", {known} of them known"),
        };
        println!("  source    {} in {} layers{known}", BinaryBytes(source), report.layers);
    }
    println!(
        "  image     {} in {} blobs, metadata {} for {} files",
        BinaryBytes(*stored),
        report.blobs,
        BinaryBytes(report.bootstrap_bytes),
        report.inodes
    );
    if report.known_blobs > 0 {
        let bytes = BinaryBytes(report.known_bytes);
        println!("  reused    {bytes} in {} blobs that the target has", report.known_blobs);
    }
    println!(
        "  dedup     {} of content, {} distinct in {} of {} chunks",
        BinaryBytes(report.content_bytes),
        BinaryBytes(report.distinct_bytes),
        report.distinct_chunks,
        report.chunks
    );
    if let Some(hot) = hot {
        let bytes: u64 = built.blobs.iter().filter_map(|blob| blob.hot_bytes).sum();
        println!("  hot       {} in {} chunks come first", BinaryBytes(bytes), hot.chunks.len());
        super::trace::report_unknown(hot, "SOURCE");
    }
    if report.dropped_xattrs > 0 {
        println!(
            "  dropped   {} extended attributes that Linux has no name space for",
            report.dropped_xattrs
        );
    }
    println!(
        "  time      {:.1} s, uploaded {}",
        started.elapsed().as_secs_f64(),
        BinaryBytes(*uploaded)
    );
}
