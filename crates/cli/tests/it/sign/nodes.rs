//! Signatures and statements made here, under the policies of a node and of the converting machine.

use std::fs;

use lazuli_testkit::{
    kernel::{Feature, require},
    registry::FakeRegistry,
};

use super::{Keys, in_registry};
use crate::lazuli::{Lazuli, corpus};

/// A node whose policy can be changed.
struct Node<'a> {
    lazuli: &'a Lazuli,
    host: String,
}

impl Node<'_> {
    /// Rules by repository, in which `KEY` stands for the path of that public key.
    fn policy(&self, rules: &[(&str, &str)]) {
        let mut text = "default = 'reject'\n[images]\n".to_owned();
        for (repository, rule) in rules {
            let rule = rule.replace("DIR", self.lazuli.path("").to_str().unwrap());
            text += &format!("'{}/{repository}' = {rule}\n", self.host);
        }
        fs::write(self.lazuli.path("policy.toml"), text).unwrap();
    }

    fn runs(&self, image: &str) {
        let mountpoint = self.lazuli.directory("mnt");
        let mountpoint = mountpoint.to_str().unwrap();
        self.lazuli.ok(["mount", image, mountpoint]);
        self.lazuli.ok(["umount", mountpoint]);
    }

    #[track_caller]
    fn refuses(&self, image: &str, reason: &str) {
        let mountpoint = self.lazuli.directory("mnt");
        let error = self.lazuli.fails(["mount", image, mountpoint.to_str().unwrap()]);
        assert!(error.contains("may not run") && error.contains(reason), "{error}");
    }
}

const AUTHOR: &str = "{ keys = ['DIR/author.pub'] }";
const CONVERTER: &str = "{ keys = ['DIR/converter.pub'] }";
const STATEMENT: &str = "{ statements = ['DIR/converter.pub'] }";

#[test]
fn a_node_runs_signed_images_and_conversions_of_them() {
    if !require(Feature::Root) || !require(Feature::Fuse) {
        return;
    }
    let lazuli = Lazuli::new();
    lazuli.configure(&format!("policy = {:?}\n", lazuli.path("policy.toml")));
    let registry = FakeRegistry::start().unwrap();
    let node = Node { lazuli: &lazuli, host: registry.host() };
    let [author, converter] = ["author", "converter"].map(|name| Keys::p256(&lazuli, name));
    let image = |name: &str| format!("{}/{name}:1", node.host);
    let (ordinary, _) = in_registry(&lazuli, &registry);

    // The source: an index, signed by its author.
    node.policy(&[("app", "'accept'")]);
    lazuli.ok(["convert", &ordinary, &image("source"), "--keep-oci", "--sign", &author.private]);
    node.policy(&[("source", AUTHOR), ("lazy", STATEMENT)]);
    lazuli.ok(["convert", &image("source"), &image("lazy"), "--sign", &converter.private]);
    node.runs(&image("source"));
    node.runs(&image("lazy"));
    node.policy(&[("source", AUTHOR), ("lazy", CONVERTER)]);
    node.runs(&image("lazy"));
    // The author's key is revoked: its signature of the source no longer counts.
    node.policy(&[("source", CONVERTER), ("lazy", STATEMENT)]);
    node.refuses(&image("lazy"), "its source");
    node.policy(&[("source", AUTHOR), ("lazy", AUTHOR)]);
    node.refuses(&image("lazy"), "by none of its keys");

    // Under another name, the signature does not match.
    lazuli.ok(["copy", &image("lazy"), &image("other")]);
    node.policy(&[("source", AUTHOR), ("other", CONVERTER)]);
    node.refuses(&image("other"), "/lazy");
    node.policy(&[("source", AUTHOR), ("other", STATEMENT)]);
    node.refuses(&image("other"), "/lazy");
}

