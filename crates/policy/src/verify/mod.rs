//! Decides whether the evidence about an image lets it run.

mod document;

use std::{collections::BTreeSet, fmt, path::PathBuf};

use lazuli_image::Digest;
use lazuli_registry::ImageName;

pub(crate) use self::document::Document;
use self::document::{Signed, documents, subjects};
use crate::{
    Conversion,
    evidence::Evidence,
    name::Asked,
    rules::{Converters, Ground, Policy, Requirement, Rule},
    statement,
};

/// Maximum number of reasons that an error lists.
const REASONS: usize = 6;

/// An image that may run under a name. Serving an image takes one; only [`verify`] makes it of
/// evidence, and [`crate::Gate`] of an earlier one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verified {
    manifest: Digest,
    by: String,
}

impl Verified {
    pub(crate) fn new(manifest: Digest, by: impl Into<String>) -> Self {
        Verified { manifest, by: by.into() }
    }

    /// Admits a mount of an earlier worker, which verified it before it mounted.
    pub fn taken_over(manifest: Digest) -> Self {
        Self::new(manifest, "an earlier worker")
    }

    /// Admits the manifest `manifest` too: it shows the layers of this image, by an index that a
    /// key vouches for or that this node made.
    pub fn of_index(&self, manifest: Digest) -> Self {
        Self::new(manifest, self.by.clone())
    }

    /// The digest of the image's manifest.
    pub fn manifest(&self) -> Digest {
        self.manifest
    }
}

impl fmt::Display for Verified {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.by)
    }
}

/// The refusal of an image: the requirement of its rule, and the evidence.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{image} may not run: {} asks for {wanted} ({rule}), and {}",
    policy.display(),
    listed(reasons)
)]
pub struct Refused {
    /// Name and digest.
    pub image: String,
    /// The policy's file.
    pub policy: PathBuf,
    /// The name of the rule.
    pub rule: String,
    /// The requirement of the rule.
    pub wanted: String,
    /// Why the evidence doesn't meet it.
    pub reasons: Vec<String>,
}

fn listed(reasons: &[String]) -> String {
    if reasons.is_empty() { "there is no signature".to_owned() } else { reasons.join("; ") }
}

/// A question: may this manifest run under this name?
#[derive(Clone, Debug)]
pub struct Claim<'a> {
    /// The name, as it was asked for.
    pub name: &'a ImageName,
    /// The manifest of the image.
    pub manifest: Digest,
    /// The index that lists it, if the name means one: a signature of an index covers its
    /// manifests.
    pub index: Option<Digest>,
    /// The manifest of the ordinary image that it replaces.
    pub replaces: Option<Digest>,
}

/// Decides whether an image may run.
///
/// # Errors
/// The policy does not want the image to run, or there is not enough evidence.
pub fn verify(
    policy: &Policy,
    claim: &Claim<'_>,
    evidence: &Evidence,
) -> Result<Verified, Box<Refused>> {
    let asked = Asked::of(claim.name);
    let (rule_name, rule) = policy.rule(&asked);
    let refused = |wanted: String, reasons: Vec<String>| {
        let (image, policy) = (format!("{asked}@{}", claim.manifest), policy.path().to_owned());
        Box::new(Refused { image, policy, rule: rule_name.clone(), wanted, reasons })
    };
    let requirement = match rule {
        Rule::Accept => return Ok(Verified::new(claim.manifest, format!("{rule_name}: accept"))),
        Rule::Reject => {
            let reasons = vec!["nothing of it may run here".to_owned()];
            return Err(refused("no image".to_owned(), reasons));
        }
        Rule::Require(requirement) => requirement,
    };
    let digests: Vec<Digest> = [claim.manifest].into_iter().chain(claim.index).collect();
    let mut reasons = Vec::new();
    if let Some(by) = approved(requirement, &asked, &digests, evidence, &mut reasons) {
        return Ok(Verified::new(claim.manifest, by));
    }
    for source in conversions(requirement, &asked, claim, evidence, &mut reasons) {
        if let Some(by) = approved_source(policy, &source, evidence, &mut reasons) {
            return Ok(Verified::new(claim.manifest, format!("{by}, converted")));
        }
    }
    reasons.dedup();
    reasons.truncate(REASONS);
    Err(refused(requirement.to_string(), reasons))
}

/// The sources named by trusted conversion statements, whose signatures are needed next.
pub(crate) fn sources(
    policy: &Policy,
    claim: &Claim<'_>,
    evidence: &Evidence,
) -> Vec<statement::Source> {
    let asked = Asked::of(claim.name);
    match policy.rule(&asked) {
        (_, Rule::Require(requirement)) => {
            let found = conversions(requirement, &asked, claim, evidence, &mut Vec::new());
            found.into_iter().map(|conversion| conversion.source).collect()
        }
        _ => Vec::new(),
    }
}

