mod layers;

use std::{
    collections::BTreeMap,
    error::Error,
    fs,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;

use super::*;
use crate::label::TARGET;

const IMAGE: &str = "containerd.io/snapshot/cri.image-ref";
const MANIFEST: &str = "containerd.io/snapshot/cri.manifest-digest";
const DATA: &str = "containerd.io/snapshot/nydus-blob";
const BOOTSTRAP: &str = "containerd.io/snapshot/nydus-bootstrap";

/// Images that can be mounted, unless their names say otherwise.
#[derive(Debug, Default)]
struct FakeImages {
    mounted: Mutex<BTreeMap<PathBuf, Image>>,
    removed: Mutex<Vec<String>>,
    /// The number of times that a registry was asked.
    checks: AtomicUsize,
    /// Keeps the registry from answering.
    slow: tokio::sync::Mutex<()>,
}

impl FakeImages {
    fn mounted(&self) -> Vec<PathBuf> {
        self.mounted.lock().unwrap().keys().cloned().collect()
    }
}

#[async_trait]
impl Images for FakeImages {
    async fn check(&self, image: &Image) -> std::result::Result<(), Box<dyn Error + Send + Sync>> {
        self.checks.fetch_add(1, Ordering::SeqCst);
        drop(self.slow.lock().await);
        if image.reference.starts_with("hangs") {
            std::future::pending::<()>().await;
        }
        if image.reference.contains("unreachable") { Err("no route to it".into()) } else { Ok(()) }
    }

    async fn admit(&self, image: &Image) -> std::result::Result<(), Box<dyn Error + Send + Sync>> {
        if image.reference.contains("unsigned") { Err("it is not signed".into()) } else { Ok(()) }
    }

    /// Images with this prefix list the bootstrap of others as data.
    async fn data_layers(
        &self,
        image: &Image,
    ) -> std::result::Result<Vec<String>, Box<dyn Error + Send + Sync>> {
        let listed = if image.reference.starts_with("greedy") { 2 } else { 1 };
        Ok(["sha256:data", "sha256:boot"][..listed].iter().map(|&layer| layer.to_owned()).collect())
    }

    /// Images with this prefix have another layer as bootstrap.
    async fn bootstrap_layer(
        &self,
        image: &Image,
    ) -> std::result::Result<String, Box<dyn Error + Send + Sync>> {
        let other = image.reference.starts_with("evil");
        Ok(if other { "sha256:other" } else { "sha256:boot" }.to_owned())
    }

    /// Images with this prefix can be shown as they are: one layer, or two.
    async fn ordinary_layer(
        &self,
        image: &Image,
        layer: &str,
        namespace: &str,
    ) -> std::result::Result<Option<CoveredLayers>, Box<dyn Error + Send + Sync>> {
        assert_eq!(namespace, "k8s.io");
        if image.reference.contains("unreachable") {
            return Err("no route to it".into());
        }
        let is_shown = image.reference.starts_with("indexed");
        let layers = ["sha256:lower", "sha256:upper"].into_iter().zip(1..);
        let found = layers.filter(|_| is_shown).find(|(name, _)| *name == layer);
        Ok(found.map(|(_, count)| CoveredLayers { count, is_lazy_image: false }))
    }

    async fn mount(
        &self,
        image: &Image,
        at: &Path,
    ) -> std::result::Result<(), Box<dyn Error + Send + Sync>> {
        if image.reference.contains("damaged") {
            return Err("its bootstrap is damaged".into());
        }
        assert!(at.is_dir(), "{}", at.display());
        let mut mounted = self.mounted.lock().unwrap();
        let known = mounted.remove(at).and_then(|known| known.login);
        let login = image.login.clone().or(known);
        mounted.insert(at.to_owned(), Image { login, ..image.clone() });
        Ok(())
    }

    async fn unmount(&self, at: &Path) -> std::result::Result<(), Box<dyn Error + Send + Sync>> {
        self.mounted.lock().unwrap().remove(at);
        Ok(())
    }

    async fn occupied(&self, at: &Path) -> (u64, u64) {
        (if self.mounted().contains(&at.to_owned()) { 4096 } else { 0 }, 7)
    }

    async fn removed(&self, image: &Image) {
        self.removed.lock().unwrap().push(image.reference.clone());
    }
}

struct Rig {
    directory: tempfile::TempDir,
    images: Arc<FakeImages>,
    snapshotter: Snapshotter,
}

impl Rig {
    async fn new() -> Self {
        Self::of(Form::Files).await
    }

    async fn of(form: Form) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let images = Arc::new(FakeImages::default());
        let snapshotter = Snapshotter::open(directory.path(), images.clone(), form).await.unwrap();
        Rig { directory, images, snapshotter }
    }

    /// Another process opens the state that this one left.
    async fn reopened(self) -> Self {
        let Rig { directory, images, snapshotter } = self;
        let mut local = snapshotter.local;
        // The trash may be being emptied.
        while let Err(shared) = Arc::try_unwrap(local) {
            local = shared;
            tokio::task::yield_now().await;
        }
        let snapshotter =
            Snapshotter::open(directory.path(), images.clone(), Form::Files).await.unwrap();
        Rig { directory, images, snapshotter }
    }

    /// The directory of the snapshots' files.
    fn root(&self) -> PathBuf {
        self.directory.path().join("snapshots")
    }

    /// The mountpoint of a snapshot's image.
    fn place(&self, number: u64) -> PathBuf {
        self.directory.path().join(format!("lazy/{number}/fs"))
    }

    /// Numbers of the directories that are there.
    fn numbers(&self) -> Vec<u64> {
        let entries = fs::read_dir(self.root()).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut numbers: Vec<_> = names.filter_map(|name| name.parse().ok()).collect();
        numbers.sort_unstable();
        numbers
    }

    /// The options of a snapshot's only mount, with the directory taken out.
    async fn mount(&self, key: &str) -> String {
        let [mount] = &self.mounts(key).await[..] else { panic!() };
        mount.clone()
    }

    /// The same of each.
    async fn mounts(&self, key: &str) -> Vec<String> {
        let mounts = self.snapshotter.mounts(key.to_owned()).await.unwrap();
        let text = |mount: Mount| {
            let options: Vec<_> =
                mount.options.iter().filter(|o| *o != "index=off").map(String::as_str).collect();
            let text = format!("{} {} {}", mount.r#type, mount.source, options.join(","));
            let text = text.replace(self.root().to_str().unwrap(), "R");
            text.replace(self.directory.path().join("lazy").to_str().unwrap(), "L")
        };
        mounts.into_iter().map(text).collect()
    }

    /// One layer of a lazy image.
    async fn layer(&self, key: &str, parent: &str, labels: &[(&str, &str)]) -> SnapshotError {
        let wanted = wanted(key, parent, labels);
        self.snapshotter.prepare(wanted).await.unwrap_err()
    }

    async fn lazy(&self, reference: &str) -> SnapshotError {
        self.lazy_with(reference, &[]).await
    }

    /// With more labels on each layer.
    async fn lazy_with(&self, reference: &str, more: &[(&str, &str)]) -> SnapshotError {
        let error = self.lazy_layer(DATA, "sha256:data", "", reference, more).await;
        assert!(matches!(error, SnapshotError::AlreadyExists(_)), "{error}");
        self.lazy_layer(BOOTSTRAP, "sha256:boot", "sha256:data", reference, more).await
    }

    /// One layer of an image, which has its reference for a manifest digest.
    async fn lazy_layer(
        &self,
        kind: &str,
        target: &str,
        parent: &str,
        reference: &str,
        more: &[(&str, &str)],
    ) -> SnapshotError {
        let labels = [(TARGET, target), (kind, "true"), (IMAGE, reference), (MANIFEST, reference)];
        let key = format!("ns/1/extract {target}");
        self.layer(&key, parent, &[&labels, more].concat()).await
    }
}

/// As containerd asks: the key of a layer ends with its target.
fn wanted(key: &str, parent: &str, labels: &[(&str, &str)]) -> Wanted {
    let target = labels.iter().find(|(label, _)| *label == TARGET);
    Wanted {
        key: target.map_or(key.to_owned(), |(_, target)| format!("{key} {target}")),
        parent: Some(parent.to_owned()).filter(|parent| !parent.is_empty()),
        labels: labels.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect(),
    }
}

async fn layers(rig: &Rig, names: &[&str]) {
    let mut parent = "";
    for name in names {
        rig.snapshotter.prepare(wanted("key", parent, &[])).await.unwrap();
        rig.snapshotter.commit("key".into(), (*name).into(), None, Labels::new()).await.unwrap();
        parent = name;
    }
}

#[tokio::test]
async fn ordinary_layers_are_mounted_as_overlayfs_does() {
    let rig = Rig::new().await;
    layers(&rig, &["one", "two"]).await;
    for (kind, parent, expected) in [
        (Kind::Active, "", "bind R/3/fs rw,rbind"),
        (Kind::View, "", "bind R/4/fs ro,rbind"),
        (Kind::View, "one", "bind R/1/fs ro,rbind"),
        (Kind::Active, "one", "overlay overlay workdir=R/6/work,upperdir=R/6/fs,lowerdir=R/1/fs"),
        (Kind::View, "two", "overlay overlay lowerdir=R/2/fs:R/1/fs"),
        (
            Kind::Active,
            "two",
            "overlay overlay workdir=R/8/work,upperdir=R/8/fs,lowerdir=R/2/fs:R/1/fs",
        ),
    ] {
        let key = format!("{kind:?} {parent}");
        rig.snapshotter.create(wanted(&key, parent, &[]), kind).await.unwrap();
        assert_eq!(rig.mount(&key).await, expected, "{key}");
    }
    let error = rig.snapshotter.mounts("one".to_owned()).await.unwrap_err();
    assert_eq!(error.to_string(), "snapshot one is not active");
    assert!(rig.images.mounted().is_empty());
}

/// As containerd's own EROFS snapshotter has it, which runtimes of virtual machines know.
#[tokio::test]
async fn a_lazy_image_is_disks_for_virtual_machines() {
    let rig = Rig::of(Form::Disks).await;
    rig.lazy("r/app:lazy").await;
    for name in ["bootstrap", "blob-1", "blob-2"] {
        fs::write(rig.place(2).join(name), "").unwrap();
    }
    for (kind, key) in [(Kind::Active, "container"), (Kind::View, "view")] {
        rig.snapshotter.create(wanted(key, "sha256:boot", &[]), kind).await.unwrap();
    }
    let disk = "erofs L/2/fs/bootstrap ro,loop,device=L/2/fs/blob-1,device=L/2/fs/blob-2";
    let overlay = "format/mkdir/overlay overlay workdir=R/3/work,upperdir=R/3/fs,\
         lowerdir={{ mount 0 }}";
    assert_eq!(rig.mounts("container").await, [disk, overlay]);
    assert_eq!(rig.mounts("view").await, [disk]);
    // An ordinary image has files, as anywhere.
    layers(&rig, &["one"]).await;
    rig.snapshotter.create(wanted("other", "one", &[]), Kind::View).await.unwrap();
    assert!(rig.mount("other").await.starts_with("bind R/"));
    // What is built on a lazy image has both.
    rig.snapshotter.commit("container".into(), "built".into(), None, Labels::new()).await.unwrap();
    let error = rig.snapshotter.prepare(wanted("above", "built", &[])).await.unwrap_err();
    assert!(error.to_string().contains("the layer built lies on top"), "{error}");
}

#[tokio::test]
async fn a_lazy_image_is_one_mount_below_its_containers() {
    let rig = Rig::new().await;
    let error = rig.lazy("r/app:lazy").await;
    assert_eq!(error.to_string(), "snapshot sha256:boot already exists");
    assert_eq!(rig.images.mounted(), [rig.place(2)]);
    let usage = rig.snapshotter.usage("sha256:boot".to_owned()).await.unwrap();
    assert_eq!(usage, Usage { size: 4096, inodes: 7 });
    // containerd looks for it so.
    let filters = ["labels.\"containerd.io/snapshot.ref\"==\"sha256:boot\",parent==sha256:data"];
    let found = rig.snapshotter.list(&filters.map(str::to_owned)).await.unwrap();
    assert_eq!(found[0].name, "sha256:boot");
    // Another name space pulls it, too.
    assert!(matches!(rig.lazy("r/app:lazy").await, SnapshotError::AlreadyExists(_)));
    assert_eq!(rig.numbers(), [1, 2]);
    rig.snapshotter.prepare(wanted("c", "sha256:boot", &[])).await.unwrap();
    let container = "overlay overlay workdir=R/3/work,upperdir=R/3/fs,lowerdir=L/2/fs";
    assert_eq!(rig.mount("c").await, container);
    // A commit on top is an ordinary layer.
    rig.snapshotter.commit("c".into(), "derived".into(), None, Labels::new()).await.unwrap();
    rig.snapshotter.view(wanted("v", "derived", &[])).await.unwrap();
    assert_eq!(rig.mount("v").await, "overlay overlay lowerdir=R/3/fs:L/2/fs");
    rig.snapshotter.view(wanted("w", "sha256:boot", &[])).await.unwrap();
    assert_eq!(rig.mount("w").await, "bind L/2/fs ro,rbind");
    // The machine was started again.
    rig.images.mounted.lock().unwrap().clear();
    let rig = rig.reopened().await;
    assert_eq!(rig.mount("v").await, "overlay overlay lowerdir=R/3/fs:L/2/fs");
    assert_eq!(rig.images.mounted(), [rig.place(2)]);
    for key in ["v", "w", "derived", "sha256:boot", "sha256:data"] {
        assert!(rig.images.removed.lock().unwrap().is_empty() || key == "sha256:data");
        rig.snapshotter.remove(key.to_owned()).await.unwrap();
    }
    assert_eq!(*rig.images.removed.lock().unwrap(), ["r/app:lazy"]);
    assert!(rig.images.mounted().is_empty());
    assert!(rig.numbers().is_empty());
}

#[tokio::test]
async fn an_image_that_cannot_be_used_says_why_and_leaves_nothing() {
    for (reference, why) in
        [("r/unreachable:1", "no route to it"), ("r/damaged:1", "its bootstrap is damaged")]
    {
        let rig = Rig::new().await;
        let error = rig.lazy(reference).await;
        assert_eq!(error.to_string(), format!("image {reference} cannot be used: {why}"));
        assert_eq!(rig.numbers(), [1], "the data layer alone");
        assert_eq!(rig.snapshotter.list(&[]).await.unwrap().len(), 1);
        assert!(rig.images.mounted().is_empty());
    }
}

#[tokio::test]
async fn pull_secret_reaches_the_mounter_alone() {
    let rig = Rig::new().await;
    let user = "containerd.io/snapshot/pullusername";
    let secret = "containerd.io/snapshot/pullsecret";
    let login = |rig: &Rig| {
        let images = rig.images.mounted.lock().unwrap();
        images.values().next().unwrap().login.as_ref().map(|login| login.secret.clone())
    };
    for newest in ["hush-1", "hush-2"] {
        let labels = [(user, "joe-the-user"), (secret, newest)];
        let error = rig.lazy_with("r/app:lazy", &labels).await;
        assert_eq!(error.to_string(), "snapshot sha256:boot already exists");
        assert_eq!(login(&rig).as_deref(), Some(newest));
        rig.snapshotter.prepare(wanted("k", "sha256:boot", &labels)).await.unwrap();
        let labels = labels.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
        rig.snapshotter
            .commit("k".into(), newest.replace("hush", "c"), None, labels)
            .await
            .unwrap();
    }
    let labels = Labels::from([(secret.to_owned(), "hush".to_owned())]);
    let fields = [format!("labels.{secret}")];
    rig.snapshotter.update("c-1".into(), labels.clone(), fields.into()).await.unwrap();
    rig.snapshotter.update("c-2".into(), labels, Vec::new()).await.unwrap();
    let shown = format!("{:?} {:?}", rig.snapshotter.list(&[]).await.unwrap(), rig.snapshotter);
    let rig = rig.reopened().await;
    let database = fs::read(rig.root().join("metadata.redb")).unwrap();
    for text in [shown.as_bytes(), &database] {
        for hidden in ["hush", "joe-the-user"] {
            assert!(!text.windows(hidden.len()).any(|part| part == hidden.as_bytes()), "{hidden}");
        }
    }
    // A pull without a login keeps the known one.
    assert!(matches!(rig.lazy("r/app:lazy").await, SnapshotError::AlreadyExists(_)));
    assert_eq!(login(&rig).as_deref(), Some("hush-2"));
    // The machine was started again: the mounter has to remember.
    rig.images.mounted.lock().unwrap().clear();
    rig.snapshotter.prepare(wanted("k", "sha256:boot", &[])).await.unwrap();
    assert_eq!(login(&rig), None);
}

#[tokio::test]
async fn leftovers_of_a_crash_are_removed() {
    let rig = Rig::new().await;
    layers(&rig, &["one"]).await;
    rig.snapshotter.prepare(wanted("gone", "one", &[])).await.unwrap();
    let path = rig.root();
    // A crash between the removal of a snapshot and that of its files; and a directory whose record
    // was never written.
    rig.snapshotter.local.store.remove("gone").unwrap();
    fs::create_dir_all(path.join("7/fs")).unwrap();
    fs::create_dir_all(rig.place(8)).unwrap();
    rig.images.mounted.lock().unwrap().insert(
        path.join("7/fs"),
        Image { reference: "r/a:1".to_owned(), manifest_digest: None, layers: None, login: None },
    );
    let rig = rig.reopened().await;
    assert_eq!(rig.numbers(), [1]);
    assert!(rig.images.mounted().is_empty());
    // The number of an unwritten record is reused, and its remains are replaced.
    fs::create_dir_all(path.join("3/fs/old")).unwrap();
    rig.snapshotter.prepare(wanted("new", "one", &[])).await.unwrap();
    assert_eq!(rig.numbers(), [1, 3]);
    assert!(!path.join("3/fs/old").exists());
    // A directory that could not be unmounted when it was removed.
    fs::create_dir_all(path.join("9/fs")).unwrap();
    rig.snapshotter.clean_up().await.unwrap();
    assert_eq!(rig.numbers(), [1, 3]);
    // An image was being mounted.
    let image = Some(Image {
        reference: "r/a:1".to_owned(),
        manifest_digest: None,
        layers: None,
        login: None,
    });
    let new =
        New { name: "half".into(), parent: None, kind: Kind::Active, labels: Labels::new(), image };
    rig.snapshotter.local.create(new).unwrap();
    assert_eq!(rig.numbers(), [1, 3, 4]);
    let rig = rig.reopened().await;
    assert_eq!(rig.numbers(), [1, 3]);
    rig.snapshotter.clean_up().await.unwrap();
    assert_eq!(fs::read_dir(path.join("trash")).unwrap().count(), 0);
}

#[tokio::test]
async fn an_image_does_not_wait_for_the_registry_of_another_one_that_claims_its_layer() {
    let rig = Arc::new(Rig::new().await);
    let pull = |key: &'static str, reference: &'static str| {
        let labels = [
            (TARGET, "sha256:boot"),
            (BOOTSTRAP, "true"),
            (IMAGE, reference),
            (MANIFEST, reference),
        ];
        let rig = rig.clone();
        tokio::spawn(async move { rig.layer(key, "", &labels).await })
    };
    let hangs = pull("ns/1/extract boot", "hangs/app:1");
    while rig.images.checks.load(Ordering::SeqCst) == 0 {
        tokio::task::yield_now().await;
    }
    let pulled = pull("ns/2/extract boot", "r/app:1");
    let pulled = tokio::time::timeout(Duration::from_secs(60), pulled).await;
    let error = pulled.expect("it waits for nothing").unwrap();
    assert!(matches!(error, SnapshotError::AlreadyExists(_)), "{error}");
    hangs.abort();
}

#[tokio::test]
async fn of_two_images_with_a_layer_the_second_one_uses_what_the_first_one_brought() {
    let rig = Arc::new(Rig::new().await);
    let slow = rig.images.slow.lock().await;
    let pull = |key: &'static str, reference: &'static str| {
        let labels =
            [(TARGET, "sha256:boot"), (BOOTSTRAP, "true"), (IMAGE, reference), (MANIFEST, "same")];
        let rig = rig.clone();
        tokio::spawn(async move { rig.layer(key, "", &labels).await })
    };
    let both = [pull("ns/1/extract boot", "r/app:1"), pull("ns/2/extract boot", "mirror/app:1")];
    while rig.images.checks.load(Ordering::SeqCst) < 2 {
        tokio::task::yield_now().await;
    }
    drop(slow);
    for pulled in both {
        let error = pulled.await.unwrap();
        assert!(matches!(error, SnapshotError::AlreadyExists(_)), "{error}");
    }
    let all = rig.snapshotter.list(&[]).await.unwrap();
    assert_eq!(
        all.iter().map(|snapshot| snapshot.name.as_str()).collect::<Vec<_>>(),
        ["sha256:boot"]
    );
}

#[tokio::test]
#[expect(clippy::await_holding_lock, reason = "a deletion holds it for as long as that takes")]
async fn removal_takes_the_same_time_however_much_is_there() {
    let rig = Rig::new().await;
    rig.snapshotter.prepare(wanted("k", "", &[])).await.unwrap();
    let path = rig.root();
    for number in 0..1000 {
        fs::write(path.join("1/fs").join(number.to_string()), "x").unwrap();
    }
    let usage = rig.snapshotter.usage("k".to_owned()).await.unwrap();
    assert_eq!(usage.inodes, 1001);
    assert!(usage.size >= 1000 * 512, "{usage:?}");
    // While another task empties the trash, which takes as long as it takes.
    let emptying = rig.snapshotter.local.hold_emptying();
    rig.snapshotter.remove("k".to_owned()).await.unwrap();
    assert!(rig.numbers().is_empty());
    assert_eq!(fs::read_dir(path.join("trash")).unwrap().count(), 1);
    drop(emptying);
    rig.snapshotter.clean_up().await.unwrap();
    assert_eq!(fs::read_dir(path.join("trash")).unwrap().count(), 0);
}

/// Whatever is asked for at the same time: one mount, and the registry is asked once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_mounts_of_an_image_share_one() {
    for (reference, mounts) in [("r/app:lazy", 1), ("r/unreachable:1", 0)] {
        let rig = Arc::new(Rig::new().await);
        let slow = rig.images.slow.lock().await;
        let asked: Vec<_> = (0..50)
            .map(|number| {
                let rig = rig.clone();
                let key = format!("ns/{number}/extract boot");
                let labels = [
                    (TARGET, "sha256:boot"),
                    (BOOTSTRAP, "true"),
                    (IMAGE, reference),
                    (MANIFEST, reference),
                ];
                tokio::spawn(async move { rig.layer(&key, "", &labels).await })
            })
            .collect();
        // Other requests are served meanwhile, and wait for neither the registry nor the 50.
        layers(&rig, &["one", "two"]).await;
        rig.snapshotter.prepare(wanted("c", "two", &[])).await.unwrap();
        rig.snapshotter.remove("c".to_owned()).await.unwrap();
        while rig.images.checks.load(Ordering::SeqCst) == 0 {
            tokio::task::yield_now().await;
        }
        // By now all of them are queued, or see the result.
        drop(slow);
        for asked in asked {
            let error = asked.await.unwrap();
            match error {
                SnapshotError::AlreadyExists(_) => assert_eq!(mounts, 1),
                SnapshotError::Image { source, .. } => {
                    assert_eq!(source.to_string(), "no route to it")
                }
                error => panic!("{error}"),
            }
        }
        assert_eq!(rig.images.mounted().len(), mounts);
        if mounts == 1 {
            assert_eq!(rig.images.checks.load(Ordering::SeqCst), 1);
        }
        assert_eq!(rig.snapshotter.list(&[]).await.unwrap().len(), 2 + mounts);
        assert_eq!(rig.numbers().len(), 2 + mounts);
    }
}

