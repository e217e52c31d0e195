use std::{io, path::Path};

use aws_lc_rs::{
    encoding::AsDer as _,
    rand::SystemRandom,
    signature::{ECDSA_P256_SHA256_ASN1_SIGNING, EcdsaKeyPair, KeyPair as _},
};
use lazuli_image::Algorithm;
use serde_json::json;

use super::*;
use crate::{
    Bundle, Converter, Envelope, PublicKey, SimpleSignature, Statement, error::to_base64,
    media_type, statement::Source,
};

/// A key that signs.
struct Signer {
    pair: EcdsaKeyPair,
    pem: String,
}

impl Signer {
    fn new() -> Self {
        let pair = EcdsaKeyPair::generate(&ECDSA_P256_SHA256_ASN1_SIGNING).unwrap();
        let der: aws_lc_rs::encoding::PublicKeyX509Der<'_> = pair.public_key().as_der().unwrap();
        let body = to_base64(der.as_ref());
        Signer {
            pem: format!("-----BEGIN PUBLIC KEY-----\n{body}\n-----END PUBLIC KEY-----\n"),
            pair,
        }
    }

    fn sign(&self, message: &[u8]) -> Vec<u8> {
        self.pair.sign(&SystemRandom::new(), message).unwrap().as_ref().to_vec()
    }

    /// As cosign 2 does.
    fn simple(&self, reference: &str, digest: Digest) -> Evidence {
        let payload = json!({
            "critical": {
                "identity": { "docker-reference": reference },
                "image": { "docker-manifest-digest": digest },
                "type": "cosign container image signature",
            },
            "optional": { "creator": "a test" },
        });
        let payload = payload.to_string().into_bytes();
        let signature = self.sign(&payload);
        let signature = SimpleSignature { payload: payload.into(), signature, certified: None };
        Evidence { signatures: vec![signature], ..Evidence::default() }
    }

    /// As cosign 3 does.
    fn bundle(&self, statement: &Statement) -> Evidence {
        let mut envelope = Envelope::new(media_type::IN_TOTO, statement.to_json());
        envelope.signatures.push(self.sign(&envelope.signed_bytes()));
        let bundle = Bundle::to_json(&envelope, "a hint");
        Evidence { bundles: vec![bundle.into()], ..Evidence::default() }
    }
}

/// A policy in which `/k/N` is the key of signer N.
fn policy(text: &str, signers: &[&Signer]) -> Policy {
    let read = |path: &Path, _| {
        let number: usize = path.to_str().unwrap()[3..].parse().map_err(io::Error::other)?;
        Ok(signers[number].pem.clone().into_bytes())
    };
    Policy::parse(Path::new("/p.toml"), text.as_bytes(), &read).unwrap()
}

fn digest(number: u8) -> Digest {
    Algorithm::Sha256.digest(&[number])
}

/// Why the image `r.example/a:1` with digest 1 may not run.
fn refusal(policy: &Policy, evidence: &Evidence) -> Option<String> {
    let name = "r.example/a:1".parse().unwrap();
    let claim = Claim { name: &name, manifest: digest(1), index: None, replaces: None };
    verify(policy, &claim, evidence).err().map(|refused| refused.to_string())
}

#[test]
fn a_signature_is_by_a_key_of_the_rule_and_of_the_image_that_was_asked_for() {
    let (good, evil) = (Signer::new(), Signer::new());
    let policy = policy("default = { keys = ['/k/0'] }", &[&good]);
    let signed =
        |name: Option<&str>, number| Statement::signed(name.map(str::to_owned), digest(number));
    for evidence in [
        good.simple("r.example/a", digest(1)),
        good.simple("r.example/a:1", digest(1)),
        good.bundle(&signed(None, 1)),
        good.bundle(&signed(Some("r.example/a"), 1)),
    ] {
        assert_eq!(refusal(&policy, &evidence), None);
    }
    let attestation =
        Statement { predicate_type: "https://slsa.dev/provenance/v1".into(), ..signed(None, 1) };
    let mut forged = good.simple("r.example/a", digest(2));
    forged.signatures[0].payload =
        good.simple("r.example/a", digest(1)).signatures[0].payload.clone();
    for (evidence, expected) in [
        (Evidence::default(), "there is no signature"),
        (evil.simple("r.example/a", digest(1)), "by none of its keys"),
        (evil.bundle(&signed(None, 1)), "by none of its keys"),
        (forged, "by none of its keys"),
        (good.simple("r.example/a", digest(2)), &*format!("a signature is of {}", digest(2))),
        (good.bundle(&signed(None, 2)), &*format!("a signature is of {}", digest(2))),
        (good.simple("r.example/b", digest(1)), "as \"r.example/b\", expected r.example/a"),
        (good.simple("r.example/a:2", digest(1)), "as \"r.example/a:2\""),
        (good.bundle(&signed(Some("r.example/b"), 1)), "as \"r.example/b\""),
        (good.bundle(&attestation), "a statement is of \"https://slsa.dev/provenance/v1\""),
    ] {
        let reason = refusal(&policy, &evidence).unwrap();
        assert!(reason.contains(expected), "{expected}: {reason}");
        assert!(reason.starts_with("r.example/a:1@sha256:"), "{reason}");
        assert!(reason.contains("/p.toml asks for a signature by key sha256:"), "{reason}");
    }
}

