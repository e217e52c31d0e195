//! Targets of requests: the paths of the OCI distribution API.
//!
//! ```text
//! /v2/library/debian/manifests/12?ns=docker.io      containerd says which registry is meant
//! /v2/quay.io/org/app/manifests/1                   podman, CRI-O: the registry begins the path
//! /v2/library/debian/manifests/12                   dockerd, which has mirrors of Docker Hub only
//! ```

use lazuli_image::Digest;
use lazuli_registry::Reference;

/// Limit of a name, in bytes. The specification has 255 for repository and host.
const NAME_LIMIT: usize = 512;

/// The registry of names without one.
const DEFAULT_REGISTRY: &str = "docker.io";

/// The resource that a request asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    /// `/v2/`, which answers whether the API exists.
    Root,
    /// A token for the credentials in the request.
    Token,
    /// A manifest or an index.
    Manifest(Reference),
    /// A blob of a repository.
    Blob(Reference, Digest),
}

/// Why a path leads nowhere.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum NoTarget {
    /// Not a path of the API, or not one that mirrors serve.
    Unknown,
    /// A malformed name or digest, and the reason.
    Malformed(String),
}

impl Target {
    /// Parses path and query of a request.
    pub(crate) fn parse(path: &str, query: Option<&str>) -> Result<Self, NoTarget> {
        let malformed = |problem: &str| NoTarget::Malformed(problem.to_owned());
        let path = percent_encoding::percent_decode_str(path).decode_utf8();
        let path = path.map_err(|_| malformed("the path is not UTF-8"))?;
        match &*path {
            "/v2/" | "/v2" => return Ok(Target::Root),
            "/token" => return Ok(Target::Token),
            _ => {}
        }
        let rest = path.strip_prefix("/v2/").ok_or(NoTarget::Unknown)?;
        let (front, last) = rest.rsplit_once('/').ok_or(NoTarget::Unknown)?;
        let (name, kind) = front.rsplit_once('/').ok_or(NoTarget::Unknown)?;
        let separator = match kind {
            "manifests" if last.contains(':') => '@',
            "manifests" => ':',
            "blobs" => '@',
            _ => return Err(NoTarget::Unknown),
        };
        if name.len() + last.len() > NAME_LIMIT {
            return Err(malformed("the name is too long"));
        }
        let (registry, repository) = split_registry(name, query);
        let text = format!("{registry}/{repository}{separator}{last}");
        let reference: Reference =
            text.parse().map_err(|error| NoTarget::Malformed(format!("{error}")))?;
        if reference.registry() != registry {
            return Err(NoTarget::Malformed(format!("`{registry}` is not the host of a registry")));
        }
        match kind {
            "manifests" => Ok(Target::Manifest(reference)),
            _ => {
                let digest = last.parse().map_err(|_| malformed("a blob is named by a digest"))?;
                Ok(Target::Blob(reference, digest))
            }
        }
    }
}

/// The registry that is meant, and the repository in it.
fn split_registry<'a>(name: &'a str, query: Option<&str>) -> (String, &'a str) {
    let pairs = form_urlencoded::parse(query.unwrap_or_default().as_bytes());
    if let Some(registry) = pairs.into_iter().find(|(key, _)| key == "ns") {
        return (registry.1.into_owned(), name);
    }
    match name.split_once('/') {
        Some((host, repository)) if host.contains(['.', ':']) || host == "localhost" => {
            (host.to_owned(), repository)
        }
        _ => (DEFAULT_REGISTRY.to_owned(), name),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIGEST: &str = "sha256:44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a";

    fn named(path: &str, query: Option<&str>) -> Result<String, NoTarget> {
        Ok(match Target::parse(path, query)? {
            Target::Root => "root".to_owned(),
            Target::Token => "token".to_owned(),
            Target::Manifest(reference) => reference.to_string(),
            Target::Blob(reference, digest) => {
                format!("{digest} in {}/{}", reference.registry(), reference.repository())
            }
        })
    }

    #[test]
    fn the_registry_is_in_the_query_or_begins_the_path() {
        for (path, query, expected) in [
            ("/v2/", None, "root"),
            ("/token", Some("service=docker.io"), "token"),
            ("/v2/library/a/manifests/1", Some("ns=docker.io"), "docker.io/library/a:1"),
            ("/v2/a/b/manifests/1", Some("ns=r.example%3A5000"), "r.example:5000/a/b:1"),
            ("/v2/quay.io/a/b/manifests/1", None, "quay.io/a/b:1"),
            ("/v2/localhost/a/manifests/1", None, "localhost/a:1"),
            ("/v2/library/a/manifests/1", None, "docker.io/library/a:1"),
            ("/v2/a/manifests/manifests/1", Some("ns=r.example"), "r.example/a/manifests:1"),
        ] {
            assert_eq!(named(path, query).as_deref(), Ok(expected), "{path} {query:?}");
        }
        let by_digest = format!("/v2/a/manifests/{}", DIGEST.replace(':', "%3A"));
        assert_eq!(named(&by_digest, Some("ns=r.example")), Ok(format!("r.example/a@{DIGEST}")));
        let blob = named(&format!("/v2/a/b/blobs/{DIGEST}"), Some("ns=r.example"));
        assert_eq!(blob, Ok(format!("{DIGEST} in r.example/a/b")));
    }

    #[test]
    fn unknown_paths_are_refused() {
        for path in ["/", "/v1/", "/v2/_catalog", "/v2/a/tags/list", "/v2/a/referrers/x", "/v2/a"] {
            assert_eq!(named(path, None), Err(NoTarget::Unknown), "{path}");
        }
        for (path, query) in [
            ("/v2/a/manifests/1", "ns=r"),
            ("/v2/a/manifests/1", "ns=r.example/b"),
            ("/v2/a/manifests/1", "ns="),
            ("/v2/../a/manifests/1", "ns=r.example"),
            ("/v2/A/manifests/1", "ns=r.example"),
            ("/v2/a/manifests/sha256:12", "ns=r.example"),
            ("/v2/a/blobs/1", "ns=r.example"),
            ("/v2/a/manifests/%ff", "ns=r.example"),
        ] {
            let found = named(path, Some(query));
            assert!(matches!(found, Err(NoTarget::Malformed(_))), "{path} {query}: {found:?}");
        }
    }
}
