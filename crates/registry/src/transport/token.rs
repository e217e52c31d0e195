//! Fills the `Authorization` header of requests.
//!
//! A registry's first 401 says what it wants: `Basic`, or `Bearer` with the address of a token
//! server. A token is kept for each scope until the registry refuses it; many requests refused at
//! once cause one renewal. Then all credentials known at that moment are tried, the newest first:
//! passwords change while containers run.

use std::{
    collections::HashMap,
    net::{IpAddr, Ipv4Addr},
    path::PathBuf,
    time::Duration,
};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use http_auth::ChallengeRef;
use reqwest::{
    Response, Url,
    header::{AUTHORIZATION, CONTENT_TYPE, HeaderValue, WWW_AUTHENTICATE},
};
use serde::Deserialize;
use tokio::{sync::Mutex, time::Instant};

use crate::{
    error::RegistryError,
    name::Reference,
    transport::{
        credentials::{self, Credential},
        logins::Logins,
        response::{detail, read_bounded, stale},
    },
};

/// Biggest answer of a token server that is read, in bytes; signed tokens have some KiB.
const TOKEN_LIMIT: u64 = 1 << 20;

/// Our client id at token servers, which show it in lists of sessions.
const CLIENT_ID: &str = "lazuli";

/// How long nothing is tried again that was refused, unless there is something new: readers ask
/// again and again, and some token servers lock accounts.
const REFUSED: Duration = Duration::from_secs(1);

/// Makes and keeps authorizations for one repository at one server.
#[derive(Debug)]
pub(crate) struct Authorizer {
    /// The image's name, at that server.
    reference: Reference,
    files: Vec<PathBuf>,
    /// Has logins for this repository, if they are for this server.
    logins: Option<Logins>,
    /// Locked during a renewal, so that others wait for its result.
    state: Mutex<KnownScopes>,
}

/// Both by scope.
#[derive(Debug, Default)]
struct KnownScopes {
    grants: HashMap<String, Grant>,
    /// When everything was refused, and the generation of the keyring at that time.
    refused: HashMap<String, (Instant, u64)>,
}

/// Authorization that worked.
#[derive(Debug)]
struct Grant {
    header: HeaderValue,
    credential: Credential,
}

/// Credentials that one request has tried without success, starting with an earlier request's.
#[derive(Debug, Default)]
pub(crate) struct Tried {
    header: Option<HeaderValue>,
    /// It was obtained with a password, so it is sent to no other server.
    is_secret: bool,
    /// Each as often as it was tried, see [`Tried::is_spent`].
    credentials: Vec<Credential>,
}

#[derive(Deserialize)]
struct TokenAnswer {
    token: Option<String>,
    access_token: Option<String>,
}

impl Tried {
    /// Returns whether the request was sent without credentials.
    pub(crate) fn is_open(&self) -> bool {
        let mut credentials = self.credentials.iter();
        !self.is_secret && credentials.all(|credential| *credential == Credential::Anonymous)
    }
}

impl Authorizer {
    pub(crate) fn new(reference: Reference, files: Vec<PathBuf>, logins: Option<Logins>) -> Self {
        Authorizer { reference, files, logins, state: Mutex::default() }
    }

    /// Returns the authorization known to work for `scope`; none until the registry has asked for
    /// it.
    pub(crate) async fn begin(&self, scope: &str) -> Tried {
        let state = self.state.lock().await;
        let grant = state.grants.get(scope);
        let is_secret = grant.is_some_and(|grant| grant.credential != Credential::Anonymous);
        let header = grant.map(|grant| grant.header.clone());
        Tried { header, is_secret, credentials: Vec::new() }
    }

    /// Answers the challenge in `refusal`, a 401 to a request that was sent with [`Tried::header`].
    /// Whether there is something else to send.
    pub(crate) async fn renew(
        &self,
        http: &reqwest::Client,
        scope: &str,
        tried: &mut Tried,
        refusal: &Response,
    ) -> Result<bool, RegistryError> {
        let mut state = self.state.lock().await;
        if let Some(grant) = state.grants.get(scope)
            && Some(&grant.header) != tried.header.as_ref()
            && !tried.is_spent(&grant.credential)
        {
            tried.credentials.push(grant.credential.clone());
            tried.header = Some(grant.header.clone());
            return Ok(true);
        }
        let generation = self.logins.as_ref().map_or(0, Logins::generation);
        if let Some((when, then)) = state.refused.get(scope)
            && *then == generation
            && when.elapsed() < REFUSED
        {
            return Ok(false);
        }
        let logins = self.logins.iter().flat_map(|logins| logins.of(&self.reference));
        let mut candidates: Vec<Credential> = logins.map(Credential::from).collect();
        let (mut at, mut denied, mut has_read_files) = (0, None, false);
        loop {
            if at == candidates.len() {
                if has_read_files {
                    break;
                }
                // Read now, since others may have written to them.
                candidates.push(credentials::find(&self.files, &self.reference).await?);
                has_read_files = true;
            }
            let credential = candidates[at].clone();
            at += 1;
            if tried.is_spent(&credential) {
                continue;
            }
            tried.credentials.push(credential.clone());
            match self.exchange(http, scope, &credential, refusal).await {
                // The same password again would be refused again.
                Ok(Some(header)) if Some(&header) != tried.header.as_ref() => {
                    tried.header = Some(header.clone());
                    state.refused.remove(scope);
                    state.grants.insert(scope.to_owned(), Grant { header, credential });
                    return Ok(true);
                }
                Ok(_) => {}
                Err(error @ RegistryError::Denied { .. }) => denied = Some(error),
                Err(error) => return Err(error),
            }
            // Not even a token: a second time would be no better.
            tried.credentials.push(credential);
        }
        state.grants.remove(scope);
        state.refused.insert(scope.to_owned(), (Instant::now(), generation));
        denied.map_or(Ok(false), Err)
    }

