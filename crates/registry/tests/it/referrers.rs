//! Referrers of a manifest, with and without the API.

use std::{collections::BTreeMap, sync::Arc};

use lazuli_image::{
    Digest,
    oci::{Descriptor, media_type},
};
use lazuli_registry::{
    ImageName, Mirrors, Options, Pull, Referrers, RegistryError, Repository, manifest,
};
use lazuli_testkit::registry::{FakeRegistry, Fault, Logged, Login};
use serde_json::json;

use crate::support::{self, options, push, sha256};

pub(crate) const TYPE: &str = "application/vnd.example.notes.v1";

pub(crate) fn note(text: &str) -> BTreeMap<String, String> {
    BTreeMap::from([("org.example.note".to_owned(), text.to_owned())])
}

/// Pushes an image and returns its descriptor.
pub(crate) async fn image(repository: &dyn Repository) -> Descriptor {
    push(repository, b"{}").await.unwrap();
    let raw = support::manifest(b"{}", &[]);
    repository.push_manifest(raw.into(), media_type::MANIFEST).await.unwrap();
    repository.manifest(None).await.unwrap().descriptor()
}

/// The contract of referrers, for registries with and without the API.
pub(crate) async fn check(repository: &dyn Repository) {
    let subject = image(repository).await;
    let list = |kind: &'static str| repository.referrers(&subject.digest, Some(kind));
    assert_eq!(list(TYPE).await.unwrap(), []);

    let one = repository.push_referrer(&subject, TYPE, &note("one"), None).await.unwrap();
    let found = list(TYPE).await.unwrap();
    assert_eq!(found.len(), 1);
    assert_eq!((found[0].digest, &found[0].annotations), (one, &note("one")));
    assert_eq!(found[0].artifact_type.as_deref(), Some(TYPE));
    assert_eq!(found[0].media_type, media_type::MANIFEST);

    // The same again is the same; others' entries and types stay apart.
    let again = repository.push_referrer(&subject, TYPE, &note("one"), Some(&one)).await.unwrap();
    assert_eq!(again, one);
    let note_x = note("x");
    let other = repository.push_referrer(&subject, "application/x", &note_x, None);
    let other = other.await.unwrap();
    let two = repository.push_referrer(&subject, TYPE, &note("two"), None).await.unwrap();
    let digests = |found: Vec<Descriptor>| {
        let mut digests: Vec<Digest> = found.into_iter().map(|entry| entry.digest).collect();
        digests.sort();
        digests
    };
    let mut both = vec![one, two];
    both.sort();
    assert_eq!(digests(list(TYPE).await.unwrap()), both);
    assert_eq!(digests(list("application/x").await.unwrap()), [other]);

    assert_eq!(repository.referrers(&sha256(b"absent"), Some(TYPE)).await.unwrap(), []);
}

fn paths(server: &FakeRegistry) -> Vec<String> {
    let line = |logged: Logged| {
        let path = logged.target.split('?').next().unwrap_or_default().to_owned();
        let end = path.rsplit('/').nth(1).unwrap_or_default().to_owned();
        format!("{} {end}", logged.method)
    };
    server.log().into_iter().map(line).collect()
}

#[tokio::test]
async fn a_registry_with_the_api_is_asked_once() {
    let server = FakeRegistry::start().unwrap();
    let repository = support::open(&server, "app:1");
    check(&repository).await;
    assert_eq!(server.violations(), Vec::<String>::new());
    let subject = repository.manifest(None).await.unwrap().descriptor();
    assert_eq!(repository.referrers(&subject.digest, Some(TYPE)).await.unwrap().len(), 2);
    // Requests of the first lookup, which also asks for the tag, may arrive after its end.
    let another = sha256(b"another");
    assert_eq!(repository.referrers(&another, Some(TYPE)).await.unwrap().len(), 0);
    let mut log = server.log();
    log.retain(|logged| logged.target.contains(&another.hex()));
    let [asked] = log.as_slice() else { panic!("{log:?}") };
    let expected =
        format!("/v2/app/referrers/{another}?artifactType=application%2Fvnd.example.notes.v1");
    assert_eq!(asked.target, expected);
    let tag = subject.digest.to_string().replace(':', "-");
    assert!(server.manifest("app", &tag).is_none());
}