/// Returns the evidence that admits one of `digests` under the name, or `None`.
fn approved(
    requirement: &Requirement,
    asked: &Asked,
    digests: &[Digest],
    evidence: &Evidence,
    reasons: &mut Vec<String>,
) -> Option<String> {
    let fits = |signed: &Signed| signed.is_of(asked, digests, requirement);
    match requirement.ground.as_ref()? {
        Ground::Anything => Some("accept".to_owned()),
        Ground::Keys { keys, threshold } => {
            let mut signers = BTreeSet::new();
            for found in documents(evidence).map(|document| document.by_keys(keys)) {
                match found.and_then(|(numbers, signed)| fits(&signed).map(|()| numbers)) {
                    Ok(numbers) => signers.extend(numbers),
                    Err(reason) => reasons.push(reason),
                }
            }
            if signers.len() >= *threshold {
                let names = signers.iter().map(|number| keys[*number].fingerprint().to_string());
                return Some(names.collect::<Vec<_>>().join(", "));
            }
            if !signers.is_empty() {
                reasons.push(format!("{} of its keys signed it", signers.len()));
            }
            None
        }
        Ground::Keyless(identity) => {
            for document in documents(evidence) {
                match document.by_identity(identity, digests).and_then(|signed| fits(&signed)) {
                    Ok(()) => return Some(identity.to_string()),
                    Err(reason) => reasons.push(reason),
                }
            }
            None
        }
        Ground::ExternalVerifier(program) => {
            for consent in &evidence.consents {
                match &consent.answer {
                    Ok(()) if digests.contains(&consent.digest) => {
                        return Some(program.to_string());
                    }
                    Ok(()) => {}
                    Err(reason) => reasons.push(reason.clone()),
                }
            }
            None
        }
    }
}

/// Returns the signature that admits the source of a conversion under the source's own name. A
/// converter's key alone must not be enough to admit an unsigned image.
fn approved_source(
    policy: &Policy,
    conversion: &Conversion,
    evidence: &Evidence,
    reasons: &mut Vec<String>,
) -> Option<String> {
    let statement::Source { name, digest, manifest } = &conversion.source;
    let mut fail = |reason: String| reasons.push(format!("its source {name}@{digest}: {reason}"));
    let Ok(parsed) = name.parse::<ImageName>() else {
        fail("it is not the name of an image".to_owned());
        return None;
    };
    let asked = Asked::of(&parsed);
    let requirement = match policy.rule(&asked) {
        (_, Rule::Require(requirement)) if !requirement.accepts_anything() => requirement,
        (rule, Rule::Accept | Rule::Require(_)) => {
            fail(format!("{rule} accepts it unsigned, and a conversion needs a signed source"));
            return None;
        }
        (rule, Rule::Reject) => {
            fail(format!("{rule} rejects it"));
            return None;
        }
    };
    let mut problems = Vec::new();
    let by = approved(requirement, &asked, &[*digest, *manifest], evidence, &mut problems);
    if by.is_none() {
        fail(format!("{requirement} is wanted, and {}", listed(&problems)));
    }
    by
}

/// The conversions that trusted converters state of the image.
fn conversions(
    requirement: &Requirement,
    asked: &Asked,
    claim: &Claim<'_>,
    evidence: &Evidence,
    reasons: &mut Vec<String>,
) -> Vec<Conversion> {
    let Converters { keys, threshold } = &requirement.converters;
    let mut found: Vec<(Conversion, BTreeSet<usize>)> = Vec::new();
    for bundle in evidence.bundles.iter().filter(|_| !keys.is_empty()) {
        let stated = Document::Bundle(bundle).statement(keys);
        let Ok((signers, statement)) = stated else { continue };
        let Ok(Some(conversion)) = statement.conversion() else { continue };
        let is_subject = |subject: &crate::Subject| {
            let name = subject.name.as_deref().unwrap_or_default();
            subject.digest == claim.manifest && asked.is_signed_as(name, &requirement.signed_as)
        };
        let source = &conversion.source;
        let is_replaced = |digest: Digest| [source.digest, source.manifest].contains(&digest);
        if !statement.subjects.iter().any(is_subject) {
            reasons.push(format!("a conversion statement is about {}", subjects(&statement)));
        } else if !claim.replaces.is_none_or(is_replaced) {
            reasons.push(format!(
                "it was converted from {}, not from what the tag means",
                source.digest
            ));
        } else if let Some((_, converters)) =
            found.iter_mut().find(|(known, _)| known.source == conversion.source)
        {
            converters.extend(signers);
        } else {
            found.push((conversion, signers.into_iter().collect()));
        }
    }
    let most = found.iter().map(|(_, converters)| converters.len()).max();
    if let Some(most) = most.filter(|most| most < threshold) {
        reasons.push(format!("{most} of its converters stated the same conversion"));
    }
    found.retain(|(_, converters)| converters.len() >= *threshold);
    found.into_iter().map(|(conversion, _)| conversion).collect()
}

#[cfg(test)]
mod tests;