    /// Exchanges `credential` for an authorization, by the challenges in `refusal`.
    async fn exchange(
        &self,
        http: &reqwest::Client,
        scope: &str,
        credential: &Credential,
        refusal: &Response,
    ) -> Result<Option<HeaderValue>, RegistryError> {
        let mut granted = None;
        let challenges = refusal.headers().get_all(WWW_AUTHENTICATE);
        for challenge in challenges.iter().filter_map(|value| value.to_str().ok()) {
            for challenge in http_auth::parse_challenges(challenge).unwrap_or_default() {
                if challenge.scheme.eq_ignore_ascii_case("bearer") {
                    let registry = refusal.url();
                    granted =
                        Some(self.fetch(http, &challenge, scope, credential, registry).await?);
                } else if challenge.scheme.eq_ignore_ascii_case("basic")
                    && granted.is_none()
                    && let Credential::Password { user, secret } = credential
                {
                    granted = Some(basic(user, &secret.0));
                }
            }
        }
        Ok(granted)
    }

    /// Gets a token from the server that `registry` names in its challenge.
    async fn fetch(
        &self,
        http: &reqwest::Client,
        challenge: &ChallengeRef<'_>,
        scope: &str,
        credential: &Credential,
        registry: &Url,
    ) -> Result<HeaderValue, RegistryError> {
        let place = self.reference.registry();
        let parameter = |name: &str| {
            let found = challenge.params.iter().find(|(key, _)| key.eq_ignore_ascii_case(name));
            found.map(|(_, value)| value.to_unescaped())
        };
        let malformed =
            |problem: String| RegistryError::malformed(place, "the bearer challenge", problem);
        let realm = parameter("realm").ok_or_else(|| malformed("it has no realm".to_owned()))?;
        let mut url =
            Url::parse(&realm).map_err(|error| malformed(format!("its realm: {error}")))?;
        check_realm(&url, registry).map_err(malformed)?;
        let object = "an access token";
        let service = parameter("service");
        let request = if let Credential::Identity(token) = credential {
            let mut form = Url::parse("form:").map_err(|error| malformed(error.to_string()))?;
            form.query_pairs_mut()
                .append_pair("grant_type", "refresh_token")
                .append_pair("service", service.as_deref().unwrap_or_default())
                .append_pair("client_id", CLIENT_ID)
                .append_pair("scope", scope)
                .append_pair("refresh_token", &token.0);
            http.post(url)
                .header(CONTENT_TYPE, "application/x-www-form-urlencoded")
                .body(form.query().unwrap_or_default().to_owned())
        } else {
            let mut query = url.query_pairs_mut();
            if let Some(service) = &service {
                query.append_pair("service", service);
            }
            for scope in scope.split(' ') {
                query.append_pair("scope", scope);
            }
            drop(query);
            match credential {
                Credential::Password { user, secret } => {
                    http.get(url).header(AUTHORIZATION, basic(user, &secret.0))
                }
                _ => http.get(url),
            }
        };
        let again = request.try_clone();
        let answer = match (request.send().await, again) {
            (Err(error), Some(again)) if stale(&error) => again.send().await,
            (answer, _) => answer,
        };
        let answer = answer.map_err(|error| RegistryError::http(place, object, error))?;
        let status = answer.status();
        if !status.is_success() {
            let detail = detail(answer).await;
            let (place, object) = (place.to_owned(), object.to_owned());
            if status.is_server_error() || status.as_u16() == 429 {
                let status = status.as_u16();
                return Err(RegistryError::Status {
                    place,
                    object,
                    status,
                    detail,
                    retry_after: None,
                });
            }
            return Err(RegistryError::Denied { host: place.clone(), place, object, detail });
        }
        let body = read_bounded(answer, TOKEN_LIMIT, place, object).await?;
        let malformed =
            || RegistryError::malformed(place, object, "the answer is not JSON with `token`");
        let answer: TokenAnswer = serde_json::from_slice(&body).map_err(|_| malformed())?;
        let token = answer.token.or(answer.access_token).ok_or_else(malformed)?;
        tracing::debug!(registry = place, scope, "new access token");
        sensitive(format!("Bearer {token}")).ok_or_else(malformed)
    }
}

