//! The Dead Simple Signing Envelope: a payload, its type, and signatures of both.

use serde::{Deserialize, Serialize};

use crate::error::{self, DocumentError};

/// Limit of signatures to check in one envelope.
const SIGNATURES: usize = 16;

const DOCUMENT: &str = "envelope";

/// An envelope, decoded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Envelope {
    /// The type of the payload.
    pub payload_type: String,
    /// The signed bytes.
    pub payload: Vec<u8>,
    /// Signatures of [`Envelope::signed_bytes`].
    pub signatures: Vec<Vec<u8>>,
}

/// The form that an envelope has in JSON.
#[derive(Debug, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Encoded {
    payload: String,
    payload_type: String,
    signatures: Vec<Signature>,
}

#[derive(Debug, Deserialize, Serialize)]
struct Signature {
    sig: String,
}

impl Envelope {
    /// An envelope without signatures.
    pub fn new(payload_type: &str, payload: Vec<u8>) -> Self {
        Envelope { payload_type: payload_type.to_owned(), payload, signatures: Vec::new() }
    }

    /// The bytes that are signed: the pre-authentication encoding of type and payload.
    pub fn signed_bytes(&self) -> Vec<u8> {
        let Envelope { payload_type, payload, .. } = self;
        let head = format!("DSSEv1 {} {payload_type} {} ", payload_type.len(), payload.len());
        [head.as_bytes(), payload].concat()
    }

    pub(crate) fn decode(encoded: &Encoded) -> Result<Self, DocumentError> {
        let count = encoded.signatures.len();
        if count > SIGNATURES {
            let problem = format!("has {count} signatures, expected at most {SIGNATURES}");
            return Err(DocumentError::new(DOCUMENT, problem));
        }
        let decode = |text: &str| error::base64(DOCUMENT, text);
        let signatures = encoded.signatures.iter().map(|signature| decode(&signature.sig));
        Ok(Envelope {
            payload_type: encoded.payload_type.clone(),
            payload: decode(&encoded.payload)?,
            signatures: signatures.collect::<Result<_, _>>()?,
        })
    }

    pub(crate) fn encode(&self) -> Encoded {
        let signature = |bytes: &Vec<u8>| Signature { sig: error::to_base64(bytes) };
        Encoded {
            payload: error::to_base64(&self.payload),
            payload_type: self.payload_type.clone(),
            signatures: self.signatures.iter().map(signature).collect(),
        }
    }
}
