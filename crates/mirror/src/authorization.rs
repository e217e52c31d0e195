//! Logins that clients show, and challenges that ask for them.
//!
//! The mirror has no users. A client shows the login that it would show the registry, after a
//! challenge with a realm of the mirror's own: in each request (Basic), or once at the token
//! endpoint (Bearer).

use std::{net::SocketAddr, time::SystemTime};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use lazuli_registry::{Login, Reference};

use crate::seal::Seal;

/// Limit of an Authorization header, in bytes.
const HEADER_LIMIT: usize = 96 << 10;

/// The login in a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Shown {
    /// Nothing: the registry may be open to anonymous clients.
    Nothing,
    /// A login for the registry.
    Login(Login),
    /// A token that has ended or is for another registry, or no login at all.
    Unusable,
}

impl Shown {
    /// Reads an Authorization header for a request about `registry`.
    pub(crate) fn read(header: Option<&str>, registry: &str, seal: &Seal) -> Self {
        let Some(header) = header else { return Shown::Nothing };
        let Some((scheme, rest)) = header.split_once(' ').filter(|_| header.len() <= HEADER_LIMIT)
        else {
            return Shown::Unusable;
        };
        let login = match scheme.to_ascii_lowercase().as_str() {
            "basic" => basic(rest),
            "bearer" => seal.login(registry, rest.trim(), SystemTime::now()),
            _ => None,
        };
        login.map_or(Shown::Unusable, Shown::Login)
    }
}

/// The login in a Basic header.
pub(crate) fn basic(encoded: &str) -> Option<Login> {
    let text = String::from_utf8(STANDARD.decode(encoded.trim()).ok()?).ok()?;
    let (user, secret) = text.split_once(':')?;
    (!user.is_empty() && !secret.is_empty()).then(|| Login::new(user, secret))
}

/// Why a client is asked for its login.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Challenge {
    /// The request has no login.
    NoLogin,
    /// The token has expired, or is not one of this mirror's.
    InvalidToken,
}

/// The challenges that a client has to answer to see `reference`, for one WWW-Authenticate header
/// each.
pub(crate) fn challenges(
    address: SocketAddr,
    reference: &Reference,
    why: Challenge,
) -> [String; 2] {
    let (registry, repository) = (reference.registry(), reference.repository());
    // Clients fetch a new token only if they are told that theirs is the reason.
    let error = match why {
        Challenge::InvalidToken => r#",error="invalid_token""#,
        Challenge::NoLogin => "",
    };
    [
        format!(
            r#"Bearer realm="https://{address}/token",service="{registry}",scope="repository:{repository}:pull"{error}"#
        ),
        format!(r#"Basic realm="{registry}""#),
    ]
}

/// The login that a client sends to the token endpoint, and the registry that it is for.
pub(crate) struct TokenRequest {
    pub(crate) registry: String,
    pub(crate) login: Option<Login>,
}

impl TokenRequest {
    /// Reads the query of a GET with its Authorization header, or the form of a POST.
    pub(crate) fn parse(parameters: &[u8], authorization: Option<&str>) -> Option<Self> {
        let (mut registry, mut user, mut password, mut refresh) = (None, None, None, None);
        for (key, value) in form_urlencoded::parse(parameters) {
            let known = match &*key {
                "service" => &mut registry,
                "username" => &mut user,
                "password" => &mut password,
                "refresh_token" => &mut refresh,
                _ => continue,
            };
            known.get_or_insert_with(|| value.into_owned());
        }
        let filled = |text: Option<String>| text.filter(|text| !text.is_empty());
        let shown = authorization.and_then(|header| {
            let (scheme, rest) = header.split_once(' ')?;
            scheme.eq_ignore_ascii_case("basic").then(|| basic(rest))?
        });
        let login = match (filled(user), filled(password), filled(refresh)) {
            (_, _, Some(token)) => Some(Login::new("", token)),
            (Some(user), Some(password), None) => Some(Login::new(user, password)),
            _ => shown,
        };
        Some(TokenRequest { registry: filled(registry)?, login })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::seal::SECRET;

    fn seal() -> Seal {
        Seal::new(&[1; SECRET]).unwrap()
    }

    #[test]
    fn a_login_is_in_the_header_or_in_a_token() {
        let (seal, login) = (seal(), Login::new("ann", "pass:word"));
        let token = seal.token("r.example", &login, SystemTime::now()).unwrap();
        let basic = STANDARD.encode("ann:pass:word");
        for header in [format!("Basic {basic}"), format!("bearer {token}")] {
            let shown = Shown::read(Some(&header), "r.example", &seal);
            assert_eq!(shown, Shown::Login(login.clone()));
        }
        assert_eq!(Shown::read(None, "r.example", &seal), Shown::Nothing);
        let empty = STANDARD.encode(":");
        for header in [
            format!("Basic {empty}"),
            "Basic %%%".to_owned(),
            "Bearer x".to_owned(),
            "Negotiate x".to_owned(),
            "Basic".to_owned(),
            format!("Basic {}", "A".repeat(HEADER_LIMIT)),
        ] {
            assert_eq!(Shown::read(Some(&header), "r.example", &seal), Shown::Unusable);
        }
        let shown = Shown::read(Some(&format!("Bearer {token}")), "other.example", &seal);
        assert_eq!(shown, Shown::Unusable);
    }

    #[test]
    fn tokens_are_asked_for_with_a_query_or_a_form() {
        let parse = |parameters: &str, header: Option<&str>| {
            let request = TokenRequest::parse(parameters.as_bytes(), header)?;
            assert_eq!(request.registry, "r.example:5000");
            Some(request.login)
        };
        let ann = Some(Login::new("ann", "s&t"));
        let service = "service=r.example%3A5000&scope=repository:a:pull";
        let header = format!("Basic {}", STANDARD.encode("ann:s&t"));
        assert_eq!(parse(service, Some(&header)), Some(ann.clone()));
        let form = format!("grant_type=password&{service}&username=ann&password=s%26t");
        assert_eq!(parse(&form, None), Some(ann));
        let form = format!("grant_type=refresh_token&{service}&refresh_token=x");
        assert_eq!(parse(&form, None), Some(Some(Login::new("", "x"))));
        assert_eq!(parse(service, None), Some(None));
        assert_eq!(parse("scope=repository:a:pull", Some(&header)), None);
    }
}
