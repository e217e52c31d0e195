//! Errors of documents that carry signatures.

/// Why a document cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the {document} {problem}")]
pub struct DocumentError {
    /// The document: payload, envelope, statement, bundle.
    pub document: &'static str,
    /// The problem, with the expected value.
    pub problem: String,
}

impl DocumentError {
    pub(crate) fn new(document: &'static str, problem: impl Into<String>) -> Self {
        DocumentError { document, problem: problem.into() }
    }
}

/// Parses JSON of at most `limit` bytes.
pub(crate) fn json<'a, T: serde::Deserialize<'a>>(
    document: &'static str,
    raw: &'a [u8],
    limit: usize,
) -> Result<T, DocumentError> {
    if raw.len() > limit {
        let problem = format!("has {} bytes, expected at most {limit}", raw.len());
        return Err(DocumentError::new(document, problem));
    }
    serde_json::from_slice(raw)
        .map_err(|error| DocumentError::new(document, format!("cannot be read: {error}")))
}

/// Decodes standard base64; bundles of some writers use the alphabet for URLs.
pub(crate) fn base64(document: &'static str, text: &str) -> Result<Vec<u8>, DocumentError> {
    use base64::{
        Engine as _,
        engine::general_purpose::{STANDARD, URL_SAFE},
    };
    let decoded = STANDARD.decode(text).or_else(|_| URL_SAFE.decode(text));
    decoded.map_err(|error| DocumentError::new(document, format!("has no base64: {error}")))
}

/// Encodes standard base64.
pub(crate) fn to_base64(bytes: &[u8]) -> String {
    use base64::{Engine as _, engine::general_purpose::STANDARD};
    STANDARD.encode(bytes)
}
