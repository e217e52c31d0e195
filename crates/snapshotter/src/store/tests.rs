use super::*;

fn new(name: &str, parent: &str, kind: Kind) -> New {
    let parent = Some(parent.to_owned()).filter(|parent| !parent.is_empty());
    New { name: name.to_owned(), parent, kind, labels: Labels::new(), image: None }
}

fn labels(pairs: &[(&str, &str)]) -> Labels {
    pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
}

/// What is asked of a store.
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
        Commit(key, name) => store.commit(key, name, Labels::new(), Usage::default()),
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
        (Commit("a", "base"), "snapshot base already exists"),
        (Commit("base", "again"), "snapshot base is not active"),
        // The number of a creation that failed is free again, that of a removed one is not.
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
    assert_eq!(store.create(new("a", "", Active), |_| Ok(())).unwrap().number, 1);
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
    store.commit("k", "n", labels(&[("b", "2")]), usage).unwrap();
    let snapshot = store.get("n").unwrap();
    assert_eq!((snapshot.labels, snapshot.usage), (labels(&[("b", "2")]), usage));
    assert!(matches!(store.get("k"), Err(SnapshotError::NotFound(_))));
}
