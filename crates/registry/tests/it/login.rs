//! Who may do what.

use std::fs;

use lazuli_registry::{Options, Registry, RegistryError, Repository};
use lazuli_testkit::registry::{FakeRegistry, Login};

use crate::support::{noise, options, push, read};

/// Opens `app` with the credentials in `entry`, a part of docker's config.json.
fn open_as(server: &FakeRegistry, entry: &str) -> (Registry, tempfile::TempDir) {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("config.json");
    fs::write(&file, format!(r#"{{"auths": {{"{}": {entry}}}}}"#, server.host())).unwrap();
    let options = Options { credential_files: vec![file], ..options() };
    let name = format!("{}/app", server.host()).parse().unwrap();
    (Registry::open(name, &options).unwrap(), directory)
}

const JOE: &str = r#"{"username": "joe", "password": "secret"}"#;
const TOKEN: &str = r#"{"identitytoken": "refresh"}"#;

#[tokio::test]
async fn every_login_works_and_is_renewed() {
    let joe = || ("joe".to_owned(), "secret".to_owned());
    let cases = [
        (Login::Basic(joe().0, joe().1), JOE),
        (Login::Bearer(joe().0, joe().1), JOE),
        (Login::Bearer(String::new(), String::new()), "{}"),
        (Login::Identity("refresh".into()), TOKEN),
    ];
    for (login, entry) in cases {
        let server = FakeRegistry::start().unwrap();
        server.require(login.clone());
        let (registry, _file) = open_as(&server, entry);
        let content = noise(1000, 1);
        push(&registry, &content).await.unwrap_or_else(|error| panic!("{login:?}: {error}"));
        for _ in 0..3 {
            server.expire_tokens();
            for start in [0, 10, 100] {
                let part = read(&registry, &content, start..500).await.unwrap();
                assert!(part == content[start as usize..500]);
            }
        }
        let tokens = server.stats().by_path.get("/token").copied().unwrap_or(0);
        let expected = if matches!(login, Login::Basic(..)) { 0 } else { 4 };
        assert_eq!(tokens, expected, "{login:?}: one to push, one for each expiry");
        assert_eq!(server.violations(), Vec::<String>::new());
    }
}

#[tokio::test]
async fn refusals_say_how_to_log_in_and_show_no_secret() {
    let joe = Login::Bearer("joe".into(), "other".into());
    for (login, entry) in
        [(joe.clone(), JOE), (joe, "{}"), (Login::Basic("a".into(), "b".into()), JOE)]
    {
        let server = FakeRegistry::start().unwrap();
        server.require(login);
        let (registry, _file) = open_as(&server, entry);
        let error = read(&registry, b"x", 0..1).await.unwrap_err();
        assert!(matches!(error, RegistryError::Denied { .. }), "{error}");
        let text = format!("{error} {error:?} {registry:?}");
        assert!(text.contains(&format!("docker login {}", server.host())), "{text}");
        assert!(!text.contains("secret"), "{text}");
        assert!(server.stats().requests <= 3, "no password is tried again and again");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_expired_token_is_renewed_once_for_all() {
    let server = FakeRegistry::start().unwrap();
    server.require(Login::Bearer(String::new(), String::new()));
    let content = noise(1000, 2);
    server.put_blob("app", &content);
    let registry = std::sync::Arc::new(open_as(&server, "{}").0);
    let tasks: Vec<_> = (0..20)
        .map(|_| {
            let (registry, content) = (registry.clone(), content.clone());
            tokio::spawn(
                async move { read(&*registry, &content, 0..1000).await.unwrap() == content },
            )
        })
        .collect();
    for task in tasks {
        assert!(task.await.unwrap());
    }
    assert_eq!(server.stats().by_path["/token"], 1);
}

#[tokio::test]
async fn credentials_stay_at_the_registry() {
    let server = FakeRegistry::start().unwrap();
    server.require(Login::Basic("joe".into(), "secret".into()));
    server.redirect_blobs();
    let content = noise(1000, 3);
    server.put_blob("app", &content);
    let (registry, _file) = open_as(&server, JOE);
    assert!(read(&registry, &content, 5..10).await.unwrap() == content[5..10]);
    assert!(server.log().iter().any(|request| request.storage));
    assert!(server.log().iter().all(|request| !(request.storage && request.authorized)));
    assert_eq!(server.violations(), Vec::<String>::new());
    assert!(registry.describe().starts_with("127.0.0.1:"));
}
