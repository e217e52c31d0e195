//! Forged assemblies and configurations.

use super::{
    assembly::{Assembly, assembly},
    forge,
    host::{choose, frameworks, version},
};

fn names(of: &[&str]) -> Vec<Vec<u8>> {
    of.iter().map(|name| name.as_bytes().to_vec()).collect()
}

#[test]
fn an_assembly_names_assemblies_and_libraries() {
    let file = forge::assembly(&["System.Runtime", "Own"], &["libSystem.Native"]);
    let expected = Assembly {
        references: names(&["System.Runtime", "Own"]),
        libraries: names(&["libSystem.Native"]),
    };
    assert_eq!(assembly(&file), expected);
}

#[test]
fn names_that_lead_elsewhere_are_ignored() {
    let file = forge::assembly(&["../../etc/passwd", "*", "", "Own"], &["/lib/libc.so.6"]);
    assert_eq!(assembly(&file), Assembly { references: names(&["Own"]), libraries: Vec::new() });
}

#[test]
fn damaged_assemblies_name_less() {
    let file = forge::assembly(&["System.Runtime"], &["libSystem.Native"]);
    (0..file.len()).for_each(|len| drop(assembly(&file[..len])));
    for at in 0..file.len() {
        for bits in [0x01, 0x80, 0xff] {
            let mut damaged = file.clone();
            damaged[at] ^= bits;
            drop(assembly(&damaged));
        }
    }
    assert_eq!(assembly(b"MZ"), Assembly::default());
    assert_eq!(assembly(b"\x7fELF"), Assembly::default());
}

#[test]
fn names_of_an_assembly_are_bounded() {
    let many: Vec<_> = (0..2000).map(|at| format!("A{at}")).collect();
    let many: Vec<_> = many.iter().map(String::as_str).collect();
    assert_eq!(assembly(&forge::assembly(&many, &[])).references.len(), 1024);
}

#[test]
fn a_configuration_names_frameworks() {
    let web = br#"{"runtimeOptions": {"framework":
        {"name": "Microsoft.AspNetCore.App", "version": "8.0.1"}}}"#;
    let expected = ["Microsoft.AspNetCore.App", "Microsoft.NETCore.App"];
    assert_eq!(frameworks(web), expected.map(|name| (name.into(), [8, 0, 1])));
    let several = br#"{"runtimeOptions": {"frameworks": [
        {"name": "Microsoft.NETCore.App", "version": "8.0.0-rc.1"},
        {"name": "../up", "version": "8.0.0"}]}}"#;
    assert_eq!(frameworks(several), [("Microsoft.NETCore.App".into(), [8, 0, 0])]);
    let own = br#"{"runtimeOptions": {"includedFrameworks": [
        {"name": "Microsoft.NETCore.App", "version": "8.0.0"}]}}"#;
    for none in [&own[..], b"", b"{}", b"[", &[b'['; 100_000]] {
        assert_eq!(frameworks(none), []);
    }
}

#[test]
fn a_host_takes_the_newest_patch_of_the_next_minor_version() {
    let chosen = |installed: &[&str], least: &str| {
        let directories = installed.iter().map(|name| format!("/shared/F/{name}").into()).collect();
        let chosen = choose(directories, &version(least.as_bytes()))?;
        Some(String::from_utf8(chosen).unwrap().split_off("/shared/F/".len()))
    };
    let installed = ["3.1.9", "3.1.23", "5.0.1", "8.0.2", "8.1.0"];
    for (least, expected) in [
        ("3.1.0", "3.1.23"),
        ("3.0.0", "3.1.23"),
        ("6.0.0", "8.0.2"),
        ("8.0.3", "8.1.0"),
        ("9.0.0", "8.1.0"),
    ] {
        assert_eq!(chosen(&installed, least).as_deref(), Some(expected), "{least}");
    }
    assert_eq!(chosen(&[], "8.0.0"), None);
}
