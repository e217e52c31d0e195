use super::*;

fn new(name: &str, parent: &str, kind: Kind) -> New {
    let parent = Some(parent.to_owned()).filter(|parent| !parent.is_empty());
    New { name: name.to_owned(), parent, kind, labels: Labels::new(), image: None }
}

fn labels(pairs: &[(&str, &str)]) -> Labels {
    pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
}

/// A request to the store.
enum Ask {
    Create(&'static str, &'static str, Kind),
    Commit(&'static str, &'static str),
    Remove(&'static str),
}
use Ask::{Commit, Create, Remove};
use Kind::{Active, Committed, View};

fn ask(store: &Store, ask: &Ask) -> String {
    let done = match ask {
        Create(name, parent, kind) => store.create(new(name, parent, *kind), |_| Ok(())),
        Commit(key, name) => store.commit(key, name, None, Labels::new(), Usage::default()),
        Remove(name) => store.remove(name),
    };
    done.map_or_else(|error| error.to_string(), |snapshot| snapshot.number.to_string())
}

/// Every step is taken in a store that has just been opened again, as after a crash.
#[test]
fn steps_are_kept_and_wrong_ones_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("db");
    for (number, (step, expected)) in [
        (Create("a", "", Active), "1"),
        (Create("a", "", Active), "snapshot a already exists"),
        (Create("", "", Active), "a snapshot needs a name"),
        (Create("b", "a", Active), "parent a is not a committed snapshot"),
        (Create("b", "none", Active), "snapshot none does not exist"),
        (Commit("none", "base"), "snapshot none does not exist"),
        (Commit("a", ""), "a snapshot needs a name"),
        (Commit("a", "base"), "1"),
        // A client that asks again did not get the answer.
        (Commit("a", "base"), "1"),
        (Commit("none", "base"), "snapshot base already exists"),
        (Commit("base", "again"), "snapshot base is not active"),
        // The number of a failed creation is free again, that of a removed snapshot is not.
        (Create("b", "base", Active), "2"),
        (Create("v", "base", View), "3"),
        (Commit("v", "x"), "snapshot v is not active"),
        (Create("c", "v", Active), "parent v is not a committed snapshot"),
        (Create("remote", "base", Committed), "4"),
        (Remove("base"), "cannot remove snapshot base: it has children"),
        (Commit("b", "top"), "2"),
        (Remove("remote"), "4"),
        (Remove("v"), "3"),
        (Remove("base"), "cannot remove snapshot base: it has children"),
        (Remove("top"), "2"),
        (Remove("base"), "1"),
        (Remove("base"), "snapshot base does not exist"),
        (Create("a", "", Active), "5"),
    ]
    .into_iter()
    .enumerate()
    {
        let store = Store::open(&path).unwrap();
        assert_eq!(ask(&store, &step), expected, "step {number}");
    }
}

#[test]
fn a_failed_directory_leaves_no_record() {
    let directory = tempfile::tempdir().unwrap();
    let store = Store::open(&directory.path().join("db")).unwrap();
    let failed = store.create(new("a", "", Active), |_| Err(SnapshotError::Panicked));
    assert!(matches!(failed, Err(SnapshotError::Panicked)));
    assert!(matches!(store.get("a"), Err(SnapshotError::NotFound(_))));
    // A failed creation may have left a directory.
    assert_eq!(store.create(new("a", "", Active), |_| Ok(())).unwrap().number, 2);
}

#[test]
fn labels_change_as_fields_say() {
    let directory = tempfile::tempdir().unwrap();
    let store = Store::open(&directory.path().join("db")).unwrap();
    let before = labels(&[("a", "1"), ("b.c", "2"), ("empty", "")]);
    store.create(New { labels: before, ..new("s", "", Active) }, |_| Ok(())).unwrap();
    assert_eq!(store.get("s").unwrap().labels, labels(&[("a", "1"), ("b.c", "2")]));
    for (fields, given, expected) in [
        (&["labels.b.c"][..], &[("a", "x"), ("b.c", "3")][..], &[("a", "1"), ("b.c", "3")][..]),
        (&["labels.a"], &[("a", "")], &[("b.c", "3")]),
        (&["labels.a", "labels.b.c"], &[("a", "4")], &[("a", "4")]),
        (&["labels"], &[("d", "5")], &[("d", "5")]),
        (&[], &[("e", "6"), ("f", "")], &[("e", "6")]),
    ] {
        let fields: Vec<_> = fields.iter().map(|field| (*field).to_owned()).collect();
        let updated = store.update("s", labels(given), &fields).unwrap();
        assert_eq!(updated.labels, labels(expected), "{fields:?}");
        assert_eq!(store.get("s").unwrap(), updated);
    }
    let fields = ["labels.e".to_owned(), "parent".to_owned()];
    let error = store.update("s", labels(&[("e", "7")]), &fields).unwrap_err();
    assert_eq!(error.to_string(), "parent of snapshot s cannot be changed");
    assert_eq!(store.get("s").unwrap().labels, labels(&[("e", "6")]), "all or nothing");
}

#[test]
fn labels_of_a_commit_replace_the_others() {
    let directory = tempfile::tempdir().unwrap();
    let store = Store::open(&directory.path().join("db")).unwrap();
    store
        .create(New { labels: labels(&[("a", "1")]), ..new("k", "", Active) }, |_| Ok(()))
        .unwrap();
    let usage = Usage { size: 4096, inodes: 3 };
    store.commit("k", "n", None, labels(&[("b", "2")]), usage).unwrap();
    let snapshot = store.get("n").unwrap();
    assert_eq!((snapshot.labels, snapshot.usage), (labels(&[("b", "2")]), usage));
    assert!(matches!(store.get("k"), Err(SnapshotError::NotFound(_))));
}

