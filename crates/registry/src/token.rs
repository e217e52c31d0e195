//! What a request says in its `Authorization` header.
//!
//! A registry tells what it wants in its first 401: `Basic`, or `Bearer` with the address of a token
//! server. A token is kept for each scope until the registry refuses it; many requests that are refused
//! at once cause one renewal.

use std::{collections::HashMap, path::PathBuf};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use http_auth::ChallengeRef;
use reqwest::{
    Response, Url,
    header::{AUTHORIZATION, CONTENT_TYPE, HeaderValue, WWW_AUTHENTICATE},
};
use serde::Deserialize;
use tokio::sync::{Mutex, OnceCell};

use crate::{
    auth::{self, Credential},
    client::{detail, read_bounded},
    error::RegistryError,
    name::Reference,
};

/// Biggest answer of a token server that is read, in bytes; signed tokens have some KiB.
const TOKEN_LIMIT: u64 = 1 << 20;

/// Who we are to token servers, which show it in lists of sessions.
const CLIENT_ID: &str = "lazuli";

/// Makes and keeps authorizations for one registry.
#[derive(Debug)]
pub(crate) struct Authorizer {
    reference: Reference,
    files: Vec<PathBuf>,
    credential: OnceCell<Credential>,
    /// By scope. The lock is held during a renewal, so that others wait for its result.
    grants: Mutex<HashMap<String, HeaderValue>>,
}

#[derive(Deserialize)]
struct TokenAnswer {
    token: Option<String>,
    access_token: Option<String>,
}

impl Authorizer {
    pub(crate) fn new(reference: Reference, files: Vec<PathBuf>) -> Self {
        Authorizer { reference, files, credential: OnceCell::new(), grants: Mutex::default() }
    }

    /// What is known to work for `scope`; `None` before the registry asked for anything.
    pub(crate) async fn header(&self, scope: &str) -> Option<HeaderValue> {
        self.grants.lock().await.get(scope).cloned()
    }

    /// Answers the challenge in `refusal`, a 401 to a request that was sent with `used`. `None`: there
    /// is nothing (more) to offer.
    pub(crate) async fn renew(
        &self,
        http: &reqwest::Client,
        scope: &str,
        used: Option<&HeaderValue>,
        refusal: &Response,
    ) -> Result<Option<HeaderValue>, RegistryError> {
        let mut grants = self.grants.lock().await;
        if let Some(current) = grants.get(scope)
            && Some(current) != used
        {
            return Ok(Some(current.clone()));
        }
        let find = || auth::find(&self.files, &self.reference);
        let credential = self.credential.get_or_try_init(find).await?;
        let challenges = refusal.headers().get_all(WWW_AUTHENTICATE);
        let mut granted = None;
        for challenge in challenges.iter().filter_map(|value| value.to_str().ok()) {
            for challenge in http_auth::parse_challenges(challenge).unwrap_or_default() {
                if challenge.scheme.eq_ignore_ascii_case("bearer") {
                    let plain = refusal.url().scheme() == "http";
                    granted = Some(self.fetch(http, &challenge, scope, credential, plain).await?);
                } else if challenge.scheme.eq_ignore_ascii_case("basic")
                    && granted.is_none()
                    && let Credential::Password { user, secret } = credential
                {
                    granted = Some(basic(user, &secret.0));
                }
            }
        }
        // The same password again would be refused again.
        let Some(granted) = granted.filter(|granted| Some(granted) != used) else {
            grants.remove(scope);
            return Ok(None);
        };
        grants.insert(scope.to_owned(), granted.clone());
        Ok(Some(granted))
    }

    /// Gets a token. `plain`: the registry itself speaks plain HTTP, so its token server may, too.
    async fn fetch(
        &self,
        http: &reqwest::Client,
        challenge: &ChallengeRef<'_>,
        scope: &str,
        credential: &Credential,
        plain: bool,
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
        if !(url.scheme() == "https" || url.scheme() == "http" && plain) {
            return Err(malformed(format!("its realm uses {}, expected https", url.scheme())));
        }
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
        let answer =
            request.send().await.map_err(|error| RegistryError::http(place, object, error))?;
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

fn basic(user: &str, secret: &str) -> HeaderValue {
    let encoded = STANDARD.encode(format!("{user}:{secret}"));
    // Base64 is always a legal header value.
    sensitive(format!("Basic {encoded}")).unwrap_or_else(|| HeaderValue::from_static(""))
}

/// A header value whose `Debug` output hides it.
fn sensitive(text: String) -> Option<HeaderValue> {
    let mut value = HeaderValue::try_from(text).ok()?;
    value.set_sensitive(true);
    Some(value)
}
