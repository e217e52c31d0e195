//! Logins: the token server, and the rights of its tokens.

use super::{Login, State};
use crate::http::{self, Request, Response};

impl State {
    /// Returns whether the request may do `action` in `repository`.
    pub(super) fn allows(&self, request: &Request, repository: &str, action: &str) -> bool {
        let header = request.header("authorization").unwrap_or_default();
        match &self.login {
            Login::None => true,
            Login::Basic(user, password) => header == basic(user, password),
            Login::Bearer(..) | Login::Identity(_) => {
                let scopes =
                    header.strip_prefix("Bearer ").and_then(|token| self.tokens.get(token));
                let grants = |scope: &String| {
                    let actions = scope.strip_prefix(&format!("repository:{repository}:"));
                    actions.is_some_and(|actions| actions.split(',').any(|a| a == action))
                };
                scopes.is_some_and(|scopes| scopes.iter().any(grants))
            }
        }
    }

    /// The token server.
    pub(super) fn token(&mut self, request: &Request, body: &[u8]) -> Response {
        let form = String::from_utf8_lossy(body).into_owned();
        let (known, scopes) = match &self.login {
            Login::Identity(token) => {
                let good = request.method == "POST"
                    && http::parameters(&form, "grant_type") == ["refresh_token"]
                    && http::parameters(&form, "refresh_token") == [token.as_str()];
                let scopes = http::parameters(&form, "scope").join(" ");
                (good, scopes.split(' ').map(str::to_owned).collect())
            }
            Login::Bearer(user, password) => {
                let open = user.is_empty() && password.is_empty();
                let expected = (!open).then(|| basic(user, password));
                let good = request.header("authorization") == expected.as_deref();
                (request.method == "GET" && good, request.query("scope"))
            }
            Login::None | Login::Basic(..) => (false, Vec::new()),
        };
        if !known && !self.empty_tokens {
            return Response::error(401, "UNAUTHORIZED");
        }
        let scopes = if known { scopes } else { Vec::new() };
        let token = format!("token-{}", self.next());
        self.tokens.insert(token.clone(), scopes);
        Response::new(200).body(format!(r#"{{"token":"{token}"}}"#).into_bytes())
    }
}

fn basic(user: &str, password: &str) -> String {
    use base64::{Engine as _, engine::general_purpose::STANDARD};
    format!("Basic {}", STANDARD.encode(format!("{user}:{password}")))
}
