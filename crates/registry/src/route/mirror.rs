//! Mirrors of registries.

use std::{collections::BTreeMap, fmt, str::FromStr};

use reqwest::Url;

use crate::{
    name::{InvalidName, host_problem},
    route::api::api,
};

/// Mirrors of one registry, at most.
pub const MIRROR_LIMIT: usize = 8;

/// A server that holds images of a registry under the same repositories.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mirror {
    /// The root of its API, see [`crate::route::server::Server::root`].
    pub(crate) root: Url,
    host: String,
}

impl FromStr for Mirror {
    type Err = InvalidName;

    fn from_str(text: &str) -> Result<Self, InvalidName> {
        let wanted = "a mirror is https://HOST[:PORT] or http://HOST[:PORT]";
        let (scheme, host) = match text.split_once("://") {
            Some((scheme @ ("https" | "http"), host)) => (scheme, host),
            _ => return Err(InvalidName::new(text, wanted)),
        };
        let host = host.strip_suffix('/').unwrap_or(host);
        if let Some((_, path)) = host.split_once('/') {
            let problem = format!("a mirror has no path, remove `/{path}`");
            return Err(InvalidName::new(text, problem));
        }
        if let Some(problem) = host_problem(host) {
            return Err(InvalidName::new(text, problem));
        }
        let root = api(scheme, host).map_err(|error| InvalidName::new(text, error))?;
        Ok(Mirror { root, host: host.to_owned() })
    }
}

impl fmt::Display for Mirror {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}", self.root.scheme(), self.host)
    }
}

/// The mirrors of each registry, in the order in which they are asked.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Mirrors(BTreeMap<String, Vec<Mirror>>);

impl Mirrors {
    /// Sets the mirrors of a registry, `docker.io` or `registry.example:5000`, as image names spell
    /// it.
    ///
    /// # Errors
    /// The host is none, has mirrors already, or there are more than [`MIRROR_LIMIT`].
    pub fn set(&mut self, registry: &str, mirrors: Vec<Mirror>) -> Result<(), InvalidName> {
        if let Some(problem) = host_problem(registry) {
            return Err(InvalidName::new(registry, problem));
        }
        if mirrors.len() > MIRROR_LIMIT {
            let problem = format!("{} mirrors are too many, at most {MIRROR_LIMIT}", mirrors.len());
            return Err(InvalidName::new(registry, problem));
        }
        if self.0.insert(registry.to_owned(), mirrors).is_some() {
            return Err(InvalidName::new(registry, "the registry is named twice"));
        }
        Ok(())
    }

    /// Those of `registry`.
    pub(crate) fn of(&self, registry: &str) -> &[Mirror] {
        self.0.get(registry).map_or(&[], Vec::as_slice)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mirrors_are_servers() {
        for (text, shown) in [
            ("https://mirror.example", "https://mirror.example"),
            ("http://127.0.0.1:5001/", "http://127.0.0.1:5001"),
            ("https://[::1]:5000", "https://[::1]:5000"),
        ] {
            assert_eq!(text.parse::<Mirror>().unwrap().to_string(), shown);
        }
        for (text, problem) in [
            ("mirror.example", "https://HOST"),
            ("ftp://mirror.example", "https://HOST"),
            ("https://", "not a registry host"),
            ("https://mirror.example/v2/proxy", "remove `/v2/proxy`"),
            ("https://user:secret@mirror.example", "no valid port"),
            ("https://mirror.example:99999", "no valid port"),
        ] {
            let error = text.parse::<Mirror>().unwrap_err().to_string();
            assert!(error.contains(problem), "{error}");
        }
    }

    #[test]
    fn a_registry_has_one_list() {
        let mut mirrors = Mirrors::default();
        let mirror: Mirror = "https://mirror.example".parse().unwrap();
        mirrors.set("docker.io", vec![mirror.clone()]).unwrap();
        assert_eq!(mirrors.of("docker.io"), std::slice::from_ref(&mirror));
        assert_eq!(mirrors.of("quay.io"), []);
        assert!(mirrors.set("docker.io", Vec::new()).is_err());
        assert!(mirrors.set("http://quay.io", Vec::new()).is_err());
        assert!(mirrors.set("quay.io", vec![mirror; MIRROR_LIMIT + 1]).is_err());
    }
}
