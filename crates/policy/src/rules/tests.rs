use super::*;

/// A public key of ECDSA P-256.
pub(crate) const KEY: &str = "-----BEGIN PUBLIC KEY-----
MFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAEf+kLqshjhdO/sXZ6tWpV158SIna6
/RDBhcSnsgvqRqBC8RacIJgnXla/6JyTMpWHruT2afumblaWx3gdHYJ2ow==
-----END PUBLIC KEY-----
";

fn parse(text: &str) -> Result<Policy, String> {
    let read = |path: &Path, _| match path.to_str() {
        Some("/k/a.pub" | "/k/same.pub") => Ok(KEY.as_bytes().to_vec()),
        Some("/k/no.pub") => Ok(b"no key".to_vec()),
        _ => Err(io::ErrorKind::NotFound.into()),
    };
    let parsed = Policy::parse(Path::new("/p.toml"), text.as_bytes(), &read);
    parsed.map_err(|error| error.to_string())
}

#[test]
fn the_longest_name_decides() {
    let policy = parse(
        "default = 'reject'\n[images]\n'r.example' = 'accept'\n'r.example/team' = 'reject'\n\
         [images.'r.example/team/app']\nkeys = ['/k/a.pub']\nstatements = ['/k/a.pub']\n",
    )
    .unwrap();
    for (name, expected) in [
        ("r.example/a:1", "r.example"),
        ("r.example/team", "r.example/team"),
        ("r.example/teams", "r.example"),
        ("r.example/team/app:1", "r.example/team/app"),
        ("r.example/team/app/sub", "r.example/team/app"),
        ("debian", "default"),
        ("oci:/srv/a", "default"),
    ] {
        let name: ImageName = name.parse().unwrap();
        assert_eq!(policy.rule(&Asked::of(&name)).0, expected, "{name}");
        assert_eq!(policy.takes_statements(&name), expected == "r.example/team/app", "{name}");
    }
}

/// A lazy image that refers to an ordinary one must not take its place unsigned.
#[test]
fn a_rule_that_accepts_unsigned_images_takes_no_conversion_statements() {
    let policy = parse("default = { accept = true, statements = ['/k/a.pub'] }").unwrap();
    let name: ImageName = "r.example/a:1".parse().unwrap();
    assert!(policy.has_statement_keys(&name) && !policy.takes_statements(&name));
    let policy = parse("default = { keys = ['/k/a.pub'], statements = ['/k/a.pub'] }").unwrap();
    assert!(policy.has_statement_keys(&name) && policy.takes_statements(&name));
    let policy = parse("default = 'accept'").unwrap();
    assert!(!policy.has_statement_keys(&name) && !policy.takes_statements(&name));
}

#[test]
fn errors_name_the_rule_and_its_place() {
    for (text, expected) in [
        ("", "missing field `default`"),
        ("default = 'maybe'", "default: \"maybe\", expected \"accept\", \"reject\" or a table"),
        ("default = 1", "default: a integer, expected"),
        ("default = 'reject'\nmore = 1", "unknown field `more`"),
        ("default = { accept = true }", "accept goes with statements"),
        (
            "default = { accept = true, keys = ['/k/a.pub'], statements = ['/k/a.pub'] }",
            "accept goes with statements",
        ),
        ("default = {}", "default: expected keys, keyless, exec or statements"),
        ("default = { kies = [] }", "unknown field `kies`"),
        ("default = { keys = ['a.pub'] }", "keys has a.pub, expected an absolute path"),
        ("default = { keys = ['/k/gone.pub'] }", "keys has /k/gone.pub: entity not found"),
        ("default = { keys = ['/k/no.pub'] }", "/k/no.pub: expected PEM"),
        ("default = { keys = ['/k/a.pub', '/k/same.pub'] }", "a key that is listed twice"),
        ("default = { keys = ['/k/a.pub'], threshold = 2 }", "threshold is 2, expected 1 to 1"),
        ("default = { keys = ['/k/a.pub'], threshold = 0 }", "threshold is 0"),
        ("default = { exec = '/p', threshold = 1 }", "threshold is for keys"),
        (
            "default = { statements = ['/k/a.pub'], statements_threshold = 2 }",
            "statements_threshold is 2, expected 1 to 1",
        ),
        ("default = { exec = '/p', statements_threshold = 1 }", "is for statements"),
        ("default = { keys = ['/k/a.pub'], exec = '/p' }", "one of keys, keyless and exec"),
        ("default = { exec = 'p' }", "expected an absolute path"),
        ("default = { keys = ['/k/a.pub'], timeout_seconds = 1 }", "timeout_seconds is for exec"),
        ("default = { keys = ['/k/a.pub'], signed_as = ['x'] }", "signed_as has \"x\""),
        ("default = 'reject'\n[images]\n'team' = 'accept'", "images.\"team\": "),
        ("default = 'reject'\n[images]\n'r.example/a:1' = 'accept'", "images.\"r.example/a:1\""),
        (
            "default = { keyless = { issuer = 'i', subject = '*', trusted_root = '/k/a.pub' } }",
            "keyless needs an issuer and a subject",
        ),
        (
            "default = { keyless = { issuer = 'i', subject = 's', trusted_root = '/k/a.pub' } }",
            "keyless.trusted_root has /k/a.pub",
        ),
    ] {
        let error = parse(text).unwrap_err();
        assert!(error.contains("/p.toml") && error.contains(expected), "{text}: {error}");
    }
}

#[test]
fn the_hash_depends_on_the_policy_and_its_key_files() {
    let text = "default = { keys = ['/k'] }";
    let hash = |text: &str, key: &str| {
        let read = |_: &Path, _| Ok(key.as_bytes().to_vec());
        Policy::parse(Path::new("/p.toml"), text.as_bytes(), &read).unwrap().hash()
    };
    let other = format!("# a comment\n{KEY}");
    assert_eq!(hash(text, KEY), hash(text, KEY));
    assert_ne!(hash(text, KEY), hash(text, &other));
    assert_ne!(hash(text, KEY), hash(&format!("{text}\n"), KEY));
}
