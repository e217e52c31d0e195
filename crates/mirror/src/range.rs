//! The Range header of a request for a blob.

use std::ops::Range;

/// The requested part of a blob.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Wanted {
    /// The whole blob. Also the answer to malformed headers and to several ranges, as RFC 9110
    /// allows.
    Whole,
    /// These bytes, at least one.
    Part(Range<u64>),
    /// Bytes that it does not have.
    Nothing,
}

impl Wanted {
    /// Parses `bytes=5-9`, `bytes=5-` or `bytes=-5` for a blob of `size` bytes.
    pub(crate) fn parse(header: Option<&str>, size: u64) -> Self {
        header.and_then(|text| Self::part(text, size)).unwrap_or(Wanted::Whole)
    }

    fn part(header: &str, size: u64) -> Option<Self> {
        let (first, last) = header.trim().strip_prefix("bytes=")?.split_once('-')?;
        let number = |text: &str| {
            let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
            // More than there can be is as good as the largest number.
            digits.then(|| text.parse().unwrap_or(u64::MAX))
        };
        let range = match (first, last) {
            ("", last) => size.saturating_sub(number(last)?)..size,
            (first, "") => number(first)?..size,
            (first, last) => {
                let (first, last) = (number(first)?, number(last)?);
                if first > last {
                    return None;
                }
                first..size.min(last.saturating_add(1))
            }
        };
        Some(if range.is_empty() { Wanted::Nothing } else { Wanted::Part(range) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_parts_of_the_blob() {
        for (header, expected) in [
            ("bytes=0-0", Wanted::Part(0..1)),
            ("bytes=5-9", Wanted::Part(5..10)),
            ("bytes=5-", Wanted::Part(5..20)),
            ("bytes=-5", Wanted::Part(15..20)),
            ("bytes=-50", Wanted::Part(0..20)),
            ("bytes=5-99999999999999999999999", Wanted::Part(5..20)),
            ("bytes=20-", Wanted::Nothing),
            ("bytes=99999999999999999999999-", Wanted::Nothing),
            ("bytes=-0", Wanted::Nothing),
            ("bytes=9-5", Wanted::Whole),
            ("bytes=+5-9", Wanted::Whole),
            ("bytes=0-1,5-9", Wanted::Whole),
            ("bytes=-", Wanted::Whole),
            ("lines=1-2", Wanted::Whole),
            ("", Wanted::Whole),
        ] {
            assert_eq!(Wanted::parse(Some(header), 20), expected, "{header}");
        }
        assert_eq!(Wanted::parse(None, 20), Wanted::Whole);
        assert_eq!(Wanted::parse(Some("bytes=0-"), 0), Wanted::Nothing);
    }
}
