//! Invariant: no text panics the parser of image names, and what a name is shown as parses to that
//! name.
#![no_main]

use std::fmt::{Debug, Display};
use std::str::FromStr;

use lazuli_registry::{ImageName, Platform, Source};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    check::<Source>(text);
    check::<ImageName>(text);
    check::<Platform>(text);
});

fn check<T: FromStr<Err: Debug> + Display + PartialEq + Debug>(text: &str) {
    if let Ok(name) = T::from_str(text) {
        let shown = name.to_string();
        assert_eq!(
            T::from_str(&shown).expect("what is shown parses"),
            name,
            "{text} shown as {shown}"
        );
    }
}
