//! Reads output of the real cosign, see `tests/fixtures/cosign/make`, and signs with keys of every
//! kind.

use aws_lc_rs::{
    encoding::AsDer as _,
    rsa::KeySize,
    signature::{
        ECDSA_P256_SHA256_ASN1_SIGNING, ECDSA_P384_SHA384_ASN1_SIGNING, EcdsaKeyPair,
        Ed25519KeyPair, RsaKeyPair,
    },
};
use lazuli_image::{Algorithm, Digest, oci::Descriptor};
use serde_json::{Value, json};

use super::*;
use crate::{Bundle, Payload, PublicKey, Statement, media_type, statement::SIGNED};

macro_rules! cosigns {
    ($name:literal) => {
        include_bytes!(concat!("../../tests/fixtures/cosign/", $name)).as_slice()
    };
}

const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";

fn cosigns_key() -> SigningKey {
    SigningKey::from_pem(cosigns!("cosign.key"), Some(b"secret")).unwrap()
}

fn image() -> Digest {
    Algorithm::Sha256.digest(cosigns!("image.json"))
}

fn payload() -> Payload {
    Payload { reference: "registry.example/app".to_owned(), digest: image() }
}

fn parse(json: &[u8]) -> Value {
    serde_json::from_slice(json).unwrap()
}

fn pem(der: &[u8]) -> Vec<u8> {
    pem::encode(&pem::Pem::new("PRIVATE KEY", der)).into_bytes()
}

#[test]
fn cosigns_key_signs_for_cosigns_public_key() {
    let public = PublicKey::from_pem(cosigns!("cosign.pub")).unwrap();
    let key = cosigns_key();
    assert_eq!(key.public(), &public);
    let signature = key.sign(b"message").unwrap();
    assert!(public.verifies(b"message", &signature));
    assert!(!public.verifies(b"messagf", &signature));
}

#[test]
fn keys_that_cannot_sign_are_refused_with_what_to_do() {
    let from = |pem: &[u8], password| SigningKey::from_pem(pem, password).unwrap_err();
    let encrypted = cosigns!("cosign.key");
    assert_eq!(from(encrypted, None), SigningKeyError::NoPassword);
    assert_eq!(from(encrypted, Some(b"Secret")), SigningKeyError::WrongPassword);
    let error = from(cosigns!("cosign.pub"), None).to_string();
    assert!(error.contains("\"PUBLIC KEY\"") && error.contains("PKCS#8"), "{error}");
    assert!(matches!(from(b"", None), SigningKeyError::Pem(_)));
    assert!(matches!(from(&[b' '; (64 << 10) + 1], None), SigningKeyError::TooBig(_)));
    let ed25519 = Ed25519KeyPair::generate().unwrap();
    let ed25519 = ed25519.to_pkcs8().unwrap();
    assert_eq!(from(&pem(ed25519.as_ref()), None), SigningKeyError::Kind);
    assert_eq!(from(&pem(b"\x30\x03\x02\x01\x00"), None), SigningKeyError::Kind);
    // The memory that the derivation takes is in the file, so it is bounded.
    let section = pem::parse(encrypted).unwrap();
    for (name, value) in [("N", json!(1u64 << 40)), ("r", json!(1 << 20)), ("p", json!(4096))] {
        let mut document = parse(section.contents());
        document["kdf"]["params"][name] = value;
        let file = pem::encode(&pem::Pem::new(section.tag(), document.to_string()));
        let error = from(file.as_bytes(), Some(b"secret")).to_string();
        assert!(error.contains("scrypt parameters"), "{error}");
    }
}

#[test]
fn every_kind_of_key_signs_what_its_public_key_verifies() {
    let p256 = EcdsaKeyPair::generate(&ECDSA_P256_SHA256_ASN1_SIGNING).unwrap();
    let p384 = EcdsaKeyPair::generate(&ECDSA_P384_SHA384_ASN1_SIGNING).unwrap();
    let rsa = RsaKeyPair::generate(KeySize::Rsa2048).unwrap();
    let keys = [
        p256.to_pkcs8v1().unwrap().as_ref().to_vec(),
        p384.to_pkcs8v1().unwrap().as_ref().to_vec(),
        rsa.as_der().unwrap().as_ref().to_vec(),
    ];
    for der in keys {
        let key = SigningKey::from_pem(&pem(&der), None).unwrap();
        assert!(key.public().verifies(b"message", &key.sign(b"message").unwrap()), "{key:?}");
        assert!(!cosigns_key().public().verifies(b"message", &key.sign(b"message").unwrap()));
    }
}

