use std::{fs, os::unix::fs::PermissionsExt as _};

use super::*;

fn password(user: &str, secret: &str) -> Credential {
    Credential::Password { user: user.into(), secret: Secret(secret.into()) }
}

async fn find_text(json: &str, name: &str) -> Result<Credential, RegistryError> {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("config.json");
    fs::write(&file, json).unwrap();
    find(&[directory.path().join("absent.json"), file], &name.parse().unwrap()).await
}

#[tokio::test]
async fn entries_of_docker_and_podman_are_read() {
    let auth = STANDARD.encode("joe:s3:cret");
    let entry = |key: &str| format!(r#"{{"auths": {{"{key}": {{"auth": "{auth}"}}}}}}"#);
    let joe = || password("joe", "s3:cret");
    let cases = [
        (entry("quay.io"), "quay.io/org/app", joe()),
        (entry("https://quay.io"), "quay.io/org/app", joe()),
        (entry("https://quay.io/v2/"), "quay.io/org/app", joe()),
        (entry("https://index.docker.io/v1/"), "debian", joe()),
        (entry("docker.io"), "debian", joe()),
        (entry("quay.io/org"), "quay.io/org/app", joe()),
        (entry("quay.io/other"), "quay.io/org/app", Credential::Anonymous),
        (entry("localhost:5000"), "localhost:5000/app", joe()),
        (entry("localhost:5000"), "localhost:5001/app", Credential::Anonymous),
        (r#"{"auths": {"quay.io": {}}}"#.into(), "quay.io/a", Credential::Anonymous),
        (
            r#"{"auths": {"quay.io": {"username": "u", "password": "p"}}}"#.into(),
            "quay.io/a",
            password("u", "p"),
        ),
        (
            r#"{"auths": {"quay.io": {"auth": "x", "identitytoken": "t"}}}"#.into(),
            "quay.io/a",
            Credential::Identity(Secret("t".into())),
        ),
        ("{}".into(), "quay.io/a", Credential::Anonymous),
    ];
    for (json, name, expected) in cases {
        assert_eq!(find_text(&json, name).await.unwrap(), expected, "{name} in {json}");
    }
}

#[tokio::test]
async fn broken_files_are_named_and_secrets_are_not() {
    for json in ["{", r#"{"auths": {"quay.io": {"auth": "c2VjcmV0!!"}}}"#] {
        let error = find_text(json, "quay.io/a").await.unwrap_err().to_string();
        assert!(error.contains("config.json") && error.contains("quay.io"), "{error}");
        assert!(!error.contains("c2VjcmV0"), "{error}");
    }
    let shown = format!("{:?}", password("joe", "hush"));
    assert!(!shown.contains("hush"), "{shown}");
}

/// One test, because `PATH` belongs to the whole process.
#[tokio::test]
async fn helpers_speak_dockers_protocol() {
    let directory = tempfile::tempdir().unwrap();
    let helper = |name: &str, script: &str| {
        let path = directory.path().join(format!("docker-credential-{name}"));
        fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path.to_str().unwrap().rsplit_once("docker-credential-").unwrap().1.to_owned()
    };
    // Names cannot be paths, so the helpers are found through a private PATH of this test process.
    helper("echoing", r#"read k; echo "{\"Username\": \"$1\", \"Secret\": \"$k\"}""#);
    helper("identity", r#"echo '{"Username": "<token>", "Secret": "t"}'"#);
    helper("empty", "echo credentials not found in native keychain; exit 1");
    helper("broken", "echo no keyring; exit 1");
    let path = env::join_paths(
        std::iter::once(directory.path().to_owned())
            .chain(env::split_paths(&env::var_os("PATH").unwrap_or_default())),
    );
    let run = |json: &'static str, name: &'static str| {
        let executable = env::current_exe().unwrap();
        let file = directory.path().join("config.json");
        fs::write(&file, json).unwrap();
        Command::new(executable)
            .args([
                "--exact",
                "transport::credentials::tests::show_credential",
                "--ignored",
                "--nocapture",
            ])
            .env("PATH", path.as_ref().unwrap())
            .env("SHOW_FILE", file)
            .env("SHOW_NAME", name)
            .output()
    };
    let cases = [
        (r#"{"credsStore": "echoing"}"#, "quay.io/a", "get quay.io"),
        (r#"{"credsStore": "echoing"}"#, "debian", "get https://index.docker.io/v1/"),
        (
            r#"{"credHelpers": {"quay.io": "identity"}, "credsStore": "broken"}"#,
            "quay.io/a",
            "identity t",
        ),
        (r#"{"credsStore": "empty"}"#, "quay.io/a", "anonymous"),
        (r#"{"credsStore": "broken"}"#, "quay.io/a", "docker-credential-broken: failed"),
        (r#"{"credsStore": "../x"}"#, "quay.io/a", "a helper's name is no path"),
        (r#"{"credsStore": "absent"}"#, "quay.io/a", "docker-credential-absent: cannot be run"),
    ];
    for (json, name, expected) in cases {
        let output = run(json, name).await.unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(text.contains(expected), "{json}: {text}");
    }
}

/// Runs in a process of its own, see [`helpers_speak_dockers_protocol`].
#[tokio::test]
#[ignore = "is run by another test with a PATH of its own"]
#[allow(clippy::print_stdout)]
async fn show_credential() {
    let variable = |name| env::var(name).unwrap();
    let reference = variable("SHOW_NAME").parse().unwrap();
    match find(&[variable("SHOW_FILE").into()], &reference).await {
        Ok(Credential::Anonymous) => println!("shown: anonymous"),
        Ok(Credential::Password { user, secret }) => println!("shown: {user} {}", secret.0),
        Ok(Credential::Identity(secret)) => println!("shown: identity {}", secret.0),
        Err(error) => println!("shown: {error}"),
    }
}