#[tokio::test]
async fn the_pushed_manifest_is_an_artifact_without_content() {
    let server = FakeRegistry::start().unwrap();
    let repository = support::open(&server, "app:1");
    let subject = image(&repository).await;
    let noted = Descriptor { annotations: note("not part of it"), ..subject.clone() };
    let digest = repository.push_referrer(&noted, TYPE, &note("one"), None).await.unwrap();
    let raw = server.manifest("app", &digest.to_string()).unwrap();
    let empty = json!({"mediaType": "application/vnd.oci.empty.v1+json", "digest": sha256(b"{}"), "size": 2});
    let expected = json!({
        "schemaVersion": 2,
        "mediaType": media_type::MANIFEST,
        "artifactType": TYPE,
        "config": empty,
        "layers": [empty],
        "subject": {"mediaType": media_type::MANIFEST, "digest": subject.digest, "size": subject.size},
        "annotations": note("one"),
    });
    assert_eq!(serde_json::from_slice::<serde_json::Value>(&raw).unwrap(), expected);
    assert_eq!(server.blob("app", &sha256(b"{}")).unwrap(), b"{}");
}

#[tokio::test]
async fn a_registry_without_the_api_is_asked_for_it_once() {
    let server = FakeRegistry::start().unwrap();
    server.without_referrers();
    check(&support::open(&server, "app:1")).await;
    assert_eq!(server.violations(), Vec::<String>::new());

    // With a shared client pool only the tag is asked for.
    let shared = options();
    let open = |name: &str| {
        let name: ImageName = format!("{}/{name}", server.host()).parse().unwrap();
        lazuli_registry::open(&name, &shared).unwrap()
    };
    let repository = open("app:1");
    let subject = repository.manifest(None).await.unwrap().digest;
    server.reset_stats();
    assert_eq!(repository.referrers(&subject, Some(TYPE)).await.unwrap().len(), 2);
    // At once, in either order.
    let mut asked = paths(&server);
    asked.sort();
    assert_eq!(asked, ["GET manifests", "GET referrers"]);
    drop(repository);
    server.reset_stats();
    assert_eq!(open("app:2").referrers(&subject, Some(TYPE)).await.unwrap().len(), 2);
    assert_eq!(open("other:1").referrers(&subject, Some(TYPE)).await.unwrap().len(), 0);
    assert_eq!(paths(&server), ["GET manifests", "GET manifests"]);
}

#[tokio::test]
async fn an_unknown_repository_says_nothing_about_the_api() {
    let server = FakeRegistry::start().unwrap();
    let repository = support::open(&server, "app:1");
    let subject = image(&repository).await;
    repository.push_referrer(&subject, TYPE, &note("one"), None).await.unwrap();
    server.fault("GET", "/referrers/", 1, Fault::Coded(404, "NAME_UNKNOWN"));
    assert_eq!(repository.referrers(&subject.digest, Some(TYPE)).await.unwrap(), []);
    assert_eq!(repository.referrers(&subject.digest, Some(TYPE)).await.unwrap().len(), 1);
}