#[test]
fn a_signature_manifest_equals_cosigns_except_for_the_signature() {
    let signed = SignedPayload::new(&cosigns_key(), &payload()).unwrap();
    assert_eq!(signed.payload, cosigns!("payload.json"));
    let mut manifest = SignatureManifest::default();
    manifest.add(&signed);
    assert_eq!(parse(&manifest.config()), parse(cosigns!("config.json")));
    let without = |raw: &[u8]| {
        let mut value = parse(raw);
        let annotations = &mut value["layers"][0]["annotations"];
        assert!(annotations[media_type::SIGNATURE].take().is_string());
        // Its bytes, and so its digest, depend on the order of members.
        value["config"]["digest"].take();
        value
    };
    assert_eq!(without(&manifest.to_json()), without(cosigns!("signatures.json")));
}

#[test]
fn our_bundle_is_cosigns_but_for_the_signature_and_the_name() {
    let key = cosigns_key();
    let mut statement = Statement::signed(None, image());
    let theirs = Bundle::parse(cosigns!("bundle.json")).unwrap();
    assert_eq!(Statement::parse(&theirs.envelope.payload).unwrap(), statement);
    let signed = theirs.envelope.signed_bytes();
    assert!(key.public().verifies(&signed, &theirs.envelope.signatures[0]));

    statement.subjects[0].name = Some("registry.example/app".to_owned());
    let bundle = sign_statement(&key, &statement).unwrap();
    let shape = |raw: &[u8]| {
        let mut value = parse(raw);
        for field in ["/dsseEnvelope/payload", "/dsseEnvelope/signatures/0/sig"] {
            assert!(value.pointer_mut(field).unwrap().take().is_string());
        }
        value
    };
    assert_eq!(shape(&bundle), shape(cosigns!("bundle.json")));
    let ours = Bundle::parse(&bundle).unwrap();
    assert_eq!(Statement::parse(&ours.envelope.payload).unwrap(), statement);

    let size = cosigns!("image.json").len() as u64;
    let subject = Descriptor::plain(MANIFEST, image(), size);
    let theirs = BundleReferrer::new(&subject, cosigns!("bundle.json"), SIGNED);
    let shape = |raw: &[u8]| {
        let mut value = parse(raw);
        let annotations = value["annotations"].as_object_mut().unwrap();
        annotations.remove("org.opencontainers.image.created");
        annotations.remove(media_type::BUNDLE_BLOB);
        value["config"].as_object_mut().unwrap().remove("artifactType");
        value
    };
    assert_eq!(shape(&theirs.to_json()), shape(cosigns!("referrer.json")));
}

#[test]
fn adding_a_signature_keeps_those_of_other_keys() {
    let (raw, key) = (cosigns!("signatures.json"), cosigns_key());
    let mut manifest = SignatureManifest::parse(raw).unwrap();
    assert!(manifest.has(&payload().to_json(), key.public()));
    let other = EcdsaKeyPair::generate(&ECDSA_P256_SHA256_ASN1_SIGNING).unwrap();
    let other = SigningKey::from_pem(&pem(other.to_pkcs8v1().unwrap().as_ref()), None).unwrap();
    assert!(!manifest.has(&payload().to_json(), other.public()));
    assert!(!manifest.has(b"something else", key.public()));
    manifest.add(&SignedPayload::new(&other, &payload()).unwrap());
    let json = parse(&manifest.to_json());
    assert_eq!(json["layers"][0], parse(raw)["layers"][0]);
    let again = SignatureManifest::parse(&manifest.to_json()).unwrap();
    assert!(again.has(&payload().to_json(), key.public()));
    assert!(again.has(&payload().to_json(), other.public()));
    assert_eq!(parse(&again.config())["rootfs"]["diff_ids"].as_array().unwrap().len(), 2);
    for bad in ["", "[]", "{}", r#"{"layers":{}}"#] {
        assert!(SignatureManifest::parse(bad.as_bytes()).is_err(), "{bad}");
    }
}
