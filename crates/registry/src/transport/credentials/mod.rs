//! Finds credentials where docker, podman and skopeo store them.
//!
//! The first file with the registry decides; without any, access is anonymous. Inside a file, a
//! credential helper takes precedence over the entry itself, as in docker.

use std::{
    collections::BTreeMap,
    env, fmt, io,
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use serde::{Deserialize, Serialize};
use tokio::{io::AsyncWriteExt as _, process::Command, time::timeout};

use crate::{error::RegistryError, name::Reference};

/// Biggest credential file that is read, in bytes; real ones have some KiB.
const FILE_LIMIT: u64 = 1 << 20;

/// Time-out of a credential helper. Some ask a cloud's metadata service over the network; none can
/// ask the user, because its standard input is taken.
const HELPER_TIMEOUT: Duration = Duration::from_secs(30);

/// The key under which docker keeps the credentials of Docker Hub.
const DOCKER_HUB_KEY: &str = "https://index.docker.io/v1/";

/// A password or token. Its `Debug` output does not show it, and it has no `Display`.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Secret(pub(crate) String);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("<secret>")
    }
}

/// Credentials for a registry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Credential {
    Anonymous,
    Password {
        user: String,
        secret: Secret,
    },
    /// A refresh token of OAuth2, to be exchanged at the registry's token server.
    Identity(Secret),
}

/// A user's name and password that came with an image: a pull secret. Its `Debug` output does not
/// show the password.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Login {
    user: String,
    secret: Secret,
}

impl Login {
    /// Without a user, `secret` is a refresh token of OAuth2, as everywhere in containerd.
    pub fn new(user: impl Into<String>, secret: impl Into<String>) -> Self {
        Login { user: user.into(), secret: Secret(secret.into()) }
    }
}

impl From<Login> for Credential {
    fn from(Login { user, secret }: Login) -> Self {
        if user.is_empty() {
            return Credential::Identity(secret);
        }
        Credential::Password { user, secret }
    }
}

/// The files that are consulted by default, most important first: `$REGISTRY_AUTH_FILE` alone if it
/// is set, else `$XDG_RUNTIME_DIR/containers/auth.json` and `$DOCKER_CONFIG/config.json`
/// (`~/.docker/config.json`).
pub fn default_files() -> Vec<PathBuf> {
    let variable =
        |name: &str| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    if let Some(file) = variable("REGISTRY_AUTH_FILE") {
        return vec![file];
    }
    let podman =
        variable("XDG_RUNTIME_DIR").map(|directory| directory.join("containers/auth.json"));
    let docker = variable("DOCKER_CONFIG").or_else(|| Some(variable("HOME")?.join(".docker")));
    podman.into_iter().chain(docker.map(|directory| directory.join("config.json"))).collect()
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct File {
    auths: BTreeMap<String, Entry>,
    creds_store: String,
    cred_helpers: BTreeMap<String, String>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Entry {
    auth: String,
    username: String,
    password: String,
    identitytoken: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Helped {
    username: String,
    secret: String,
}

/// Looks `reference` up in `files`.
pub(crate) async fn find(
    files: &[PathBuf],
    reference: &Reference,
) -> Result<Credential, RegistryError> {
    for path in files {
        if let Some(credential) = find_in(path, reference).await? {
            tracing::debug!(registry = reference.registry(), file = %path.display(), "credentials found");
            return Ok(credential);
        }
    }
    Ok(Credential::Anonymous)
}

async fn find_in(path: &Path, reference: &Reference) -> Result<Option<Credential>, RegistryError> {
    let wrong = |problem: String| RegistryError::Credentials {
        host: reference.registry().to_owned(),
        problem: format!("{}: {problem}", path.display()),
    };
    let size = match tokio::fs::metadata(path).await {
        Ok(metadata) => metadata.len(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(wrong(error.to_string())),
    };
    if size > FILE_LIMIT {
        return Err(wrong(format!("{size} bytes are too many, at most {FILE_LIMIT} are read")));
    }
    let text = tokio::fs::read(path).await.map_err(|error| wrong(error.to_string()))?;
    let (helper, credential) = parse(&text, reference).map_err(wrong)?;
    if let Some(name) = helper
        && let Some(credential) = ask_helper(&name, reference).await?
    {
        return Ok(Some(credential));
    }
    credential.map_err(wrong)
}

/// The helper that a file names for `reference`, and the file's own entry.
#[expect(
    clippy::type_complexity,
    reason = "what the file says is wrong only where no helper knows better"
)]
pub(crate) fn parse(
    text: &[u8],
    reference: &Reference,
) -> Result<(Option<String>, Result<Option<Credential>, String>), String> {
    // serde_json's message names line and column, never the content.
    let file: File = serde_json::from_slice(text).map_err(|error| error.to_string())?;
    let keys = keys(reference);
    let helper = keys.iter().find_map(|key| lookup(&file.cred_helpers, key));
    let store = Some(&file.creds_store).filter(|name| !name.is_empty());
    let entry = keys.iter().find_map(|key| lookup(&file.auths, key));
    Ok((helper.or(store).cloned(), entry.map_or(Ok(None), credential)))
}

/// Most specific first: podman keeps credentials of single repositories, too.
fn keys(reference: &Reference) -> Vec<String> {
    let mut key = format!("{}/{}", reference.registry(), reference.repository());
    let mut keys = vec![key.clone()];
    while let Some((parent, _)) = key.rsplit_once('/') {
        key = parent.to_owned();
        keys.push(key.clone());
    }
    keys
}

/// Compares as docker does: old entries have a scheme and the API's path.
fn lookup<'a, T>(map: &'a BTreeMap<String, T>, wanted: &str) -> Option<&'a T> {
    let plain = |key: &str| {
        let key =
            key.strip_prefix("https://").or_else(|| key.strip_prefix("http://")).unwrap_or(key);
        let key = key.trim_end_matches('/');
        let key = key.strip_suffix("/v1").or_else(|| key.strip_suffix("/v2")).unwrap_or(key);
        match key {
            "index.docker.io" | "registry-1.docker.io" => "docker.io".to_owned(),
            other => other.to_owned(),
        }
    };
    map.get(wanted)
        .or_else(|| map.iter().find(|(key, _)| plain(key) == wanted).map(|(_, value)| value))
}

