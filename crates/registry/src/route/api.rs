//! Addresses of registries' APIs.

use reqwest::Url;

/// The root of the API at a host and port. The error is the problem.
pub(crate) fn api(scheme: &str, host: &str) -> Result<Url, String> {
    // Docker Hub's API is not at the host that names it.
    let host = if host == "docker.io" { "registry-1.docker.io" } else { host };
    Url::parse(&format!("{scheme}://{host}/v2/")).map_err(|error| error.to_string())
}