#[test]
fn a_threshold_counts_keys_and_not_signatures() {
    let (one, two) = (Signer::new(), Signer::new());
    let policy = policy("default = { keys = ['/k/0', '/k/1'], threshold = 2 }", &[&one, &two]);
    let mut evidence = one.simple("r.example/a", digest(1));
    evidence.extend(one.bundle(&Statement::signed(None, digest(1))));
    let reason = refusal(&policy, &evidence).unwrap();
    assert!(
        reason.contains("signatures by 2 of 2 keys") && reason.contains("1 of its keys"),
        "{reason}"
    );
    evidence.extend(two.bundle(&Statement::signed(None, digest(1))));
    assert_eq!(refusal(&policy, &evidence), None);
}

#[test]
fn a_signature_of_the_index_covers_what_it_lists_and_other_names_have_to_be_allowed() {
    let signer = Signer::new();
    let name = "r.example/a:1".parse().unwrap();
    let index = Claim { name: &name, manifest: digest(1), index: Some(digest(9)), replaces: None };
    let plain = policy("default = { keys = ['/k/0'] }", &[&signer]);
    assert!(verify(&plain, &index, &signer.simple("r.example/a", digest(9))).is_ok());
    let allows = "default = { keys = ['/k/0'], signed_as = ['stage.example/team'] }";
    let staged = policy(allows, &[&signer]);
    for (reference, fits) in [("stage.example/team/x", true), ("stage.example/other", false)] {
        let evidence = signer.simple(reference, digest(1));
        assert_eq!(refusal(&staged, &evidence).is_none(), fits, "{reference}");
        assert!(refusal(&plain, &evidence).is_some());
    }
}

/// States that `r.example/a` with digest 1 was made from `r.example/source:1`, digest 2.
fn conversion() -> Conversion {
    Conversion {
        source: Source {
            name: "r.example/source:1".to_owned(),
            digest: digest(2),
            manifest: digest(3),
        },
        converter: Converter { version: "1".to_owned(), program: None },
        options: [].into(),
        trace: None,
        reused: Vec::new(),
    }
}

#[test]
fn a_conversion_takes_a_trusted_statement_and_a_signed_source() {
    let (converter, author, evil) = (Signer::new(), Signer::new(), Signer::new());
    let text = "default = 'reject'\n[images]\n'r.example/a' = { statements = ['/k/0'] }\n\
                'r.example/source' = { keys = ['/k/1'] }\n'r.example/free' = 'accept'\n";
    let policy = policy(text, &[&converter, &author]);
    let state = |signer: &Signer, name: &str, number, conversion: &Conversion| {
        signer.bundle(&Statement::converted(name.to_owned(), digest(number), conversion).unwrap())
    };
    let both = |mut statement: Evidence, signature: Evidence| {
        statement.extend(signature);
        statement
    };
    let (good, source) = (state(&converter, "r.example/a", 1, &conversion()), "r.example/source");
    let signed = author.simple(source, digest(2));
    assert_eq!(refusal(&policy, &both(good.clone(), signed.clone())), None);
    // A signature of the manifest counts as one of the index does.
    assert_eq!(refusal(&policy, &both(good.clone(), author.simple(source, digest(3)))), None);
    let of = |name: &str| {
        let mut conversion = conversion();
        conversion.source.name = name.to_owned();
        state(&converter, "r.example/a", 1, &conversion)
    };
    for (evidence, expected) in [
        (good.clone(), "its source r.example/source:1@sha256:"),
        (both(good.clone(), evil.simple(source, digest(2))), "by none of its keys"),
        (both(good.clone(), author.simple(source, digest(4))), "a signature is of"),
        (both(good.clone(), author.simple("r.example/other", digest(2))), "as \"r.example/other\""),
        (
            both(state(&evil, "r.example/a", 1, &conversion()), signed.clone()),
            "there is no signature",
        ),
        (
            both(state(&converter, "r.example/b", 1, &conversion()), signed.clone()),
            "is about r.example/b",
        ),
        (both(state(&converter, "r.example/a", 4, &conversion()), signed.clone()), "is about"),
        (both(of("r.example/free"), signed.clone()), "accepts it unsigned"),
        (both(of("other.example/x"), signed.clone()), "default rejects it"),
        (both(of("not a name"), signed.clone()), "not the name of an image"),
        // A key trusted to sign a source may not state conversions, and the other way round.
        (
            both(state(&author, "r.example/a", 1, &conversion()), signed.clone()),
            "there is no signature",
        ),
        (both(good.clone(), converter.simple(source, digest(2))), "by none of its keys"),
    ] {
        let reason = refusal(&policy, &evidence).unwrap();
        assert!(reason.contains(expected), "{expected}: {reason}");
    }
    // The lazy image that replaces an ordinary one was made from that one.
    let name = "r.example/a:1".parse().unwrap();
    let evidence = both(good, signed);
    for (replaced, fits) in [(3, true), (2, true), (4, false)] {
        let replaces = Some(digest(replaced));
        let claim = Claim { name: &name, manifest: digest(1), index: None, replaces };
        assert_eq!(verify(&policy, &claim, &evidence).is_ok(), fits, "{replaced}");
    }
}

