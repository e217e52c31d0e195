//! Logins and their rights.

use std::{fs, io::ErrorKind, net::TcpListener, sync::Arc};

use lazuli_registry::{
    ImageName, Keyring, Login as Pulled, Options, Pull, Registry, RegistryError,
};
use lazuli_testkit::registry::{FakeRegistry, Fault, Login};

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

/// A registry must not make the node fetch from an address that only the node reaches, and bring
/// the answer back.
#[tokio::test]
async fn a_challenge_cannot_point_at_the_node() {
    let beside = TcpListener::bind("127.0.0.2:0").unwrap();
    beside.set_nonblocking(true).unwrap();
    let realm = format!("http://{}/token", beside.local_addr().unwrap());
    let server = FakeRegistry::start().unwrap();
    server.require(Login::Bearer(String::new(), String::new()));
    let challenge = format!(r#"Bearer realm="{realm}",service="fake""#);
    server.fault("GET", "/blobs/", 1000, Fault::Header("www-authenticate", challenge));
    let (registry, _file) = open_as(&server, "{}");
    let error = read(&registry, b"x", 0..1).await.unwrap_err();
    assert!(error.to_string().contains("its realm uses http"), "{error}");
    assert_eq!(beside.accept().unwrap_err().kind(), ErrorKind::WouldBlock);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_expired_token_is_renewed_once_for_all() {
    let server = FakeRegistry::start().unwrap();
    server.require(Login::Bearer(String::new(), String::new()));
    let content = noise(1000, 2);
    server.put_blob("app", &content);
    let registry = Arc::new(open_as(&server, "{}").0);
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

/// Number of requests to the token server since the last call.
fn tokens(server: &FakeRegistry) -> u64 {
    let asked = server.stats().by_path.get("/token").copied().unwrap_or(0);
    server.reset_stats();
    asked
}

#[tokio::test]
async fn a_password_that_changes_is_read_again() {
    for bearer in [true, false] {
        let server = FakeRegistry::start().unwrap();
        let login = |password: &str| match bearer {
            true => Login::Bearer("joe".into(), password.into()),
            false => Login::Basic("joe".into(), password.into()),
        };
        server.require(login("secret"));
        let content = noise(1000, 4);
        server.put_blob("app", &content);
        let (registry, directory) = open_as(&server, JOE);
        read(&registry, &content, 0..10).await.unwrap();
        server.require(login("changed"));
        server.expire_tokens();
        let error = read(&registry, &content, 0..10).await.unwrap_err();
        assert!(matches!(error, RegistryError::Denied { .. }), "{error}");
        let file = directory.path().join("config.json");
        let text = fs::read_to_string(&file).unwrap().replace("secret", "changed");
        fs::write(&file, text).unwrap();
        // Recently refused credentials are not tried again at once.
        tokio::time::sleep(std::time::Duration::from_millis(1100)).await;
        assert!(read(&registry, &content, 0..10).await.unwrap() == content[..10]);
    }
}

#[tokio::test]
async fn a_login_that_came_with_an_image_goes_first_and_the_newest_before_others() {
    let server = FakeRegistry::start().unwrap();
    let content = noise(1000, 5);
    server.put_blob("app", &content);
    let joes = |password: &str| Login::Bearer("joe".into(), password.into());
    server.require(joes("from-pod"));
    let (_, directory) = open_as(&server, JOE);
    let keyring = Keyring::default();
    let options = Options {
        credential_files: vec![directory.path().join("config.json")],
        keyring: keyring.clone(),
        ..options()
    };
    let name: ImageName = format!("{}/app:1", server.host()).parse().unwrap();
    let other: ImageName = format!("{}/other:1", server.host()).parse().unwrap();
    let image = lazuli_registry::open(&name, &options).unwrap();
    let works = async || read(&*image, &content, 0..10).await.map(|bytes| bytes == content[..10]);
    assert!(works().await.is_err());

    // Something new is tried at once, and first: one token, for the right one.
    keyring.set("two", &other, Pulled::new("joe", "of another repository"));
    keyring.set("one", &name, Pulled::new("joe", "from-pod"));
    tokens(&server);
    assert!(works().await.unwrap());
    assert_eq!(tokens(&server), 1);

    // The password is changed while the image is in use, and a later pull brings the new one.
    server.require(joes("renewed"));
    server.expire_tokens();
    assert!(works().await.is_err());
    keyring.set("three", &name, Pulled::new("joe", "renewed"));
    tokens(&server);
    assert!(works().await.unwrap());
    assert_eq!(tokens(&server), 1);

    // The newest login may be wrong; then the others are tried, and finally those in files.
    keyring.set("four", &name, Pulled::new("joe", "wrong"));
    server.expire_tokens();
    assert!(works().await.unwrap());
    assert_eq!(tokens(&server), 2);
    server.require(joes("secret"));
    server.expire_tokens();
    assert!(works().await.unwrap());
    assert_eq!(tokens(&server), 4, "wrong, renewed, from-pod, secret");
    ["one", "three", "four"].iter().for_each(|owner| keyring.remove(owner));
    server.expire_tokens();
    assert!(works().await.unwrap());
    assert_eq!(tokens(&server), 1);
    // A refresh token is one without a user.
    server.require(Login::Identity("refresh".into()));
    server.expire_tokens();
    keyring.set("five", &name, Pulled::new("", "refresh"));
    assert!(works().await.unwrap());
    let shown = format!("{keyring:?} {image:?} {options:?} {:?}", Pulled::new("joe", "hush"));
    assert!(!["hush", "refresh", "renewed"].iter().any(|secret| shown.contains(secret)), "{shown}");
}

#[tokio::test]
async fn a_known_user_may_be_refused_access() {
    // The token server gives any login a token, but only one login has access.
    let server = FakeRegistry::start().unwrap();
    let content = noise(1000, 6);
    server.put_blob("app", &content);
    server.require(Login::Bearer("joe".into(), "secret".into()));
    let (_, directory) = open_as(&server, JOE);
    let name: ImageName = format!("{}/app:1", server.host()).parse().unwrap();
    let options =
        Options { credential_files: vec![directory.path().join("config.json")], ..options() };
    options.keyring.set("one", &name, Pulled::new("jim", "other"));
    server.give_empty_tokens();
    let image = lazuli_registry::open(&name, &options).unwrap();
    assert!(read(&*image, &content, 0..10).await.unwrap() == content[..10]);
}

/// Many requests at once, over several images of one repository.
#[tokio::test(flavor = "multi_thread")]
async fn a_crowd_asks_for_one_token() {
    let server = FakeRegistry::start().unwrap();
    let content = noise(1000, 7);
    server.put_blob("app", &content);
    let (_, directory) = open_as(&server, JOE);
    let options =
        Options { credential_files: vec![directory.path().join("config.json")], ..options() };
    let images: Vec<_> = (0..5)
        .map(|tag| {
            let name = format!("{}/app:{tag}", server.host()).parse().unwrap();
            lazuli_registry::open(&name, &options).unwrap()
        })
        .collect();
    let crowd = async || {
        let tasks = (0..50).map(|n| {
            let (image, content) = (images[n % 5].clone(), content.clone());
            tokio::spawn(async move { read(&*image, &content, 0..1000).await.is_ok() })
        });
        let tasks: Vec<_> = tasks.collect();
        let mut successes = 0;
        for task in tasks {
            successes += u64::from(task.await.unwrap());
        }
        successes
    };
    let login = |password: &str| Login::Bearer("joe".into(), password.into());
    server.require(login("secret"));
    for _ in 0..3 {
        server.expire_tokens();
        assert_eq!((crowd().await, tokens(&server)), (50, 1));
    }
    // Also when it is refused.
    server.require(login("changed"));
    server.expire_tokens();
    assert_eq!((crowd().await, tokens(&server)), (0, 1));
}