/// Requests of all kinds, for the same and for different keys: each is done wholly or refused.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_do_not_disturb_each_other() {
    let rig = Arc::new(Rig::new().await);
    layers(&rig, &["base"]).await;
    let clients = (0..4).map(|client| {
        let rig = rig.clone();
        tokio::spawn(async move {
            for round in 0..5 {
                let own = format!("own-{client}-{round}");
                rig.snapshotter.prepare(wanted(&own, "base", &[])).await.unwrap();
                let made = rig.snapshotter.prepare(wanted("shared", "base", &[])).await;
                let named =
                    rig.snapshotter.commit("shared".into(), "named".into(), None, Labels::new());
                let named = named.await;
                let all = rig.snapshotter.list(&[]).await.unwrap();
                assert!(all.iter().any(|snapshot| snapshot.name == own));
                let removed = rig.snapshotter.remove("named".to_owned()).await;
                for error in [made.err(), named.err(), removed.err()].into_iter().flatten() {
                    let expected = matches!(
                        error,
                        SnapshotError::AlreadyExists(_) | SnapshotError::NotFound(_)
                    );
                    assert!(expected, "{error}");
                }
                rig.snapshotter.clean_up().await.unwrap();
                rig.snapshotter.remove(own).await.unwrap();
            }
        })
    });
    for client in clients.collect::<Vec<_>>() {
        client.await.unwrap();
    }
    for name in ["shared", "named"] {
        let _ = rig.snapshotter.remove(name.to_owned()).await;
    }
    rig.snapshotter.clean_up().await.unwrap();
    assert_eq!(rig.numbers(), [1]);
    assert_eq!(fs::read_dir(rig.root().join("trash")).unwrap().count(), 0);
    assert!(rig.snapshotter.local.store.removed().unwrap().is_empty());
}