#[test]
fn enough_converters_have_to_state_the_same_conversion() {
    let (first, second, author) = (Signer::new(), Signer::new(), Signer::new());
    let text = "default = 'reject'\n[images]\n'r.example/source' = { keys = ['/k/2'] }\n\
                'r.example/a' = { statements = ['/k/0', '/k/1'], statements_threshold = 2 }\n";
    let policy = policy(text, &[&first, &second, &author]);
    let other_source = |number: u8| {
        let mut conversion = conversion();
        conversion.source.digest = digest(number);
        conversion
    };
    let refusal_of = |statements: &[(&Signer, &Conversion)]| {
        let mut evidence = author.simple("r.example/source", digest(2));
        for (signer, conversion) in statements {
            let name = "r.example/a".to_owned();
            let statement = Statement::converted(name, digest(1), conversion).unwrap();
            evidence.extend(signer.bundle(&statement));
        }
        refusal(&policy, &evidence)
    };
    let (good, bad) = (conversion(), other_source(5));
    assert_eq!(refusal_of(&[(&first, &good), (&second, &good)]), None);
    // They may have been made by different versions, with other options that change nothing.
    let mut later = conversion();
    later.converter.version = "2".to_owned();
    assert_eq!(refusal_of(&[(&first, &good), (&second, &later)]), None);
    for statements in [
        &[(&first, &good)][..],
        &[(&first, &good), (&first, &later)],
        &[(&first, &good), (&author, &good)],
        &[(&first, &good), (&second, &bad)],
    ] {
        let reason = refusal_of(statements).unwrap();
        assert!(reason.contains("1 of its converters stated the same"), "{reason}");
    }
}

#[test]
fn keys_of_every_kind_verify_what_openssl_signed() {
    let directory = tempfile::tempdir().unwrap();
    let openssl = |arguments: &str| {
        let mut command = std::process::Command::new("openssl");
        let output = command.args(arguments.split(' ')).current_dir(&directory).output().unwrap();
        assert!(
            output.status.success(),
            "{arguments}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
    };
    std::fs::write(directory.path().join("message"), b"a message").unwrap();
    for (options, digest) in [
        ("EC -pkeyopt ec_paramgen_curve:P-256", "-digest sha256"),
        ("EC -pkeyopt ec_paramgen_curve:P-384", "-digest sha256"),
        ("EC -pkeyopt ec_paramgen_curve:P-384", "-digest sha384"),
        ("RSA -pkeyopt rsa_keygen_bits:2048", "-digest sha256"),
        ("ED25519", ""),
    ] {
        openssl(&format!("genpkey -algorithm {options} -out key"));
        openssl("pkey -in key -pubout -out pub");
        let sign = format!("pkeyutl -sign -inkey key -rawin {digest} -in message -out sig");
        openssl(sign.replace("  ", " ").as_str());
        let read = |name: &str| std::fs::read(directory.path().join(name)).unwrap();
        let key = PublicKey::from_pem(&read("pub")).unwrap();
        assert!(key.verifies(b"a message", &read("sig")), "{options} {digest}");
        assert!(!key.verifies(b"another", &read("sig")), "{options} {digest}");
    }
    openssl("genpkey -algorithm RSA -pkeyopt rsa_keygen_bits:1024 -out key");
    openssl("pkey -in key -pubout -out pub");
    openssl("pkeyutl -sign -inkey key -rawin -digest sha256 -in message -out sig");
    let read = |name: &str| std::fs::read(directory.path().join(name)).unwrap();
    let key = PublicKey::from_pem(&read("pub"));
    assert!(key.is_err() || !key.unwrap().verifies(b"a message", &read("sig")));
}