/// `None`: the entry is a placeholder, as docker writes it beside a credential store.
fn credential(entry: &Entry) -> Result<Option<Credential>, String> {
    if !entry.identitytoken.is_empty() {
        return Ok(Some(Credential::Identity(Secret(entry.identitytoken.clone()))));
    }
    let (user, secret) = if entry.auth.is_empty() {
        (entry.username.clone(), entry.password.clone())
    } else {
        let decoded =
            STANDARD.decode(entry.auth.trim()).ok().and_then(|b| String::from_utf8(b).ok());
        let pair = decoded.as_deref().and_then(|text| text.split_once(':'));
        let (user, secret) = pair.ok_or("an `auth` entry is not base64 of user:password")?;
        // Old versions of docker padded the password with NUL bytes.
        (user.to_owned(), secret.trim_end_matches('\0').to_owned())
    };
    let empty = user.is_empty() && secret.is_empty();
    Ok((!empty).then_some(Credential::Password { user, secret: Secret(secret) }))
}

/// Runs `docker-credential-NAME get`: the registry on its standard input, JSON on its output.
async fn ask_helper(
    name: &str,
    reference: &Reference,
) -> Result<Option<Credential>, RegistryError> {
    let program = format!("docker-credential-{name}");
    let host = reference.registry();
    let wrong = |problem: String| RegistryError::Credentials {
        host: host.to_owned(),
        problem: format!("{program}: {problem}"),
    };
    if name.contains(['/', '\0']) {
        return Err(wrong("a helper's name is no path".to_owned()));
    }
    let key = if host == "docker.io" { DOCKER_HUB_KEY } else { host };
    let run = async {
        let mut child = Command::new(&program)
            .arg("get")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .kill_on_drop(true)
            .spawn()?;
        if let Some(mut stdin) = child.stdin.take() {
            // A helper may ignore its input; its answer decides.
            let _ = stdin.write_all(key.as_bytes()).await;
        }
        child.wait_with_output().await
    };
    let output = match timeout(HELPER_TIMEOUT, run).await {
        Ok(result) => result.map_err(|error| wrong(format!("cannot be run: {error}")))?,
        Err(_) => return Err(wrong(format!("no answer within {} s", HELPER_TIMEOUT.as_secs()))),
    };
    if !output.status.success() {
        // The protocol has no error codes, only this text, which every helper takes from one
        // library.
        let text = String::from_utf8_lossy(&output.stdout);
        if text.contains("credentials not found") {
            return Ok(None);
        }
        return Err(wrong(format!(
            "failed ({}): {}",
            output.status,
            text.trim().chars().take(200).collect::<String>()
        )));
    }
    let helped: Helped = serde_json::from_slice(&output.stdout)
        .map_err(|_| wrong("the answer is not JSON with Username and Secret".to_owned()))?;
    Ok(Some(match helped.username.as_str() {
        "<token>" => Credential::Identity(Secret(helped.secret)),
        _ => Credential::Password { user: helped.username, secret: Secret(helped.secret) },
    }))
}

#[cfg(test)]
mod tests;
