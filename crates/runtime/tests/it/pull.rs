//! Images on their way from a registry to the node.

use std::{
    collections::BTreeMap,
    io::Write as _,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use flate2::{Compression, write::GzEncoder};
use lazuli_image::{
    Algorithm, Digest,
    oci::{BlobLayer, ImageConfig, LazyImage, chain_ids, media_type},
};
use lazuli_registry::{ImageName, Mirrors, Options, RegistryError, Repository, SeekableLayers};
use lazuli_runtime::image::{Fetched, ImageError, StoredImage, chain};
use lazuli_testkit::registry::{FakeRegistry, Fault};

use crate::sample::Sample;

fn noise(length: usize) -> Vec<u8> {
    let mut state = 1_u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    };
    (0..length).map(|_| next()).collect()
}

/// A lazy image in a registry, and its parts.
struct Pushed {
    registry: FakeRegistry,
    config: Digest,
    bootstrap: Digest,
    /// The DiffID of the bootstrap layer's tar.
    diff_id: Digest,
    digest: Digest,
}

impl Pushed {
    fn new() -> Self {
        Self::behind(0)
    }

    /// With this many incompressible, unused bytes in the bootstrap layer.
    fn behind(padding: usize) -> Self {
        let sample = Sample::new(vec![("file".to_owned(), 0, b"content".to_vec())]);
        let registry = FakeRegistry::start().unwrap();
        let mut tar = tar::Builder::new(Vec::new());
        let mut header = tar::Header::new_gnu();
        header.set_size(sample.bootstrap.len() as u64);
        tar.append_data(&mut header, "image/image.boot", &sample.bootstrap[..]).unwrap();
        if padding > 0 {
            header.set_size(padding as u64);
            tar.append_data(&mut header, "padding", &noise(padding)[..]).unwrap();
        }
        let tar = tar.into_inner().unwrap();
        let mut gzip = GzEncoder::new(Vec::new(), Compression::fast());
        gzip.write_all(&tar).unwrap();
        let gzip = gzip.finish().unwrap();
        let put = |content: &[u8]| {
            let digest = registry.put_blob("app", content);
            BlobLayer::new(digest, content.len() as u64)
        };
        let blobs: Vec<BlobLayer> = sample.stored.iter().map(|blob| put(blob)).collect();
        let source = ImageConfig::parse(br#"{"os":"linux","architecture":"amd64"}"#).unwrap();
        let diff_id = Algorithm::Sha256.digest(&tar);
        let bootstrap = put(&gzip);
        let layer = bootstrap.clone();
        let image = LazyImage::new(&source, &blobs, layer, diff_id, BTreeMap::new()).unwrap();
        put(&image.config);
        let digest = registry.put_manifest("app", "1", media_type::MANIFEST, &image.manifest);
        let (config, bootstrap) = (image.config_digest, bootstrap.digest);
        Pushed { registry, config, bootstrap, diff_id, digest }
    }

    fn open(&self) -> Arc<dyn Repository> {
        self.open_behind(&[])
    }

    /// Behind these mirrors.
    fn open_behind(&self, mirrors: &[&str]) -> Arc<dyn Repository> {
        let mut all = Mirrors::default();
        let mirrors = mirrors.iter().map(|mirror| mirror.parse().unwrap()).collect();
        all.set(&self.registry.host(), mirrors).unwrap();
        let name: ImageName = format!("{}/app:1", self.registry.host()).parse().unwrap();
        let options = Options { credential_files: Vec::new(), mirrors: all, ..Options::default() };
        lazuli_registry::open(&name, &options).unwrap()
    }
}

/// Replaces a file that denies writing.
fn overwrite(path: &Path, content: &str) {
    std::fs::remove_file(path).unwrap();
    std::fs::write(path, content).unwrap();
}

/// Every image may run.
async fn admitted() -> Result<(), ImageError> {
    Ok(())
}

/// Fetches the image that the name means now.
async fn pull(
    repository: &Arc<dyn Repository>,
    images: &Path,
) -> Result<(StoredImage, Fetched), ImageError> {
    let manifest = repository.manifest(None).await?;
    StoredImage::fetch(repository.clone(), &manifest, images, SeekableLayers::Ordinary).await
}

#[tokio::test(flavor = "multi_thread")]
async fn config_and_bootstrap_are_fetched_at_the_same_time() {
    let pushed = Pushed::new();
    let directory = tempfile::tempdir().unwrap();
    // Nothing is answered before both had time to arrive.
    pushed.registry.fault("GET", "/blobs/", 2, Fault::Latency(Duration::from_millis(500)));
    let repository = pushed.open();
    let (image, fetched) = pull(&repository, directory.path()).await.unwrap();
    assert_eq!(image.manifest_digest, pushed.digest);
    assert_eq!(fetched.requests, 3);
    let stats = pushed.registry.stats();
    assert_eq!((stats.requests, stats.max_concurrency, stats.bytes), (3, 2, fetched.bytes));

    // A second time only the name is looked up.
    let (_, fetched) = pull(&repository, directory.path()).await.unwrap();
    assert_eq!((fetched.requests, pushed.registry.stats().requests), (1, 4));
    assert_eq!(pushed.registry.violations(), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn missing_part_is_named_and_nothing_is_kept() {
    let pushed = Pushed::new();
    for blob in [pushed.config, pushed.bootstrap] {
        let directory = tempfile::tempdir().unwrap();
        pushed.registry.fault("GET", &blob.to_string(), 1, Fault::Status(404));
        let error = pull(&pushed.open(), directory.path()).await.unwrap_err();
        let ImageError::Registry(missing @ RegistryError::Missing { .. }) = &error else {
            panic!("{error}");
        };
        assert!(missing.to_string().contains(&blob.to_string()), "{error}");
        pushed.registry.fault("GET", &blob.to_string(), 1, Fault::WrongBytes);
        let error = pull(&pushed.open(), directory.path()).await.unwrap_err();
        assert!(error.to_string().contains("corrupt"), "{error}");
        pull(&pushed.open(), directory.path()).await.unwrap();
        let names = std::fs::read_dir(directory.path()).unwrap();
        let names: Vec<_> = names.map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(names, [&*pushed.digest.hex()]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bootstrap_comes_in_parts_or_whole() {
    // The second exceeds the memory limit; the third is from a server without range support.
    for (padding, times, requests) in [(300_000, 0, 10), (5 << 20, 0, 3), (300_000, 100, 11)] {
        let pushed = Pushed::behind(padding);
        // Far enough for parts.
        pushed.registry.set_latency(Duration::from_millis(10));
        let layer = pushed.bootstrap.to_string();
        pushed.registry.fault("GET", &layer, times, Fault::IgnoreRange);
        let directory = tempfile::tempdir().unwrap();
        let repository = pushed.open();
        let pulled = pull(&repository, directory.path()).await;
        let (image, fetched) = pulled.unwrap();
        assert_eq!(image.manifest_digest, pushed.digest);
        assert_eq!(fetched.requests, requests);
        // The server counts an answer when its last byte is out, and the client may be faster.
        let started = Instant::now();
        while times == 0 && pushed.registry.stats().bytes < fetched.bytes {
            assert!(started.elapsed() < Duration::from_secs(10));
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        if times == 0 {
            let stats = pushed.registry.stats();
            assert_eq!((stats.requests, stats.bytes), (fetched.requests, fetched.bytes));
        }
        // Wrong anywhere is wrong.
        let pushed = Pushed::behind(padding);
        pushed.registry.fault("GET", &layer, 1, Fault::WrongBytes);
        let directory = tempfile::tempdir().unwrap();
        let error = pull(&pushed.open(), directory.path()).await.unwrap_err();
        assert!(error.to_string().contains("corrupt"), "{error}");
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
    }
}

/// The content of an image's layers determines their chain ids, even if an earlier version fetched
/// the image.
#[tokio::test(flavor = "multi_thread")]
async fn chain_ids_are_those_of_the_unpacked_layers() {
    let pushed = Pushed::new();
    let directory = tempfile::tempdir().unwrap();
    let (images, repository) = (directory.path(), pushed.open());
    let manifest = repository.manifest(None).await.unwrap();
    let (data, _) = manifest.parsed.lazy_base().unwrap();
    let layers = data.iter().map(|layer| layer.digest).chain([pushed.diff_id]);
    let expected = chain_ids(layers);
    assert_eq!(chain::of_data(&manifest.parsed).unwrap(), expected[..expected.len() - 1]);
    let bootstrap = *expected.last().unwrap();
    assert_eq!(chain::stored(images, &pushed.digest), None);
    assert_eq!(
        chain::fetched(repository.clone(), &manifest, images, admitted()).await.unwrap(),
        bootstrap
    );
    assert_eq!(chain::stored(images, &pushed.digest), Some(bootstrap));

    let requests = pushed.registry.stats().requests;
    for damage in [None, Some(""), Some("sha256:0"), Some("not a digest")] {
        let noted = images.join(pushed.digest.hex()).join("layer.diff-id");
        match damage {
            Some(text) => overwrite(&noted, text),
            None => std::fs::remove_file(&noted).unwrap(),
        }
        assert_eq!(chain::stored(images, &pushed.digest), None);
        assert_eq!(
            chain::fetched(repository.clone(), &manifest, images, admitted()).await.unwrap(),
            bootstrap
        );
        assert_eq!(chain::stored(images, &pushed.digest), Some(bootstrap));
    }
    assert_eq!(pushed.registry.stats().requests, requests + 4, "the bootstrap layer, each time");
    assert_eq!(std::fs::read_dir(images).unwrap().count(), 1);
}

/// One mirror has wrong bytes, which shows when they have arrived, and the next one cannot be
/// reached then.
#[tokio::test(flavor = "multi_thread")]
async fn bootstrap_is_fetched_from_any_place_that_has_it() {
    let pushed = Pushed::behind(5 << 20);
    let mirror = FakeRegistry::start().unwrap();
    let layer = pushed.registry.blob("app", &pushed.bootstrap).unwrap();
    mirror.put_blob("app", &layer);
    mirror.fault("GET", &pushed.bootstrap.to_string(), 2, Fault::WrongBytes);
    let corrupting = format!("http://{}", mirror.host());
    let repository = pushed.open_behind(&[&corrupting, "http://127.0.0.1:1"]);
    let directory = tempfile::tempdir().unwrap();
    let (image, _) = pull(&repository, directory.path()).await.unwrap();
    assert_eq!(image.manifest_digest, pushed.digest);
    let asked = pushed.bootstrap.to_string();
    assert_eq!(mirror.log().iter().filter(|logged| logged.target.contains(&asked)).count(), 2);
}

#[tokio::test]
async fn nothing_of_an_image_is_kept_that_is_not_admitted() {
    let pushed = Pushed::new();
    let directory = tempfile::tempdir().unwrap();
    let images = directory.path();
    let repository = pushed.open();
    let manifest = repository.manifest(None).await.unwrap();
    // Its layers are asked for before the answer.
    let refused = async {
        let layer = pushed.bootstrap.to_string();
        while !pushed.registry.log().iter().any(|it| it.target.contains(&layer)) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        Err::<(), _>(ImageError::NotLazy { image: "refused".to_owned() })
    };
    let fetched = StoredImage::fetch_admitted(
        repository.clone(),
        &manifest,
        images,
        SeekableLayers::Ordinary,
        refused,
    )
    .await;
    assert!(fetched.unwrap_err().to_string().starts_with("refused"));
    assert_eq!(std::fs::read_dir(images).unwrap().count(), 0);
    // A present image is not read again.
    pull(&repository, images).await.unwrap();
    overwrite(&images.join(manifest.digest.hex()).join("bootstrap"), "damaged");
    let refused = async { Err::<(), _>(ImageError::NotLazy { image: "refused".to_owned() }) };
    let fetched = StoredImage::fetch_admitted(
        repository.clone(),
        &manifest,
        images,
        SeekableLayers::Ordinary,
        refused,
    )
    .await;
    assert!(fetched.unwrap_err().to_string().starts_with("refused"));
    assert_eq!(
        std::fs::read(images.join(manifest.digest.hex()).join("bootstrap")).unwrap(),
        b"damaged"
    );
}
