//! Numbers in tar headers: octal text or base-256.

/// Parses a number field: octal digits padded with spaces or NULs, or big-endian two's complement
/// if the first bit is set. An empty field is 0. `None` for anything else, or a number that does
/// not fit.
pub(super) fn parse(field: &[u8]) -> Option<i64> {
    match field.first() {
        Some(first) if first & 0x80 != 0 => base256(field),
        _ => octal(field),
    }
}

/// [`parse`] for fields that cannot be negative.
pub(super) fn parse_unsigned(field: &[u8]) -> Option<u64> {
    u64::try_from(parse(field)?).ok()
}

/// Decimal digits and nothing else.
pub(super) fn decimal(text: &[u8]) -> Option<u64> {
    if !text.first()?.is_ascii_digit() {
        return None;
    }
    std::str::from_utf8(text).ok()?.parse().ok()
}

fn octal(field: &[u8]) -> Option<i64> {
    let padding = |byte: &u8| matches!(byte, b' ' | 0);
    let start = field.iter().position(|byte| !padding(byte)).unwrap_or(field.len());
    let digits = field[start..].split(padding).next().unwrap_or_default();
    digits.iter().try_fold(0i64, |value, &digit| {
        let digit = matches!(digit, b'0'..=b'7').then(|| i64::from(digit - b'0'))?;
        value.checked_mul(8)?.checked_add(digit)
    })
}

/// The first bit only marks base-256; the second is the sign.
fn base256(field: &[u8]) -> Option<i64> {
    let first = field[0] & 0x7f;
    let start = if first & 0x40 != 0 { i64::from(first | 0x80) - 256 } else { i64::from(first) };
    field[1..]
        .iter()
        .try_fold(start, |value, &byte| value.checked_mul(256)?.checked_add(byte.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn number_fields_are_read_as_any_writer_fills_them() {
        let table: &[(&[u8], Option<i64>)] = &[
            (b"0000644\0", Some(0o644)),
            (b"   644 \0", Some(0o644)),
            (b"000644 \0", Some(0o644)),
            (b"77777777777\0", Some(0o77_777_777_777)),
            (b"777777777777", Some(0o777_777_777_777)),
            (b"\0\0\0\0\0\0\0\0", Some(0)),
            (b"        ", Some(0)),
            (b"\x80\0\0\0\0\0\0\x02\0\0\0\x01", Some(0x2_0000_0001)),
            (b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xfe", Some(-2)),
            (b"\x80\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff", None),
            (b"0000648\0", None),
            (b"-0000001", None),
            (b"hello\0\0\0", None),
        ];
        for (field, value) in table {
            assert_eq!(parse(field), *value, "{}", field.escape_ascii());
        }
        assert_eq!(parse_unsigned(b"\xff\xff\xff\xff\xff\xff\xff\xff"), None);
        assert_eq!(
            (decimal(b"12"), decimal(b"+1"), decimal(b""), decimal(b"1x")),
            (Some(12), None, None, None)
        );
    }
}