/// A container can nest directories deeper than a path is long and than a stack is.
#[tokio::test]
async fn deep_directories_are_deleted() {
    use rustix::fs::{CWD, Mode, OFlags, mkdirat, openat};
    let rig = Rig::new().await;
    rig.snapshotter.prepare(wanted("k", "", &[])).await.unwrap();
    let flags = OFlags::RDONLY | OFlags::DIRECTORY;
    let mut at = openat(CWD, rig.root().join("1/fs"), flags, Mode::empty()).unwrap();
    for _ in 0..20_000 {
        mkdirat(&at, "d", Mode::RWXU).unwrap();
        at = openat(&at, "d", flags, Mode::empty()).unwrap();
    }
    let usage = rig.snapshotter.usage("k".to_owned()).await.unwrap();
    assert!(usage.inodes > 1000, "{usage:?}");
    rig.snapshotter.remove("k".to_owned()).await.unwrap();
    rig.snapshotter.clean_up().await.unwrap();
    assert_eq!(fs::read_dir(rig.root().join("trash")).unwrap().count(), 0);
}

#[tokio::test]
async fn user_namespaces_are_options_of_the_mount() {
    let rig = Rig::new().await;
    layers(&rig, &["one"]).await;
    let labels = [
        ("containerd.io/snapshot/uidmapping", "0:7:65536"),
        ("containerd.io/snapshot/gidmapping", "0:8:65536"),
    ];
    let mapped = "uidmap=0:7:65536,gidmap=0:8:65536";
    rig.snapshotter.prepare(wanted("c", "one", &[])).await.unwrap();
    let plain = rig.mount("c").await;
    let root = rustix::process::geteuid().is_root();
    if !root {
        return;
    }
    rig.snapshotter.prepare(wanted("m", "one", &labels)).await.unwrap();
    let expected = plain
        .replace("R/2", "R/3")
        .replace("overlay overlay ", &format!("overlay overlay {mapped},"));
    assert_eq!(rig.mount("m").await, expected);
    let owner = fs::metadata(rig.root().join("3/fs")).unwrap();
    assert_eq!(
        (std::os::unix::fs::MetadataExt::uid(&owner), std::os::unix::fs::MetadataExt::gid(&owner)),
        (7, 8)
    );
    rig.snapshotter.view(wanted("v", "one", &labels)).await.unwrap();
    assert_eq!(rig.mount("v").await, format!("bind R/1/fs {mapped},ro,rbind"));
    // A layer's labels may be annotations of the image, so the layer belongs to the owner of its
    // parent.
    let layer = [&labels[..], &[(TARGET, "sha256:layer")]].concat();
    rig.snapshotter.prepare(wanted("layer", "", &layer)).await.unwrap();
    assert!(!rig.mount("layer sha256:layer").await.contains("uidmap"));
    let number = rig.snapshotter.local.store.get("layer sha256:layer").unwrap().number;
    let owner = fs::metadata(rig.snapshotter.local.directories.fs(number)).unwrap();
    assert_eq!(std::os::unix::fs::MetadataExt::uid(&owner), 0);
    // A copy of which containerd has changed every owner is not mapped again.
    rig.snapshotter.prepare(wanted("sha256:x-remap", "one", &[])).await.unwrap();
    rig.snapshotter
        .commit("sha256:x-remap".into(), "copy".into(), None, Labels::new())
        .await
        .unwrap();
    rig.snapshotter.prepare(wanted("n", "copy", &labels)).await.unwrap();
    assert!(!rig.mount("n").await.contains("uidmap"));
}
