//! Names of lazy images' layers, and the snapshots allowed on top of them.

use super::*;

/// The configuration's claims are compared with the actual layers.
#[tokio::test]
async fn layer_of_another_image_is_refused_and_leaves_nothing() {
    let rig = Rig::new().await;
    let error = rig.lazy_layer(DATA, "sha256:base", "", "r/app:1", &[]).await.to_string();
    assert!(
        error.contains("image r/app:1") && error.contains("calls a layer sha256:base"),
        "{error}"
    );
    assert!(error.contains("the layer is sha256:data"), "{error}");
    // In the order that no lazy image has: the bootstrap first.
    let error = rig.lazy_layer(BOOTSTRAP, "sha256:base", "", "r/app:1", &[]).await.to_string();
    assert!(error.contains("the layer is sha256:boot"), "{error}");
    assert!(rig.snapshotter.list(&[]).await.unwrap().is_empty());
    let error = rig.lazy("evil/app:1").await.to_string();
    assert!(
        error.contains("calls a layer sha256:boot") && error.contains("is sha256:other"),
        "{error}"
    );
    assert_eq!(rig.numbers().len(), 1, "the data layer alone");
    assert!(rig.images.mounted().is_empty());
    // An image gets its own layer, also when others have it under another manifest.
    for (reference, wins) in [("r/app:1", true), ("r/app:2", true), ("evil/app:1", false)] {
        let error = rig.lazy(reference).await;
        assert_eq!(matches!(error, SnapshotError::AlreadyExists(_)), wins, "{error}");
    }
    // Data of images without a snapshot is forgotten.
    assert_eq!(
        *rig.images.removed.lock().unwrap(),
        ["r/app:1", "r/app:1", "evil/app:1", "r/app:2", "evil/app:1"]
    );
}

#[tokio::test]
async fn name_of_a_layer_of_another_kind_is_refused() {
    let rig = Rig::new().await;
    let error = rig.lazy_layer(DATA, "sha256:boot", "", "greedy/app:1", &[]).await;
    assert!(matches!(error, SnapshotError::AlreadyExists(_)), "{error}");
    let error = rig.lazy("r/app:1").await.to_string();
    assert!(error.contains("image r/app:1") && error.contains("from greedy/app:1"), "{error}");
    rig.snapshotter.remove("sha256:boot".to_owned()).await.unwrap();
    assert!(matches!(rig.lazy("r/app:1").await, SnapshotError::AlreadyExists(_)));
    let error = rig.lazy_layer(DATA, "sha256:boot", "", "greedy/app:1", &[]).await.to_string();
    assert!(error.contains("image greedy/app:1") && error.contains("from r/app:1"), "{error}");
}

/// Data layers have no files: on top of them alone, an image would run without its base.
#[tokio::test]
async fn nothing_is_shown_on_top_of_data_alone() {
    let rig = Rig::new().await;
    let error = rig.lazy_layer(DATA, "sha256:data", "", "r/app:1", &[]).await;
    assert!(matches!(error, SnapshotError::AlreadyExists(_)), "{error}");
    // A container of an earlier version, and a layer on top.
    let new = |name: &str, parent: &str| New {
        name: name.into(),
        parent: Some(parent.into()),
        kind: Kind::Active,
        labels: Labels::new(),
        image: None,
    };
    let store = &rig.snapshotter.local.store;
    store.create(new("k", "sha256:data"), |_| Ok(())).unwrap();
    store.commit("k", "on-top", None, Labels::new(), Usage::default()).unwrap();
    store.create(new("c", "on-top"), |_| Ok(())).unwrap();
    for parent in ["sha256:data", "on-top"] {
        let errors = [
            rig.snapshotter.prepare(wanted("p", parent, &[])).await.unwrap_err(),
            rig.snapshotter.view(wanted("v", parent, &[])).await.unwrap_err(),
            rig.snapshotter.mounts("c".to_owned()).await.unwrap_err(),
        ];
        for error in errors {
            let text = error.to_string();
            assert!(matches!(error, SnapshotError::NoFiles { .. }), "{text}");
            assert!(text.contains("sha256:data") && text.contains("r/app:1"), "{text}");
        }
    }
    // With its image above, the layer is valid.
    let error = rig.lazy_layer(BOOTSTRAP, "sha256:boot", "sha256:data", "r/app:1", &[]).await;
    assert!(matches!(error, SnapshotError::AlreadyExists(_)), "{error}");
    rig.snapshotter.view(wanted("v", "sha256:boot", &[])).await.unwrap();
}