/// Two converters that don't trust each other make the same image, and each states so.
#[test]
fn an_image_runs_when_enough_converters_state_that_they_made_it() {
    if !require(Feature::Root) || !require(Feature::Fuse) {
        return;
    }
    let lazuli = Lazuli::new();
    lazuli.configure(&format!("policy = {:?}\n", lazuli.path("policy.toml")));
    let registry = FakeRegistry::start().unwrap();
    let node = Node { lazuli: &lazuli, host: registry.host() };
    let [author, first, second] = ["author", "first", "second"].map(|it| Keys::p256(&lazuli, it));
    let image = |name: &str| format!("{}/{name}:1", node.host);
    let (ordinary, _) = in_registry(&lazuli, &registry);
    node.policy(&[("app", "'accept'")]);
    let source = image("source");
    lazuli.ok(["convert", &ordinary, &source, "--keep-oci", "--sign", &author.private]);
    let rule = "{ statements = ['DIR/first.pub', 'DIR/second.pub'], statements_threshold = 2 }";
    let rules = [("source", AUTHOR), ("copied", "'accept'"), ("lazy", rule), ("elsewhere", rule)];
    node.policy(&rules);

    lazuli.ok(["convert", &source, &image("lazy"), "--sign", &first.private]);
    let made = registry.manifest("lazy", "1").unwrap();
    node.refuses(&image("lazy"), "1 of its converters stated the same conversion");
    // The same converter once more is one.
    lazuli.ok(["convert", &source, &image("lazy"), "--sign", &first.private]);
    node.refuses(&image("lazy"), "1 of its converters stated the same conversion");
    lazuli.ok(["convert", &source, &image("lazy"), "--sign", &second.private]);
    assert!(registry.manifest("lazy", "1").unwrap() == made, "they made different images");
    node.runs(&image("lazy"));

    // The same bytes, from a source with another name: signatures there count for neither.
    lazuli.ok(["copy", &source, &image("copied")]);
    let elsewhere = image("elsewhere");
    lazuli.ok(["convert", &source, &elsewhere, "--sign", &first.private]);
    lazuli.ok(["convert", &image("copied"), &elsewhere, "--sign", &second.private]);
    node.refuses(&elsewhere, "1 of its converters stated the same conversion");
}

#[test]
fn a_converter_makes_nothing_of_a_source_that_may_not_run_there() {
    if !require(Feature::Root) || !require(Feature::Fuse) {
        return;
    }
    let lazuli = Lazuli::new();
    lazuli.configure(&format!("policy = {:?}\n", lazuli.path("policy.toml")));
    let registry = FakeRegistry::start().unwrap();
    let node = Node { lazuli: &lazuli, host: registry.host() };
    let [_, converter] = ["author", "converter"].map(|name| Keys::p256(&lazuli, name));
    let (ordinary, _) = in_registry(&lazuli, &registry);
    let lazy = format!("{}/lazy:1", node.host);
    node.policy(&[("app", AUTHOR)]);
    for sign in [&[][..], &["--sign", &converter.private]] {
        let error = lazuli.fails([&["convert", &ordinary, &lazy], sign].concat());
        assert!(error.contains("may not run") && error.contains("no signature"), "{error}");
    }
    assert_eq!(registry.manifest("lazy", "1"), None);
    let log = registry.log();
    assert!(!log.iter().any(|it| it.method != "GET" && it.target.contains("/lazy/")), "{log:#?}");

    // A converter with a stolen key and no policy states whatever it likes, and no node believes
    // it.
    node.policy(&[("app", "'accept'")]);
    lazuli.ok(["convert", &ordinary, &lazy, "--sign", &converter.private]);
    node.policy(&[("app", AUTHOR), ("lazy", STATEMENT)]);
    node.refuses(&lazy, "its source");
    node.policy(&[("app", "'accept'"), ("lazy", STATEMENT)]);
    node.refuses(&lazy, "its source");
}

/// The trial run uses a node of its own, and no name that this machine's policy could cover.
#[test]
fn a_policy_does_not_keep_a_converter_from_a_trial_run() {
    if !require(Feature::Root) || !require(Feature::Program("runc")) {
        return;
    }
    let Some(layout) = corpus("busybox") else { return };
    let lazuli = Lazuli::new();
    lazuli.configure(&format!("policy = {:?}\n", lazuli.path("policy.toml")));
    fs::write(lazuli.path("policy.toml"), "default = 'reject'\n").unwrap();
    let source = format!("oci:{}", layout.display());
    let said = lazuli.ok(["convert", &source, "oci:lazy:1", "--trace-run", "true"]);
    assert!(said.contains("come first"), "{said}");
}
