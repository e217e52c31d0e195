//! Eviction of files of the store when the disk is too full.

use std::{
    collections::HashSet,
    fs, io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use lazuli_image::{Digest, oci::Manifest};

use super::{BLOBS, HELD, IMAGES, ImageRecord, IndexStore, LAYERS, ORDINARY, SPOOLS, remove};
use crate::cache::ExtraFiles;

/// How long an index must not have been used before it may be evicted: an image that is being
/// pulled is recorded only when its first layer is known.
const GRACE: Duration = Duration::from_secs(60);

/// How long a spool is kept that no pull resumes.
const SPOOL_KEPT: Duration = Duration::from_secs(24 * 3600);

/// Removes spools that no pull will resume.
pub(super) fn sweep_spools(store: &IndexStore) -> io::Result<()> {
    for (last, path) in store.files(SPOOLS) {
        if last.elapsed().is_ok_and(|since| since >= SPOOL_KEPT) {
            remove(&path)?;
        }
    }
    Ok(())
}

impl ExtraFiles for IndexStore {
    /// Indexes of layers that containerd has in no image, and spools that do not grow.
    fn unused(&self) -> Vec<(SystemTime, PathBuf)> {
        let used: HashSet<String> = used(self).iter().map(Digest::hex).collect();
        let is_unused = |path: &PathBuf| {
            let name = path.file_name().and_then(|name| name.to_str());
            !name.is_some_and(|name| used.contains(name))
        };
        let indexes = self.files(BLOBS).into_iter().filter(|(_, path)| is_unused(path));
        let all = indexes.chain(self.files(SPOOLS));
        all.filter(|(last, _)| is_old(*last)).collect()
    }

    fn remove(&self, path: &Path) -> io::Result<u64> {
        let metadata = match fs::metadata(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(0),
            metadata => metadata?,
        };
        if !is_old(metadata.modified()?) {
            return Ok(0);
        }
        remove(path)?;
        tracing::info!(path = %path.display(), "evicted what is not in use");
        Ok(metadata.blocks() * 512)
    }
}

impl IndexStore {
    fn files(&self, part: &str) -> Vec<(SystemTime, PathBuf)> {
        let entries = fs::read_dir(self.root.join(part)).into_iter().flatten().flatten();
        let used = |entry: &fs::DirEntry| entry.metadata().ok()?.modified().ok();
        entries.filter_map(|entry| Some((used(&entry)?, entry.path()))).collect()
    }
}

/// Indexes that lead to layers of images that containerd has.
fn used(store: &IndexStore) -> HashSet<Digest> {
    let layers = layers_in_use(store);
    layers.filter_map(|layer| store.layer(&layer)).map(|record| record.index).collect()
}

/// The layers of images that containerd has.
fn layers_in_use(store: &IndexStore) -> impl Iterator<Item = Digest> {
    let parse = |(_, image): (_, ImageRecord)| Manifest::parse(image.manifest.as_bytes()).ok();
    let manifests = store.images().into_iter().filter_map(parse);
    manifests.flat_map(|manifest| manifest.layers).map(|layer| layer.digest)
}

/// Removes the oldest records of a `part` while they are more than `most`, but none that an image
/// of containerd's needs.
///
/// # Errors
/// Too many are needed: `newest`, which was written last, is removed again.
pub(super) fn limit_records(
    store: &IndexStore,
    part: &str,
    newest: &Digest,
    most: usize,
) -> io::Result<()> {
    let mut files = store.files(part);
    if files.len() <= most {
        return Ok(());
    }
    let used: HashSet<String> = match part {
        LAYERS => layers_in_use(store).map(|layer| layer.hex()).collect(),
        // Of images, and of layers by themselves.
        IMAGES => {
            let images = store.images().into_iter().map(|(image, _)| image);
            images.chain(layers_in_use(store)).map(|digest| digest.hex()).collect()
        }
        ORDINARY | HELD => store.images().into_iter().map(|(image, _)| image.hex()).collect(),
        _ => HashSet::new(),
    };
    let is_used = |path: &Path| {
        let name = path.file_name().and_then(|name| name.to_str());
        name.is_some_and(|name| used.contains(name) || name == newest.hex())
    };
    files.sort();
    // More than necessary: looking for what is in use takes long.
    let mut surplus = files.len() - (most - most / 16);
    for (_, path) in files {
        if surplus > 0 && !is_used(&path) {
            remove(&path)?;
            surplus -= 1;
        }
    }
    if surplus <= most / 16 {
        return Ok(());
    }
    remove(&store.path(part, newest))?;
    Err(io::Error::other(format!(
        "containerd has images with {most} {part}, the most that is kept"
    )))
}

fn is_old(last: SystemTime) -> bool {
    last.elapsed().is_ok_and(|since| since >= GRACE)
}

/// Gives up the indexes that were used longest ago while all of them have more than `bytes`.
pub(super) fn limit(store: &IndexStore, bytes: u64) -> io::Result<()> {
    let size = |path: &Path| fs::metadata(path).map_or(0, |metadata| metadata.len());
    let mut sum: u64 = store.files(BLOBS).iter().map(|(_, path)| size(path)).sum();
    if sum <= bytes {
        return Ok(());
    }
    let mut unused = store.unused();
    unused.sort();
    for (_, path) in unused {
        if sum <= bytes {
            break;
        }
        sum = sum.saturating_sub(size(&path));
        store.remove(&path)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use lazuli_image::Algorithm;

    use super::{
        super::{Holder, LayerRecord},
        *,
    };

    fn digest(text: &str) -> Digest {
        Algorithm::Sha256.digest(text.as_bytes())
    }

    /// Makes a file old.
    fn age(path: &Path, seconds: u64) {
        let at = SystemTime::now() - Duration::from_secs(seconds);
        fs::File::options().append(true).open(path).unwrap().set_modified(at).unwrap();
    }

    /// The image of one layer, and its index.
    fn image(store: &IndexStore, layer: &str) -> (Digest, PathBuf) {
        let index = store.keep_index(format!("index of {layer}").as_bytes()).unwrap();
        let record = LayerRecord { diff_id: digest("tar"), index, is_proven: true };
        store.note_layer(&digest(layer), &record).unwrap();
        let config = digest("config");
        let manifest = format!(
            r#"{{"schemaVersion":2,"config":{{"mediaType":"c","digest":"{config}","size":1}},
               "layers":[{{"mediaType":"l","digest":"{}","size":1}}]}}"#,
            digest(layer)
        );
        let record = ImageRecord {
            media_type: "m".to_owned(),
            manifest: manifest.clone(),
            config: String::new(),
        };
        store.note_image(&digest(&manifest), &record, Holder::Containerd).unwrap();
        (digest(&manifest), store.path(BLOBS, &index))
    }

    fn open(root: &Path) -> IndexStore {
        IndexStore::open(root.to_owned(), &root.join("bundle")).unwrap()
    }

    #[test]
    fn an_index_stays_while_containerd_has_its_image() {
        let directory = tempfile::tempdir().unwrap();
        let store = open(directory.path());
        let ((first, old), (second, young)) = (image(&store, "a"), image(&store, "b"));
        age(&old, 3600);
        age(&young, 1800);
        let unused = || store.unused().into_iter().map(|(_, path)| path).collect::<Vec<_>>();
        assert_eq!(unused(), Vec::<PathBuf>::new());
        limit(&store, 0).unwrap();
        assert!(old.exists() && young.exists());
        assert!(store.forget_image(&first, Holder::Containerd).unwrap());
        assert_eq!(unused(), std::slice::from_ref(&old));
        limit(&store, 0).unwrap();
        assert!(!old.exists() && young.exists());
        store.forget_image(&second, Holder::Containerd).unwrap();
        // Looked at for an image that is being pulled.
        let index = store.layer(&digest("b")).unwrap().index;
        store.index(&index).unwrap();
        assert_eq!((unused(), store.remove(&young).unwrap()), (Vec::new(), 0));
        age(&young, 1800);
        assert!(store.remove(&young).unwrap() > 0);
        assert!(!young.exists());
    }

    #[test]
    fn an_image_stays_until_nobody_has_it() {
        let directory = tempfile::tempdir().unwrap();
        let store = open(directory.path());
        let (image, _) = image(&store, "a");
        let record = store.image(&image).unwrap();
        store.note_image(&image, &record, Holder::LayerStore).unwrap();
        assert!(!store.forget_image(&image, Holder::Containerd).unwrap());
        assert!(store.image(&image).is_some());
        // As a power cut may leave it.
        fs::write(store.path(HELD, &image), "").unwrap();
        assert!(!store.is_held(&image, Holder::LayerStore));
        assert!(!store.forget_image(&image, Holder::Containerd).unwrap());
        store.note_image(&image, &record, Holder::LayerStore).unwrap();
        assert!(store.is_held(&image, Holder::LayerStore));
        assert!(store.forget_image(&image, Holder::LayerStore).unwrap());
        assert!(store.image(&image).is_none());
    }

    #[test]
    fn records_of_images_that_containerd_has_are_never_removed() {
        let directory = tempfile::tempdir().unwrap();
        let store = open(directory.path());
        let note = |text: &str| {
            let record = LayerRecord { diff_id: digest("t"), index: digest("i"), is_proven: true };
            store.write(LAYERS, &digest(text), &serde_json::to_vec(&record).unwrap()).unwrap();
            limit_records(&store, LAYERS, &digest(text), 32)
        };
        let (first, _) = image(&store, "a");
        age(&store.path(LAYERS, &digest("a")), 3600);
        for number in 0..100 {
            note(&format!("unused {number}")).unwrap();
        }
        assert!(store.files(LAYERS).len() <= 32);
        assert!(store.layer(&digest("a")).is_some() && store.layer(&digest("unused 99")).is_some());
        // All of them are needed.
        for number in 0..32 {
            image(&store, &format!("used {number}"));
        }
        assert!(note("one more").unwrap_err().to_string().contains("32 layers"));
        assert!(store.layer(&digest("one more")).is_none());
        assert!((0..32).all(|number| store.layer(&digest(&format!("used {number}"))).is_some()));
        // Images that containerd has are all used.
        let more = limit_records(&store, ORDINARY, &first, 32);
        assert!(more.is_err() && store.image(&first).is_none());
        assert_eq!(store.images().len(), 32);
        store.forget_image(&store.images()[0].0, Holder::Containerd).unwrap();
        assert!(note("one more").is_ok());
    }

    #[test]
    fn a_spool_goes_when_it_does_not_grow() {
        let directory = tempfile::tempdir().unwrap();
        let store = open(directory.path());
        let spool = store.spool("r.example/a", &digest("layer"));
        assert_ne!(spool, store.spool("r.example/b", &digest("layer")));
        fs::write(&spool, "stored").unwrap();
        assert!(store.unused().is_empty());
        age(&spool, 120);
        assert_eq!(store.unused().len(), 1);
        let reopen = || open(directory.path());
        reopen();
        assert!(spool.exists());
        age(&spool, 2 * 24 * 3600);
        reopen();
        assert!(!spool.exists());
    }
}