/// An image that an earlier version committed is proven when it is used again.
#[tokio::test]
async fn unproven_image_is_proven_or_refused() {
    for (reference, good) in [("r/app:1", true), ("evil/app:1", false)] {
        let rig = Rig::new().await;
        layers(&rig, &["base"]).await;
        let image = Image {
            reference: reference.into(),
            manifest_digest: Some("d".into()),
            layers: None,
            login: None,
        };
        let new = New {
            name: "sha256:boot".into(),
            parent: Some("base".into()),
            kind: Kind::Committed,
            labels: Labels::new(),
            image: Some(image),
        };
        let local = &rig.snapshotter.local;
        local.create(new).unwrap();
        let child = New {
            name: "c".into(),
            parent: Some("sha256:boot".into()),
            kind: Kind::Active,
            labels: Labels::new(),
            image: None,
        };
        local.create(child).unwrap();
        assert!(!local.store.get("sha256:boot").unwrap().proven);
        let made = rig.snapshotter.prepare(wanted("new", "sha256:boot", &[])).await;
        let mounted = rig.snapshotter.mounts("c".to_owned()).await;
        for result in [made, mounted] {
            match result {
                Ok(_) => assert!(good),
                Err(error) => {
                    let text = error.to_string();
                    assert!(!good && text.contains("evil/app:1"), "{text}");
                }
            }
        }
        assert_eq!(local.store.get("sha256:boot").unwrap().proven, good);
        assert_eq!(rig.images.mounted().len(), usize::from(good));
        // Another image with this layer doesn't get the files of an image without it.
        let error = rig.lazy_layer(BOOTSTRAP, "sha256:boot", "base", "r/other:1", &[]).await;
        assert_eq!(matches!(error, SnapshotError::AlreadyExists(_)), good, "{error}");
    }
}

/// An image that may not run gets no snapshot of another image that has the same layers.
#[tokio::test]
async fn image_that_may_not_run_does_not_get_the_layers_of_one_that_may() {
    let rig = Rig::new().await;
    assert!(matches!(rig.lazy("r/app:1").await, SnapshotError::AlreadyExists(_)));
    let error = rig.lazy("unsigned/app:1").await.to_string();
    assert!(error.contains("it is not signed"), "{error}");
}

/// A layer of an ordinary image, which has its reference for a manifest digest.
fn plain(target: &str, parent: &str, reference: &str) -> Wanted {
    let labels = [(TARGET, target), (IMAGE, reference), (MANIFEST, reference)];
    wanted("k8s.io/1/extract", parent, &labels)
}

#[tokio::test]
async fn layers_of_ordinary_images_are_there_if_they_can_be_shown() {
    let rig = Rig::new().await;
    let snapshotter = &rig.snapshotter;
    for (parent, target) in [("", "sha256:lower"), ("sha256:lower", "sha256:upper")] {
        for _ in 0..2 {
            let error = snapshotter.prepare(plain(target, parent, "indexed/app:1")).await;
            assert!(matches!(error, Err(SnapshotError::AlreadyExists(name)) if name == target));
        }
        // Another image with the layer gets it too, even if this node could not show it by that
        // image.
        let shown = snapshotter.stat(target.to_owned()).await.unwrap();
        assert!(shown.proven && shown.kind == Kind::Committed);
    }
    assert!(rig.images.mounted().is_empty(), "nothing is based on them yet");
    // A container shows the image alone; a layer on top of the lower one shows that.
    snapshotter.prepare(wanted("k8s.io/2/c", "sha256:upper", &[])).await.unwrap();
    snapshotter.prepare(wanted("k8s.io/3/x", "sha256:lower", &[])).await.unwrap();
    assert_eq!(rig.mount("k8s.io/2/c").await.matches("/fs").count(), 2, "upper and lower");
    let mounted = rig.images.mounted.lock().unwrap().clone();
    let mut counts: Vec<_> = mounted.values().map(|image| image.layers).collect();
    counts.sort();
    assert_eq!(counts, [Some(1), Some(2)]);
    // They survive a restart of the service.
    let rig = rig.reopened().await;
    rig.snapshotter.prepare(wanted("k8s.io/4/c", "sha256:upper", &[])).await.unwrap();
    for key in ["k8s.io/2/c", "k8s.io/3/x", "k8s.io/4/c", "sha256:upper", "sha256:lower"] {
        rig.snapshotter.remove(key.to_owned()).await.unwrap();
    }
    assert_eq!(*rig.images.removed.lock().unwrap(), ["indexed/app:1"]);
    assert!(rig.images.mounted().is_empty());
}

#[tokio::test]
async fn layers_without_an_index_are_unpacked() {
    let rig = Rig::new().await;
    for (target, reference) in [
        ("sha256:lower", "unknown/app:1"),
        ("sha256:other", "indexed/app:1"),
        ("sha256:away", "indexed/unreachable:1"),
    ] {
        let mounts = rig.snapshotter.prepare(plain(target, "", reference)).await.unwrap();
        assert_eq!(mounts[0].r#type, "bind", "{reference}");
    }
    // The same layer on top of something else is no snapshot that containerd would find.
    let error = rig.snapshotter.prepare(plain("sha256:lower", "", "indexed/app:1")).await;
    assert!(matches!(error, Err(SnapshotError::AlreadyExists(_))));
    let key = "k8s.io/1/extract sha256:other".to_owned();
    rig.snapshotter.commit(key, "k8s.io/5/base".into(), None, Labels::new()).await.unwrap();
    let wanted = Wanted {
        key: "k8s.io/6/extract sha256:lower".into(),
        ..plain("sha256:lower", "k8s.io/5/base", "indexed/app:1")
    };
    assert_eq!(rig.snapshotter.prepare(wanted).await.unwrap()[0].r#type, "overlay");
}