#[tokio::test]
async fn a_replaced_referrer_is_deleted() {
    for api in [true, false] {
        let server = FakeRegistry::start().unwrap();
        if !api {
            server.without_referrers();
        }
        // Deleting needs a permission of its own.
        server.require(Login::Bearer(String::new(), String::new()));
        let repository = support::open(&server, "app:1");
        let subject = image(&repository).await;
        let push = async |text: &str, old: Option<&Digest>| {
            repository.push_referrer(&subject, TYPE, &note(text), old).await.unwrap()
        };
        let one = push("one", None).await;
        let kept = push("kept", None).await;
        let two = push("two", Some(&one)).await;
        let list = async || {
            let found = repository.referrers(&subject.digest, Some(TYPE)).await.unwrap();
            let mut digests: Vec<Digest> = found.iter().map(|entry| entry.digest).collect();
            digests.sort();
            digests
        };
        let sorted = |mut digests: Vec<Digest>| {
            digests.sort();
            digests
        };
        assert_eq!(list().await, sorted(vec![kept, two]), "api: {api}");
        assert!(server.manifest("app", &one.to_string()).is_none());

        // A registry that deletes nothing still accepts new referrers.
        server.fault("DELETE", "", 1, Fault::Status(405));
        let three = push("three", Some(&two)).await;
        let left = if api { vec![kept, two, three] } else { vec![kept, three] };
        assert_eq!(list().await, sorted(left), "api: {api}");
        assert_eq!(server.violations(), Vec::<String>::new());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn concurrent_pushes_are_all_listed() {
    let server = FakeRegistry::start().unwrap();
    server.without_referrers();
    let repository = Arc::new(support::open(&server, "app:1"));
    let subject = image(&*repository).await;
    let tasks: Vec<_> = (0..3)
        .map(|number| {
            let (repository, subject) = (repository.clone(), subject.clone());
            tokio::spawn(async move {
                let note = note(&number.to_string());
                repository.push_referrer(&subject, TYPE, &note, None).await.unwrap()
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    assert_eq!(repository.referrers(&subject.digest, Some(TYPE)).await.unwrap().len(), 3);
}

#[tokio::test]
async fn lists_have_pages_and_filters_are_ours_as_well() {
    let server = FakeRegistry::start().unwrap();
    let repository = support::open(&server, "app:1");
    let subject = image(&repository).await;
    for number in 0..7 {
        let kind = if number % 2 == 0 { TYPE } else { "application/x" };
        let note = note(&number.to_string());
        repository.push_referrer(&subject, kind, &note, None).await.unwrap();
    }
    server.ignore_artifact_type();
    server.page_referrers(3);
    server.reset_stats();
    assert_eq!(repository.referrers(&subject.digest, Some(TYPE)).await.unwrap().len(), 4);
    assert_eq!(server.stats().requests, 3);

    // A page that fails does not spoil those before it, unless nothing was found there.
    server.page_referrers(6);
    server.reset_stats();
    let link = |target: &str| Fault::Header("link", format!(r#"<{target}>; rel="next""#));
    server.fault("GET", "/referrers/", 1, link("/v2/app/referrers/lost"));
    let found = repository.referrers(&subject.digest, Some(TYPE)).await.unwrap().len();
    assert!((3..=4).contains(&found), "{found}");
    assert_eq!(server.stats().requests, 2);

    // Pages without end, pages that lead in a circle, and pages of others.
    server.page_referrers(1);
    server.reset_stats();
    repository.referrers(&subject.digest, Some(TYPE)).await.unwrap();
    assert_eq!(server.stats().requests, 4);
    server.page_referrers(0);
    let own = server.log()[0].target.clone();
    let elsewhere = FakeRegistry::start().unwrap();
    for target in [own, format!("http://{}/v2/app/referrers/x", elsewhere.host())] {
        server.reset_stats();
        server.fault("GET", "/referrers/", 10, link(&target));
        assert_eq!(repository.referrers(&subject.digest, Some(TYPE)).await.unwrap().len(), 4);
        server.clear_faults();
        assert_eq!((server.stats().requests, elsewhere.stats().requests), (1, 0));
    }
}

#[tokio::test]
async fn hostile_lists_are_errors_or_ignored() {
    let server = FakeRegistry::start().unwrap();
    let repository = support::open(&server, "app:1");
    let subject = image(&repository).await;
    let list = || repository.referrers(&subject.digest, Some(TYPE));
    let instead = |body: &str| server.fault("GET", "/referrers/", 1, Fault::Instead(body.into()));

    instead(&" ".repeat(manifest::DOCUMENT_LIMIT as usize + 1));
    assert!(matches!(list().await, Err(RegistryError::TooLarge { .. })));
    for body in
        ["", "null", "[1,2]", r#"{"schemaVersion":2}"#, r#"{"schemaVersion":2,"manifests":7}"#]
    {
        instead(body);
        assert!(matches!(list().await, Err(RegistryError::Malformed { .. })), "{body}");
    }
    server.fault("GET", "/referrers/", 1, Fault::Status(500));
    assert!(list().await.unwrap_err().is_transient());
    server.fault("GET", "/referrers/", 1, Fault::Status(403));
    assert!(matches!(list().await, Err(RegistryError::Denied { .. })));

    // Thousands of entries, most of them nonsense.
    let entry = |number: u32, size: &str, kind: &str| {
        format!(
            r#"{{"mediaType":"{}","artifactType":"{kind}","size":{size},"digest":"{}"}}"#,
            media_type::MANIFEST,
            sha256(&number.to_le_bytes())
        )
    };
    let mut entries =
        vec!["7".to_owned(), "null".to_owned(), r#"{"digest":"sha512:aa"}"#.to_owned()];
    entries.extend((0..10_000).map(|number| entry(number, "5", "application/x")));
    entries.extend([entry(10_001, "18446744073709551615", TYPE), entry(10_002, "-1", TYPE)]);
    entries.extend((20_000..22_000).map(|number| entry(number, "5", TYPE)));
    instead(&format!(r#"{{"schemaVersion":2,"manifests":[{}]}}"#, entries.join(",")));
    assert_eq!(list().await.unwrap().len(), 2000);

    // An answer that is no list means that there is no API.
    server.fault("GET", "/referrers/", 1, Fault::Header("content-type", "text/html".into()));
    assert_eq!(list().await.unwrap(), []);
    server.reset_stats();
    assert_eq!(list().await.unwrap(), []);
    assert_eq!(paths(&server), ["GET manifests"]);
}

#[tokio::test]
async fn a_tag_that_is_no_list_of_referrers_is_not_changed() {
    let server = FakeRegistry::start().unwrap();
    server.without_referrers();
    let repository = support::open(&server, "app:1");
    let subject = image(&repository).await;
    let tag = subject.digest.to_string().replace(':', "-");
    let theirs = support::manifest(b"{}", &[]);
    for (kind, raw) in [(media_type::MANIFEST, &theirs), (media_type::INDEX, &b"{".to_vec())] {
        server.put_manifest("app", &tag, kind, raw);
        assert_eq!(repository.referrers(&subject.digest, Some(TYPE)).await.unwrap(), []);
        let error = repository.push_referrer(&subject, TYPE, &note("one"), None).await.unwrap_err();
        assert!(matches!(error, RegistryError::Malformed { .. }), "{error}");
        assert!(error.to_string().contains(&tag), "{error}");
        assert_eq!(server.manifest("app", &tag).unwrap(), *raw);
    }
    let huge = note(&"x".repeat(manifest::DOCUMENT_LIMIT as usize));
    let error = repository.push_referrer(&subject, TYPE, &huge, None).await.unwrap_err();
    assert!(matches!(error, RegistryError::TooLarge { .. }), "{error}");
}

#[tokio::test]
async fn mirrors_are_read_and_never_written() {
    let (registry, mirror) = (FakeRegistry::start().unwrap(), FakeRegistry::start().unwrap());
    let mut mirrors = Mirrors::default();
    let url = format!("http://{}", mirror.host()).parse().unwrap();
    mirrors.set(&registry.host(), vec![url]).unwrap();
    let name: ImageName = format!("{}/app:1", registry.host()).parse().unwrap();
    let repository = lazuli_registry::open(&name, &Options { mirrors, ..options() }).unwrap();
    let subject = image(&*repository).await;
    mirror.reset_stats();
    repository.push_referrer(&subject, TYPE, &note("one"), None).await.unwrap();
    assert_eq!(mirror.stats().requests, 0);

    // A mirror with the API that has none, and one without the API.
    let list = || repository.referrers(&subject.digest, Some(TYPE));
    assert_eq!(list().await.unwrap().len(), 1);
    let filters = |logged: &Logged| logged.target.contains("&artifactType=");
    assert!(mirror.log().iter().any(filters), "{:?}", mirror.log());
    mirror.without_referrers();
    assert_eq!(list().await.unwrap().len(), 1);
    assert_eq!(repository.referrers(&sha256(b"absent"), Some(TYPE)).await.unwrap(), []);
    // One mirror that has it is enough.
    let direct = support::open(&mirror, "app:1");
    image(&direct).await;
    direct.push_referrer(&subject, TYPE, &note("copied"), None).await.unwrap();
    registry.reset_stats();
    assert_eq!(list().await.unwrap()[0].annotations, note("copied"));
    assert_eq!(registry.stats().requests, 0);
    // A mirror without referrers doesn't help, and an unreachable one doesn't matter as long as
    // another answers.
    mirror.go_away();
    assert_eq!(list().await.unwrap()[0].annotations, note("one"));
    registry.go_away();
    assert!(matches!(list().await, Err(RegistryError::Everywhere { .. })));
    mirror.come_back();
}

#[tokio::test]
async fn layouts_are_read() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path().join("images");
    let open = |tag: &str| {
        let name = format!("oci:{}:{tag}", root.display());
        lazuli_registry::open(&name.parse().unwrap(), &options()).unwrap()
    };
    let repository = open("1");
    assert_eq!(repository.referrers(&sha256(b"absent"), Some(TYPE)).await.unwrap(), []);
    let subject = image(&*repository).await;
    assert_eq!(repository.referrers(&subject.digest, Some(TYPE)).await.unwrap(), []);
    let error = repository.push_referrer(&subject, TYPE, &note("one"), None).await.unwrap_err();
    assert!(matches!(error, RegistryError::NotInLayouts { .. }), "{error}");

    // As tools write it that copy an image with its referrers.
    let entry = json!({"mediaType": media_type::MANIFEST, "digest": sha256(b"x"), "size": 5,
        "artifactType": TYPE, "annotations": note("one")});
    let list = json!({"schemaVersion": 2, "mediaType": media_type::INDEX, "manifests": [entry]});
    let tag = subject.digest.to_string().replace(':', "-");
    open(&tag).push_manifest(list.to_string().into(), media_type::INDEX).await.unwrap();
    let found = repository.referrers(&subject.digest, Some(TYPE)).await.unwrap();
    assert_eq!(found[0].annotations, note("one"));
    assert_eq!(repository.referrers(&subject.digest, Some("application/x")).await.unwrap(), []);
    let blob = root.join("blobs/sha256").join(sha256(list.to_string().as_bytes()).hex());
    std::fs::write(blob, "other").unwrap();
    let error = repository.referrers(&subject.digest, Some(TYPE)).await.unwrap_err();
    assert!(matches!(error, RegistryError::Malformed { .. }), "{error}");
}
