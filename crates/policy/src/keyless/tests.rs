//! Signatures that workflows made, as the public log has them; both are test data of the sigstore
//! project. The trusted root is the one of the public instance.

use lazuli_image::Algorithm;
use sigstore_verify::trust_root::SIGSTORE_PRODUCTION_TRUSTED_ROOT;

use super::*;

/// A statement in an envelope, with a certificate and the log's proof.
const STATEMENT: &str = include_str!("statement.sigstore.json");

/// A signature of a message.
const MESSAGE: &str = include_str!("message.sigstore.json");

const ISSUER: &str = "https://token.actions.githubusercontent.com";

fn keyless(issuer: &str, subject: &str) -> Keyless {
    let (issuer, subject) = (issuer.to_owned(), subject.to_owned());
    let table = Table { issuer, subject, trusted_root: "/root.json".into() };
    Keyless::new(table, SIGSTORE_PRODUCTION_TRUSTED_ROOT.as_bytes()).unwrap()
}

#[test]
fn a_bundle_verifies_only_for_its_identity_and_its_digest() {
    let workflow = "https://github.com/prefix-dev/sigstore-example/.github/workflows/action.yaml";
    let hex = "54303491a8418fbed24344b513546182c29b43bf282ceb433af65e2299f9271f";
    let digest = Digest::from_hex(Algorithm::Sha256, hex).unwrap();
    let check = |issuer: &str, subject: &str, bundle: &str, digest: &Digest| {
        keyless(issuer, subject).verify(bundle.as_bytes(), digest)
    };
    for subject in [format!("{workflow}@refs/heads/main"), format!("{workflow}@*")] {
        check(ISSUER, &subject, STATEMENT, &digest).unwrap();
    }
    let any = format!("{workflow}@*");
    for (issuer, subject, bundle, digest) in [
        (ISSUER, &*workflow.replace("action", "other"), STATEMENT, digest),
        (ISSUER, workflow, STATEMENT, digest),
        ("https://accounts.example", &*any, STATEMENT, digest),
        (ISSUER, &*any, STATEMENT, Digest::sha256([7; 32])),
        // The certificate of one, with the signature of another.
        (ISSUER, &*any, &*STATEMENT.replace("\"sig\":\"M", "\"sig\":\"N"), digest),
        (ISSUER, &*any, "{}", digest),
    ] {
        assert!(check(issuer, subject, bundle, &digest).is_err(), "{issuer} {subject}");
    }
}

#[test]
fn annotations_of_cosign_2_become_a_bundle() {
    let bundle: Value = serde_json::from_str(MESSAGE).unwrap();
    let material = &bundle["verificationMaterial"];
    let entry = &material["tlogEntries"][0];
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let decode = |value: &Value| error::base64(DOCUMENT, value.as_str().unwrap()).unwrap();
    let certificates = material["x509CertificateChain"]["certificates"].as_array().unwrap();
    let mut pems = certificates.iter().map(|certificate| {
        let body = text(&certificate["rawBytes"]);
        format!("-----BEGIN CERTIFICATE-----\n{body}\n-----END CERTIFICATE-----\n")
    });
    let key_id = decode(&entry["logId"]["keyId"]);
    let number = |name: &str| text(&entry[name]).parse::<i64>().unwrap();
    let log_entry = json!({
        "SignedEntryTimestamp": entry["inclusionPromise"]["signedEntryTimestamp"],
        "Payload": {
            "body": entry["canonicalizedBody"],
            "integratedTime": number("integratedTime"),
            "logIndex": number("logIndex"),
            "logID": key_id.iter().map(|byte| format!("{byte:02x}")).collect::<String>(),
        },
    });
    let certified = Certified {
        certificate: pems.next().unwrap(),
        chain: pems.collect(),
        log_entry: log_entry.to_string(),
    };
    let signed = &bundle["messageSignature"];
    let hash: [u8; 32] = decode(&signed["messageDigest"]["digest"]).try_into().unwrap();
    let digest = Digest::sha256(hash);
    let identity = keyless(
        ISSUER,
        "https://github.com/trailofbits/rfc8785.py/.github/workflows/release.yml@*",
    );
    let check = |certified: &Certified, digest: &Digest| {
        let bundle = to_bundle(certified, &decode(&signed["signature"]), digest);
        identity.verify(&bundle.map_err(|error| error.to_string())?, digest)
    };
    check(&certified, &digest).unwrap();
    assert!(check(&certified, &Digest::sha256([7; 32])).is_err());
    for (good, bad) in [("SignedEntryTimestamp\":\"M", "SignedEntryTimestamp\":\"N"), ("{", "")] {
        let log_entry = certified.log_entry.replacen(good, bad, 1);
        assert!(check(&Certified { log_entry, ..certified.clone() }, &digest).is_err(), "{bad}");
    }
    let later = certified.log_entry.replacen("\"integratedTime\":1", "\"integratedTime\":2", 1);
    assert!(check(&Certified { log_entry: later, ..certified.clone() }, &digest).is_err());
}
