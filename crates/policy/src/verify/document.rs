//! One signature or statement: its subjects and its signers.

use lazuli_image::{Algorithm, Digest};

use crate::{
    Bundle, Payload, Statement, Subject,
    evidence::{Evidence, SimpleSignature},
    key::PublicKey,
    keyless, media_type,
    name::Asked,
    rules::Requirement,
    statement,
};

/// The claims of a document with a trusted signature.
pub(super) struct Signed {
    subjects: Vec<(Option<String>, Digest)>,
}

impl Signed {
    pub(super) fn is_of(
        &self,
        asked: &Asked,
        digests: &[Digest],
        requirement: &Requirement,
    ) -> Result<(), String> {
        let mut reason = "a signature is of no image".to_owned();
        for (name, digest) in &self.subjects {
            if !digests.contains(digest) {
                reason = format!("a signature is of {digest}");
                continue;
            }
            match name {
                Some(name) if !asked.is_signed_as(name, &requirement.signed_as) => {
                    reason =
                        format!("a signature is of it as {name:?}, expected {}", asked.repository);
                }
                _ => return Ok(()),
            }
        }
        Err(reason)
    }
}

pub(super) fn documents(evidence: &Evidence) -> impl Iterator<Item = Document<'_>> {
    let signatures = evidence.signatures.iter().map(Document::Simple);
    signatures.chain(evidence.bundles.iter().map(|bundle| Document::Bundle(bundle)))
}

/// One piece of evidence.
pub(crate) enum Document<'a> {
    Simple(&'a SimpleSignature),
    Bundle(&'a [u8]),
}

impl Document<'_> {
    /// Verifies the document with `keys`. Returns the numbers of the keys that signed it, and the
    /// signed content.
    pub(super) fn by_keys(&self, keys: &[PublicKey]) -> Result<(Vec<usize>, Signed), String> {
        match self {
            Document::Simple(SimpleSignature { payload, signature, .. }) => {
                let signers = signers(keys, |key| key.verifies(payload, signature))?;
                Ok((signers, signed_by_payload(payload)?))
            }
            Document::Bundle(_) => {
                let (signers, statement) = self.statement(keys)?;
                Ok((signers, signed_by_statement(&statement)?))
            }
        }
    }

    /// Verifies the document with an identity, and returns the signed content. Signatures of
    /// digests other than `digests` are ignored.
    pub(super) fn by_identity(
        &self,
        identity: &keyless::Keyless,
        digests: &[Digest],
    ) -> Result<Signed, String> {
        match self {
            Document::Simple(SimpleSignature { certified: None, .. }) => {
                Err("a signature has no certificate".to_owned())
            }
            Document::Simple(SimpleSignature {
                payload,
                signature,
                certified: Some(certified),
            }) => {
                let digest = Algorithm::Sha256.digest(payload);
                let bundle = keyless::to_bundle(certified, signature, &digest);
                identity.verify(&bundle.map_err(|error| error.to_string())?, &digest)?;
                signed_by_payload(payload)
            }
            Document::Bundle(raw) => {
                let bundle = Bundle::parse(raw).map_err(|error| error.to_string())?;
                if !bundle.has_certificate {
                    return Err("a signature has no certificate".to_owned());
                }
                let statement = payload_of(&bundle)?;
                let signed = signed_by_statement(&statement)?;
                let mut found = signed.subjects.iter().map(|(_, digest)| *digest);
                let digest = found.find(|digest| digests.contains(digest));
                let digest =
                    digest.ok_or_else(|| format!("a signature is of {}", subjects(&statement)))?;
                identity.verify(raw, &digest)?;
                Ok(signed)
            }
        }
    }

    /// The statement in a bundle that some of `keys` signed, and which.
    pub(crate) fn statement(&self, keys: &[PublicKey]) -> Result<(Vec<usize>, Statement), String> {
        let Document::Bundle(raw) = self else { return Err("it is no bundle".to_owned()) };
        let bundle = Bundle::parse(raw).map_err(|error| error.to_string())?;
        let signed = bundle.envelope.signed_bytes();
        let signers = signers(keys, |key| {
            bundle.envelope.signatures.iter().any(|signature| key.verifies(&signed, signature))
        })?;
        Ok((signers, payload_of(&bundle)?))
    }
}

/// The numbers of those keys that signed something.
fn signers(keys: &[PublicKey], signed: impl Fn(&PublicKey) -> bool) -> Result<Vec<usize>, String> {
    let signers: Vec<_> = (0..keys.len()).filter(|number| signed(&keys[*number])).collect();
    if signers.is_empty() {
        Err("a signature is by none of its keys".to_owned())
    } else {
        Ok(signers)
    }
}

fn payload_of(bundle: &Bundle) -> Result<Statement, String> {
    let kind = &bundle.envelope.payload_type;
    if kind != media_type::IN_TOTO {
        return Err(format!("a signature is of {kind:?}, expected `{}`", media_type::IN_TOTO));
    }
    Statement::parse(&bundle.envelope.payload).map_err(|error| error.to_string())
}

fn signed_by_payload(payload: &[u8]) -> Result<Signed, String> {
    let Payload { reference, digest } =
        Payload::parse(payload).map_err(|error| error.to_string())?;
    Ok(Signed { subjects: vec![(Some(reference), digest)] })
}

/// Extracts the signed image. Attestations of other types describe an image without approving it.
fn signed_by_statement(statement: &Statement) -> Result<Signed, String> {
    if statement.predicate_type != statement::SIGNED {
        let kind = &statement.predicate_type;
        return Err(format!("a statement is of {kind:?}, expected `{}`", statement::SIGNED));
    }
    let subjects = statement.subjects.iter().map(|it| (it.name.clone(), it.digest));
    Ok(Signed { subjects: subjects.collect() })
}

pub(super) fn subjects(statement: &Statement) -> String {
    let subject = |it: &Subject| match &it.name {
        Some(name) => format!("{name}@{}", it.digest),
        None => it.digest.to_string(),
    };
    let subjects: Vec<_> = statement.subjects.iter().take(2).map(subject).collect();
    subjects.join(", ")
}