/// The names that containerd counts are of another count once its state was deleted.
#[test]
fn a_new_containerd_gets_its_names() {
    let directory = tempfile::tempdir().unwrap();
    let store = Store::open(&directory.path().join("db")).unwrap();
    let ask = |step: Ask| assert_eq!(ask(&store, &step).parse::<u64>().err(), None, "refused");
    let pull = || {
        ask(Create("ns/1/extract one", "", Active));
        ask(Commit("ns/1/extract one", "ns/2/one"));
        ask(Create("ns/3/extract two", "ns/2/one", Active));
        ask(Commit("ns/3/extract two", "ns/4/two"));
        ask(Create("ns/5/c", "ns/4/two", Active));
    };
    pull();
    pull();
    let chain = |name: &str| {
        let chain = store.chain(name).unwrap().into_iter();
        chain.map(|snapshot| format!("{} {}", snapshot.number, snapshot.name)).collect::<Vec<_>>()
    };
    assert_eq!(chain("ns/5/c"), ["6 ns/5/c", "5 ns/4/two", "4 ns/2/one"]);
    let former = ["3 former:3:ns/5/c", "2 former:2:ns/4/two", "1 former:1:ns/2/one"];
    assert_eq!(chain("former:3:ns/5/c"), former);
    // As the garbage collector does it.
    let error = store.remove("former:2:ns/4/two").unwrap_err();
    assert_eq!(error.to_string(), "cannot remove snapshot former:2:ns/4/two: it has children");
    for name in ["former:3:ns/5/c", "former:2:ns/4/two", "former:1:ns/2/one"] {
        store.remove(name).unwrap();
    }
    assert_eq!(store.all().unwrap().len(), 3);
    let removed = store.removed().unwrap();
    assert_eq!(removed.into_iter().collect::<Vec<_>>(), [(2, vec![1]), (3, vec![1, 2])]);
    store.forget_removed(&[2, 3]).unwrap();
    assert!(store.removed().unwrap().is_empty());
    // Names that are not counted are refused as before.
    let twice = store.create(new("/a/1/b", "", Active), |_| Ok(()));
    twice.and_then(|_| store.create(new("/a/1/b", "", Active), |_| Ok(()))).unwrap_err();
}

#[test]
fn a_parent_can_be_given_at_the_end() {
    let directory = tempfile::tempdir().unwrap();
    let store = Store::open(&directory.path().join("db")).unwrap();
    let commit = |key: &str, parent: &str| {
        let parent = Some(parent.to_owned());
        store.commit(key, &format!("{key}!"), parent, Labels::new(), Usage::default())
    };
    for key in ["a", "b", "c"] {
        store.create(new(key, "", Active), |_| Ok(())).unwrap();
    }
    store.commit("a", "a!", None, Labels::new(), Usage::default()).unwrap();
    assert!(matches!(commit("b", "c"), Err(SnapshotError::ParentNotCommitted(_))));
    assert!(matches!(commit("b", "none"), Err(SnapshotError::NotFound(_))));
    assert_eq!(commit("b", "a!").unwrap().parent.as_deref(), Some("a!"));
    assert!(matches!(store.remove("a!"), Err(SnapshotError::HasChildren(_))));
    store.create(new("d", "a!", Active), |_| Ok(())).unwrap();
    let error = commit("d", "b!").unwrap_err();
    assert_eq!(error.to_string(), "parent of snapshot d cannot be changed");
    assert_eq!(commit("d", "a!").unwrap().parent.as_deref(), Some("a!"));
}

#[test]
fn a_failure_of_the_disk_is_over_when_the_disk_works_again() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("db");
    let store = Store::open(&path).unwrap();
    store.create(new("a", "", Active), |_| Ok(())).unwrap();
    let full = |_: &Database| -> Result<()> {
        Err(std::io::Error::from(std::io::ErrorKind::StorageFull))
            .map_err(|error| redb::Error::Io(error).into())
    };
    let error = store.read(full).unwrap_err().to_string();
    assert!(error.contains(path.to_str().unwrap()), "{error}");
    assert_eq!(store.get("a").unwrap().number, 1);
}

#[test]
fn a_damaged_file_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("snapshots/metadata.redb");
    std::fs::create_dir(path.parent().unwrap()).unwrap();
    drop(Store::open(&path).unwrap());
    let good = std::fs::read(&path).unwrap();
    for damaged in [b"no database at all".repeat(1000), good[..good.len() / 2].to_vec()] {
        std::fs::write(&path, damaged).unwrap();
        let error = Store::open(&path).unwrap_err().to_string();
        let named = format!("the records of snapshots in {}", path.display());
        assert!(error.starts_with(&named), "{error}");
        assert!(error.contains("pull them again"), "{error}");
    }
}

/// The space of removed snapshots is reused.
#[test]
fn the_file_does_not_grow_for_ever() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("db");
    let store = Store::open(&path).unwrap();
    let large = labels(&[("label", &"x".repeat(4000))]);
    let mut sizes = Vec::new();
    for round in 0..3 {
        for number in 0..30 {
            let new = New { labels: large.clone(), ..new("name", "", Active) };
            let name = format!("{}/{round}-{number}", new.name);
            store.create(New { name: name.clone(), ..new }, |_| Ok(())).unwrap();
            store.remove(&name).unwrap();
        }
        sizes.push(std::fs::metadata(&path).unwrap().len());
    }
    assert_eq!(sizes[0], sizes[2], "{sizes:?}");
}