impl Tried {
    /// Returns whether a credential failed for good. A refused token may have expired just then, so
    /// a second one is fetched.
    fn is_spent(&self, credential: &Credential) -> bool {
        self.credentials.iter().filter(|tried| *tried == credential).count() >= 2
    }

    /// Returns whether the header was obtained with a password.
    pub(crate) fn is_secret(&self) -> bool {
        self.is_secret
    }

    /// The header to send.
    pub(crate) fn header(&self) -> Option<&HeaderValue> {
        self.header.as_ref()
    }
}

/// Checks that a registry may send the node to this token server. The server's answer reaches the
/// registry, so a realm must not be an address that only the node can reach. Plain HTTP is allowed
/// only to the registry's own host, and so are the node's own addresses and those of its link,
/// where clouds serve the machine's identity.
fn check_realm(realm: &Url, registry: &Url) -> Result<(), String> {
    let same_host = realm.host_str() == registry.host_str();
    match realm.scheme() {
        "https" => {}
        "http" if registry.scheme() == "http" && same_host => {}
        "http" if registry.scheme() == "http" => {
            let expected = registry.host_str().unwrap_or_default();
            return Err(format!("its realm uses http, expected https, or the host {expected}"));
        }
        other => return Err(format!("its realm uses {other}, expected https")),
    }
    let host = realm.host_str().unwrap_or_default().trim_end_matches('.');
    let of_the_node = match host.trim_matches(['[', ']']).parse() {
        Ok(IpAddr::V4(ip)) => is_of_the_node(ip),
        Ok(IpAddr::V6(ip)) => match ip.to_ipv4_mapped() {
            Some(ip) => is_of_the_node(ip),
            None => ip.is_loopback() || ip.is_unicast_link_local() || ip.is_unspecified(),
        },
        Err(_) => host == "localhost" || host.ends_with(".localhost") || host.is_empty(),
    };
    if of_the_node && !same_host {
        return Err("its realm is an address of the node, expected the token server's".to_owned());
    }
    Ok(())
}

fn is_of_the_node(ip: Ipv4Addr) -> bool {
    ip.is_loopback() || ip.is_link_local() || ip.is_unspecified()
}

fn basic(user: &str, secret: &str) -> HeaderValue {
    let encoded = STANDARD.encode(format!("{user}:{secret}"));
    // Base64 is always a legal header value.
    sensitive(format!("Basic {encoded}")).unwrap_or_else(|| HeaderValue::from_static(""))
}

/// A header value that `Debug` hides.
fn sensitive(text: String) -> Option<HeaderValue> {
    let mut value = HeaderValue::try_from(text).ok()?;
    value.set_sensitive(true);
    Some(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn token_servers_are_not_on_the_node() {
        let check = |realm: &str, registry: &str| {
            check_realm(&realm.parse().unwrap(), &registry.parse().unwrap())
        };
        for (realm, registry) in [
            ("https://auth.docker.io/token", "https://registry-1.docker.io/v2/"),
            ("https://10.0.0.7/token", "https://registry.example/v2/"),
            ("http://harbor.example:8080/service/token", "http://harbor.example/v2/"),
            ("http://127.0.0.1:5001/auth", "http://127.0.0.1:5000/v2/"),
            ("https://localhost:5001/auth", "https://localhost:5000/v2/"),
        ] {
            assert_eq!(check(realm, registry), Ok(()), "{realm}");
        }
        for (realm, registry, expected) in [
            (
                "http://auth.example/token",
                "https://registry.example/v2/",
                "uses http, expected https",
            ),
            ("http://10.0.0.7/token", "http://registry.example/v2/", "the host registry.example"),
            ("file:///etc/token", "https://registry.example/v2/", "uses file"),
            ("https://127.0.0.1:8443/token", "https://registry.example/v2/", "address of the node"),
            ("https://169.254.169.254/", "https://registry.example/v2/", "address of the node"),
            ("https://[::1]/", "https://registry.example/v2/", "address of the node"),
            ("https://[::ffff:127.0.0.1]/", "https://registry.example/v2/", "address of the node"),
            ("https://[fe80::1]/", "https://registry.example/v2/", "address of the node"),
            ("https://0x7f.1/", "https://registry.example/v2/", "address of the node"),
            ("https://LOCALHOST./", "https://registry.example/v2/", "address of the node"),
            ("https://0.0.0.0/", "https://registry.example/v2/", "address of the node"),
        ] {
            let error = check(realm, registry).unwrap_err();
            assert!(error.contains(expected), "{realm}: {error}");
        }
    }
}
