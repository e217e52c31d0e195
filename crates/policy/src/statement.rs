//! in-toto statements: that an image is signed, and that it was converted from another.
//!
//! ```json
//! {"_type": "https://in-toto.io/Statement/v1",
//!  "subject": [{"name": "r.example/app", "digest": {"sha256": "HEX of the image's manifest"}}],
//!  "predicateType": "…", "predicate": {…}}
//! ```

use std::collections::BTreeMap;

use lazuli_image::{Algorithm, Digest};
use serde::{Deserialize, Serialize};

use crate::{
    bundle::BUNDLE_LIMIT,
    error::{self, DocumentError},
};

const DOCUMENT: &str = "statement";

/// Types of statements that are read; the first is written.
const TYPES: [&str; 2] = ["https://in-toto.io/Statement/v1", "https://in-toto.io/Statement/v0.1"];

/// Maximum number of subjects of one statement.
const SUBJECTS: usize = 256;

/// The empty predicate of cosign's image signatures. Other predicates describe an image without
/// approving it.
pub const SIGNED: &str = "https://sigstore.dev/cosign/sign/v1";

/// The predicate of [`Conversion`].
pub const CONVERTED: &str = "urn:lazuli:conversion:v1";

/// A statement: its subjects and predicate.
#[derive(Clone, Debug, PartialEq)]
pub struct Statement {
    /// The images.
    pub subjects: Vec<Subject>,
    /// The type of the predicate.
    pub predicate_type: String,
    /// The content of the predicate.
    pub predicate: serde_json::Value,
}

/// An image that a statement is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Subject {
    /// Its name, if the statement has one.
    pub name: Option<String>,
    /// Digest of its manifest or index.
    pub digest: Digest,
}

/// The statement that a lazy image was made from another image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Conversion {
    /// The image it was made from.
    pub source: Source,
    /// The program that made it.
    pub converter: Converter,
    /// Options of the conversion, by their names.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub options: BTreeMap<String, String>,
    /// The digest of the trace that ordered its data.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trace: Option<Digest>,
    /// Manifests of the images whose blobs it has.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub reused: Vec<Digest>,
}

/// The source of a conversion.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Source {
    /// Its name without digest: `r.example/app:1`.
    pub name: String,
    /// The digest of the index or manifest that the name meant. A signature of it is required.
    pub digest: Digest,
    /// The converted manifest, which is listed in that index if `digest` is one.
    pub manifest: Digest,
}

/// The program of a conversion.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Converter {
    /// Its version.
    pub version: String,
    /// The digest of the program.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub program: Option<Digest>,
}

#[derive(Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
struct Document {
    #[serde(rename = "_type")]
    kind: String,
    subject: Vec<Entry>,
    predicate_type: String,
    #[serde(default)]
    predicate: serde_json::Value,
}

#[derive(Deserialize, Serialize)]
struct Entry {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    digest: BTreeMap<String, String>,
}

impl Statement {
    /// A signature of the image `name` with this digest, in the form of cosign 3.
    pub fn signed(name: Option<String>, digest: Digest) -> Self {
        let subjects = vec![Subject { name, digest }];
        Statement { subjects, predicate_type: SIGNED.to_owned(), predicate: serde_json::json!({}) }
    }

    /// States that the lazy image `name` with this digest was made by `conversion`.
    ///
    /// # Errors
    /// `conversion` cannot be encoded as JSON.
    pub fn converted(
        name: String,
        digest: Digest,
        conversion: &Conversion,
    ) -> Result<Self, DocumentError> {
        let predicate = serde_json::to_value(conversion)
            .map_err(|error| DocumentError::new(DOCUMENT, error.to_string()))?;
        let subjects = vec![Subject { name: Some(name), digest }];
        Ok(Statement { subjects, predicate_type: CONVERTED.to_owned(), predicate })
    }

    /// Parses a statement. Subjects without a SHA-256 digest are dropped: they are no images.
    ///
    /// # Errors
    /// The bytes are not a statement, or one of an unknown type.
    pub fn parse(raw: &[u8]) -> Result<Self, DocumentError> {
        let document: Document = error::json(DOCUMENT, raw, BUNDLE_LIMIT)?;
        if !TYPES.contains(&document.kind.as_str()) {
            let problem = format!("has the type {:?}, expected `{}`", document.kind, TYPES[0]);
            return Err(DocumentError::new(DOCUMENT, problem));
        }
        let count = document.subject.len();
        if count > SUBJECTS {
            let problem = format!("has {count} subjects, expected at most {SUBJECTS}");
            return Err(DocumentError::new(DOCUMENT, problem));
        }
        let subjects = document.subject.into_iter().filter_map(|Entry { name, digest }| {
            let digest = Digest::from_hex(Algorithm::Sha256, digest.get("sha256")?)?;
            Some(Subject { name: name.filter(|name| !name.is_empty()), digest })
        });
        Ok(Statement {
            subjects: subjects.collect(),
            predicate_type: document.predicate_type,
            predicate: document.predicate,
        })
    }

    /// Returns the conversion, if the statement is about one.
    ///
    /// # Errors
    /// Its predicate is not what its type promises.
    pub fn conversion(&self) -> Result<Option<Conversion>, DocumentError> {
        if self.predicate_type != CONVERTED {
            return Ok(None);
        }
        let conversion = serde_json::from_value(self.predicate.clone());
        conversion.map(Some).map_err(|error| {
            DocumentError::new(DOCUMENT, format!("has no conversion as its predicate: {error}"))
        })
    }

    /// The statement as JSON: the payload of an envelope of type [`crate::media_type::IN_TOTO`].
    pub fn to_json(&self) -> Vec<u8> {
        let entry = |subject: &Subject| Entry {
            name: subject.name.clone(),
            digest: [("sha256".to_owned(), subject.digest.hex())].into(),
        };
        let document = Document {
            kind: TYPES[0].to_owned(),
            subject: self.subjects.iter().map(entry).collect(),
            predicate_type: self.predicate_type.clone(),
            predicate: self.predicate.clone(),
        };
        // Cannot fail: all values are strings and JSON values.
        serde_json::to_vec(&document).unwrap_or_default()
    }
}
