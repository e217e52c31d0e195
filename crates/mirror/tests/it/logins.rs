//! Two tenants on one node: each sees what the registry shows to its login.

use lazuli_testkit::registry::{Fault, Login};

use crate::scene::{APP, Scene, header};

fn basic(user: &str) -> Login {
    Login::Basic(user.to_owned(), "secret".to_owned())
}

fn bearer(user: &str) -> Login {
    Login::Bearer(user.to_owned(), "secret".to_owned())
}

#[tokio::test]
async fn a_login_sees_what_the_registry_shows_to_it_alone() {
    for login in [basic("ann"), bearer("ann")] {
        let scene = Scene::new().await;
        let [index, _, config] = scene.put_image("1", b"layer");
        scene.registry.require(login);
        let paths =
            ["manifests/1".to_owned(), format!("manifests/{index}"), format!("blobs/{config}")];
        // Before and after ann has seen it, and when nothing is in memory.
        let mut scene = scene;
        for _ in 0..2 {
            for path in &paths {
                assert_eq!(scene.get(path).await.status(), 401, "{path}");
                assert_eq!(scene.get_as("bob", "secret", path).await.status(), 403, "{path}");
                assert_eq!(scene.get_as("ann", "wrong", path).await.status(), 403, "{path}");
                assert_eq!(scene.get_as("ann", "secret", path).await.status(), 200, "{path}");
                assert_eq!(scene.get(path).await.status(), 401, "{path}");
                assert_eq!(scene.get_as("bob", "secret", path).await.status(), 403, "{path}");
            }
            scene = scene.restarted().await;
        }
    }
}

#[tokio::test]
async fn the_challenge_is_the_mirrors_own() {
    let scene = Scene::new().await;
    scene.put_image("1", b"layer");
    scene.registry.require(bearer("ann"));
    let answer = scene.get("manifests/1").await;
    let challenges: Vec<_> = answer.headers().get_all("www-authenticate").iter().collect();
    let host = scene.registry.host();
    assert_eq!(
        challenges,
        [
            &format!(
                r#"Bearer realm="https://{}/token",service="{host}",scope="repository:{APP}:pull""#,
                scene.address
            ),
            &format!(r#"Basic realm="{host}""#),
        ]
    );
    // A client that answers with Basic.
    let request = scene.client.get(scene.url("manifests/1")).basic_auth("ann", Some("secret"));
    assert_eq!(request.send().await.unwrap().status(), 200);
    // No login, no token.
    let token = format!("https://{}/token?service={host}", scene.address);
    assert_eq!(scene.client.get(token).send().await.unwrap().status(), 401);
}

#[tokio::test]
async fn an_identity_token_is_exchanged_at_the_registry() {
    let scene = Scene::new().await;
    scene.put_image("1", b"layer");
    scene.registry.require(Login::Identity("refresh".to_owned()));
    let form = |token: &str| {
        format!("grant_type=refresh_token&service={}&refresh_token={token}", scene.registry.host())
    };
    for (token, status) in [("refresh", 200), ("other", 403)] {
        let token = scene.token_for(form(token)).await;
        let request = scene.client.get(scene.url("manifests/1")).bearer_auth(token);
        assert_eq!(request.send().await.unwrap().status(), status);
    }
}

#[tokio::test]
async fn tokens_outlast_the_mirrors_process_and_are_for_one_registry() {
    let scene = Scene::new().await;
    scene.put_image("1", b"layer");
    scene.registry.require(basic("ann"));
    let token = scene.token("ann", "secret").await;
    let scene = scene.restarted().await;
    let ask = async |registry: &str| {
        let url = format!("https://{}/v2/{APP}/manifests/1?ns={registry}", scene.address);
        scene.client.get(url).bearer_auth(&token).send().await.unwrap()
    };
    assert_eq!(ask(&scene.registry.host()).await.status(), 200);
    // The password is not shown to another registry.
    let other = lazuli_testkit::registry::FakeRegistry::start().unwrap();
    let answer = ask(&other.host()).await;
    assert_eq!(answer.status(), 401);
    assert!(header(&answer, "www-authenticate").contains("error=\"invalid_token\""));
    assert_eq!(other.log(), []);
}

/// Answers that left memory are requested again, and the first refusal ends access.
#[tokio::test]
async fn a_login_that_the_registry_no_longer_takes_sees_nothing() {
    let scene = Scene::new().await;
    let [index, ..] = scene.put_image("1", b"layer");
    scene.registry.require(bearer("ann"));
    assert_eq!(scene.get_as("ann", "secret", "manifests/1").await.status(), 200);
    scene.registry.expire_tokens();
    scene.registry.require(bearer("bob"));
    let blob = scene.registry.put_blob(APP, &[7; 300_000]);
    assert_eq!(scene.get_as("ann", "secret", &format!("blobs/{blob}")).await.status(), 403);
    let scene = scene.restarted().await;
    let path = format!("manifests/{index}");
    assert_eq!(scene.get_as("ann", "secret", &path).await.status(), 403);
    assert_eq!(scene.get_as("bob", "secret", &path).await.status(), 200);
}

#[tokio::test]
async fn a_public_image_needs_no_login_and_a_login_does_no_harm() {
    let scene = Scene::new().await;
    scene.put_image("1", b"layer");
    assert_eq!(scene.get("manifests/1").await.status(), 200);
    assert_eq!(scene.get_as("ann", "secret", "manifests/1").await.status(), 200);
    let shown = scene.registry.log().iter().any(|request| request.authorized);
    assert!(!shown, "a login is shown to a registry that did not ask for one");
    // Several, because the mirror may still be fetching ahead after earlier answers.
    scene.registry.fault("GET", "/manifests/", 100, Fault::Status(403));
    assert_eq!(scene.get("manifests/1-manifest").await.status(), 401);
}
