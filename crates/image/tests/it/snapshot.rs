use lazuli_image::rafs::{Bootstrap, dump};

use crate::support::small_sample;

/// The sample image as text. After a wanted change of the format, run the test with
/// `LAZULI_UPDATE_SNAPSHOTS=1` and review the difference.
#[test]
fn the_sample_image_has_not_changed() {
    let text = dump(&Bootstrap::open(small_sample().bootstrap).unwrap());
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/it/sample.txt");
    if std::env::var_os("LAZULI_UPDATE_SNAPSHOTS").is_some() {
        std::fs::write(path, &text).unwrap();
    }
    let expected = std::fs::read_to_string(path).unwrap_or_default();
    for (number, (found, expected)) in text.lines().zip(expected.lines()).enumerate() {
        assert_eq!(found, expected, "line {}", number + 1);
    }
    assert_eq!(text.lines().count(), expected.lines().count());
}
