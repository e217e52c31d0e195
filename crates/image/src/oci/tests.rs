use super::*;

const SOURCE: &str = r#"{"created":"2024-01-01T00:00:00.10Z","config":{"Env":["A=1"],"x": 1.50e0,
 "Big":123456789012345678901234567890},"os":"linux","architecture":"arm64","vendor.field":[ 1,2 ],
 "rootfs":{"type":"layers","diff_ids":[]},"history":[{"created_by":"RUN x","q":1.0}]}"#;

fn layer(content: &[u8]) -> BlobLayer {
    let size = content.len() as u64;
    BlobLayer::new(Algorithm::Sha256.digest(content), size)
}

#[test]
fn a_lazy_image_keeps_what_the_source_says() {
    let source = ImageConfig::parse(SOURCE.as_bytes()).unwrap();
    let diff_id = Algorithm::Sha256.digest(b"tar");
    let blob = BlobLayer { hot_bytes: Some(1 << 40), ..layer(b"a") };
    let image =
        LazyImage::new(&source, std::slice::from_ref(&blob), layer(b"b"), diff_id, BTreeMap::new());
    let image = image.unwrap();
    let text = std::str::from_utf8(&image.config).unwrap();
    // Foreign fields are kept byte for byte, odd numbers and spaces included.
    for kept in [
        r#""config":{"Env":["A=1"],"x": 1.50e0,
 "Big":123456789012345678901234567890}"#,
        r#""vendor.field":[ 1,2 ]"#,
        r#"{"created_by":"RUN x","q":1.0}"#,
    ] {
        assert!(text.contains(kept), "{kept} is not in {text}");
    }
    let config = ImageConfig::parse(&image.config).unwrap();
    assert_eq!(config.diff_ids().unwrap(), [layer(b"a").digest, diff_id]);
    assert_eq!(config.platform().unwrap().to_string(), "linux/arm64");
    let manifest = Manifest::parse(&image.manifest).unwrap();
    assert_eq!(manifest.config.digest, image.config_digest);
    assert!(!manifest.layers[0].is_bootstrap());
    assert_eq!(manifest.bootstrap().map(|layer| layer.size), Some(1));
    for (version, known) in [("6", true), ("5", true), ("4", false)] {
        let mut bootstrap = manifest.layers[1].clone();
        bootstrap.annotations.insert(annotation::FS_VERSION.to_owned(), version.to_owned());
        assert_eq!(bootstrap.is_bootstrap(), known, "{version}");
    }
    assert_eq!(
        manifest.layers.iter().map(Descriptor::hot_bytes).collect::<Vec<_>>(),
        [Some(1 << 40), None]
    );
    // Made from a lazy image, it does not get longer and longer.
    let again = LazyImage::new(&config, &[blob], layer(b"b"), diff_id, BTreeMap::new()).unwrap();
    assert_eq!(again.config, image.config);
    assert_eq!(manifest.lazy_base(), Some((&manifest.layers[..1], &manifest.layers[1])));
    let mut committed = manifest.clone();
    committed
        .layers
        .push(Descriptor { annotations: BTreeMap::new(), ..manifest.layers[0].clone() });
    assert_eq!(committed.bootstrap(), None);
    assert_eq!(committed.lazy_base(), manifest.lazy_base());
    committed.layers.remove(1);
    assert_eq!(committed.lazy_base(), None);
}

#[test]
fn chain_id_covers_all_layers_below() {
    let [one, two, three] = [b"1", b"2", b"3"].map(|tar| Algorithm::Sha256.digest(tar));
    let chain = chain_ids([one, two, three]);
    assert_eq!(chain[0], one);
    assert_eq!(chain[1], Algorithm::Sha256.digest(format!("{one} {two}").as_bytes()));
    assert_eq!(chain[2], Algorithm::Sha256.digest(format!("{} {three}", chain[1]).as_bytes()));
    assert_eq!(chain_ids([one, two]), chain[..2]);
    assert!(chain_ids([]).is_empty());
}

#[test]
fn malformed_documents_are_refused() {
    let huge = vec![b' '; MAX_DOCUMENT + 1];
    assert!(matches!(ImageConfig::parse(&huge), Err(OciError::TooBig { .. })));
    assert!(ImageConfig::parse(br#"{"os":"linux","os":"windows"}"#).is_err());
    assert!(ImageConfig::parse(b"[]").is_err());
    assert!(ImageConfig::parse(br#"{"os":3}"#).unwrap().platform().is_err());
    let digest = Algorithm::Sha256.digest(b"").to_string();
    let manifest = |version: u32, media_type: &str, size: &str| {
        format!(
            r#"{{"schemaVersion":{version},"mediaType":"{media_type}","layers":[],"annotations":null,
            "config":{{"mediaType":"x","digest":"{digest}","size":{size}}}}}"#
        )
    };
    Manifest::parse(manifest(2, media_type::MANIFEST, "1").as_bytes()).unwrap();
    for bad in [
        manifest(1, media_type::MANIFEST, "1"),
        manifest(2, media_type::INDEX, "1"),
        manifest(2, media_type::MANIFEST, "-1"),
    ] {
        assert!(Manifest::parse(bad.as_bytes()).is_err(), "{bad}");
    }
}

#[test]
fn platforms_match_as_the_specification_says() {
    let wanted = |text: &str| text.parse::<Platform>().unwrap();
    for (image, asked, fits) in [
        ("linux/amd64", "linux/amd64", true),
        ("linux/arm64/v8", "linux/arm64", true),
        ("linux/arm64", "linux/arm64/v8", true),
        ("linux/arm/v6", "linux/arm/v7", false),
        ("windows/amd64", "linux/amd64", false),
    ] {
        assert_eq!(wanted(image).satisfies(&wanted(asked)), fits, "{image} for {asked}");
    }
    for bad in ["", "linux", "linux/", "linux/a/b/c", "linux/a b"] {
        assert!(bad.parse::<Platform>().is_err(), "{bad}");
    }
}

#[test]
fn an_index_of_both_images_marks_the_lazy_one() {
    let descriptor = |text: &[u8]| {
        let digest = Algorithm::Sha256.digest(text);
        Descriptor::plain(media_type::MANIFEST, digest, text.len() as u64)
    };
    let host = Platform::host();
    let index = both(descriptor(b"ordinary"), descriptor(b"lazy"), &host).unwrap();
    let index: serde_json::Value = serde_json::from_slice(&index).unwrap();
    let entry = |at: usize| -> Descriptor {
        serde_json::from_value(index["manifests"][at].clone()).unwrap()
    };
    let (ordinary, lazy) = (entry(0), entry(1));
    assert_eq!(ordinary.runs_on(), Some(host.clone()));
    for lazy in [
        // A lazy manifest is recognised by either of its marks.
        Descriptor { artifact_type: None, ..lazy.clone() },
        Descriptor { platform: Some(host.clone()), ..lazy.clone() },
        lazy,
    ] {
        let platform = lazy.runs_on().unwrap();
        assert!(platform.satisfies(&host.clone().lazy()));
        assert!(!platform.satisfies(&host));
    }
}
