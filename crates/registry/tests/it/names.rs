//! Names as people type them.

use lazuli_registry::{ImageName, Reference, Selector, Source};
use proptest::prelude::*;

const HEX: &str = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

#[test]
fn references_are_completed_as_docker_does() {
    let digest = format!("sha256:{HEX}");
    let cases = [
        ("debian", "docker.io/library/debian:latest".to_owned()),
        ("debian:12", "docker.io/library/debian:12".into()),
        ("org/app", "docker.io/org/app:latest".into()),
        ("docker.io/debian", "docker.io/library/debian:latest".into()),
        ("index.docker.io/org/app:1", "docker.io/org/app:1".into()),
        ("docker://quay.io/org/app", "quay.io/org/app:latest".into()),
        ("localhost/app", "localhost/app:latest".into()),
        ("localhost:5000/app", "localhost:5000/app:latest".into()),
        ("localhost:5000", "docker.io/library/localhost:5000".into()),
        ("127.0.0.1:5000/a/b/c:x_Y-1.", "127.0.0.1:5000/a/b/c:x_Y-1.".into()),
        ("[::1]:5000/app", "[::1]:5000/app:latest".into()),
        ("[fe80::1]/app:1", "[fe80::1]/app:1".into()),
        ("host:1/a__b/c-d.e--f", "host:1/a__b/c-d.e--f:latest".into()),
        (&format!("app@{digest}"), format!("docker.io/library/app@{digest}")),
        (&format!("q.io/app:1@{digest}"), format!("q.io/app:1@{digest}")),
    ];
    for (text, expected) in cases {
        let reference: Reference = text.parse().unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(reference.to_string(), expected, "{text}");
        assert_eq!(expected.parse(), Ok(reference), "{expected}");
    }
}

#[test]
fn errors_of_references_name_the_expected_form() {
    let long = "a".repeat(256);
    let cases = [
        ("", "repository is missing"),
        ("quay.io/", "repository is missing"),
        ("Debian", "lower case, as in debian"),
        ("quay.io/org/App:1", "lower case, as in org/app"),
        ("quay.io/org//app", "each part"),
        ("quay.io/a_-b", "each part"),
        ("quay.io/a..b", "each part"),
        ("quay.io/a___b", "each part"),
        ("quay.io/-a", "each part"),
        ("quay.io/ä", "each part"),
        ("quay.io/../a", "each part"),
        ("quay.io/a b", "each part"),
        (&long, "longer than 255"),
        ("app:", "a tag is"),
        ("app:-1", "a tag is"),
        ("app:1:2", "a tag is"),
        ("app:ä", "a tag is"),
        ("app@sha256:12", "64 lower-case hex digits"),
        (&format!("app@blake3:{HEX}"), "64 lower-case hex digits"),
        ("https://quay.io/app", "has no `https://`"),
        ("host:0/app", "no valid port"),
        ("host:99999/app", "no valid port"),
        ("host:+80/app", "no valid port"),
        ("[::1/app", "not a registry host"),
        ("[zz]:1/app", "not a registry host"),
        ("-x.io/app", "not a registry host"),
        ("user:secret@quay.io/app", "64 lower-case hex digits"),
        ("tar:x", "can only be converted from"),
        ("oci:", "a path is expected"),
        ("oci::tag", "a path is expected"),
        ("oci:dir:", "nothing follows"),
        ("oci:dir:a b", "may hold letters"),
    ];
    for (text, expected) in cases {
        let error = text.parse::<ImageName>().expect_err(text).to_string();
        assert!(error.contains(expected), "{text}: {error}");
    }
}

#[test]
fn loopback_addresses_are_recognized() {
    let yes = [
        "localhost/a",
        "localhost:5000/a",
        "127.0.0.1/a",
        "127.8.9.1:80/a",
        "[::1]/a",
        "[::1]:80/a",
    ];
    let no = ["a", "quay.io/a", "10.0.0.1:5000/a", "[::2]/a", "localhost.example/a", "128.0.0.1/a"];
    for (names, expected) in [(&yes, true), (&no, false)] {
        for name in names {
            assert_eq!(name.parse::<Reference>().unwrap().is_loopback(), expected, "{name}");
        }
    }
}

#[test]
fn sources_and_layouts_are_displayed_as_they_were_parsed() {
    let digest = format!("oci:d@sha256:{HEX}");
    let round_trips = [
        "oci:dir",
        "oci:/a b/c:app-1",
        "oci:dir:docker.io/library/app:1",
        &digest,
        "docker-archive:a.tar",
        "docker-archive:a.tar:app:1",
        "tar:a:b.tar",
        "dir:/some:where",
        "tar:tar:x",
    ];
    for text in round_trips {
        let source: Source = text.parse().unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(source.to_string(), text);
    }
    let ImageName::Layout(layout) = digest.parse().unwrap() else { panic!() };
    assert!(matches!(layout.image, Some(Selector::Digest(_))));
    for text in ["tar:", "dir:", "docker-archive:", "docker-archive:x:", "dir:a\0b"] {
        assert!(text.parse::<Source>().is_err(), "{text}");
    }
}

proptest! {
    #[test]
    fn displayed_names_parse_to_the_same_name(
        host in "([a-z][a-z0-9]{0,8}\\.[a-z]{2,5}|localhost|\\[::[1-9]\\])(:[1-9][0-9]{0,3})?",
        path in "[a-z0-9]+((\\.|_|__|-{1,3})[a-z0-9]+){0,2}(/[a-z0-9]{1,9}){0,3}",
        tag in proptest::option::of("[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}"),
        digest in any::<bool>(),
    ) {
        let tag = tag.map_or(String::new(), |tag| format!(":{tag}"));
        let digest = if digest { format!("@sha256:{HEX}") } else { String::new() };
        let text = format!("{host}/{path}{tag}{digest}");
        let reference: Reference = text.parse().unwrap();
        prop_assert_eq!(reference.registry(), &host);
        prop_assert_eq!(reference.repository(), &path);
        let shown = reference.to_string();
        prop_assert!(shown.starts_with(&text));
        prop_assert_eq!(shown.parse::<Reference>().unwrap(), reference);
    }

    #[test]
    fn any_text_parses_or_is_refused(text in ".{0,80}", prefix in "(oci:|tar:|docker-archive:|docker://|)") {
        if let Ok(source) = format!("{prefix}{text}").parse::<Source>() {
            prop_assert_eq!(source.to_string().parse::<Source>().unwrap(), source);
        }
    }
}
