//! The tar header that *follows* a section of a blob, so that a blob can be walked from its end.

/// Bytes of a footer.
pub(super) const SIZE: u64 = 512;

/// Place of the checksum in a header.
const CHECKSUM: std::ops::Range<usize> = 148..156;

/// The footer of a section.
pub(super) fn encode(name: &str, size: u64) -> [u8; SIZE as usize] {
    let mut header = [0; SIZE as usize];
    header[..name.len()].copy_from_slice(name.as_bytes());
    if size < 1 << 33 {
        header[124..136].copy_from_slice(format!("{size:011o}\0").as_bytes());
    } else {
        // GNU tar's binary form, for sizes beyond 11 octal digits.
        header[124] = 0x80;
        header[128..136].copy_from_slice(&size.to_be_bytes());
    }
    header[136..148].copy_from_slice(b"00000000000\0");
    header[156] = b'0';
    header[257..265].copy_from_slice(b"ustar  \0");
    let sum = checksum(&header);
    header[CHECKSUM].copy_from_slice(format!("{sum:07o}\0").as_bytes());
    header
}

/// Name and size of the section that ends before this footer; `None` if `header` is no footer.
pub(super) fn decode(header: &[u8; SIZE as usize]) -> Option<(&str, u64)> {
    if octal(&header[CHECKSUM])? != checksum(header) || header[156] != b'0' {
        return None;
    }
    let name = header[..100].split(|byte| *byte == 0).next()?;
    let size = match header[124] {
        0x80 => u64::from_be_bytes(header[128..136].try_into().ok()?),
        _ => octal(&header[124..136])?,
    };
    Some((std::str::from_utf8(name).ok()?, size))
}

/// The sum of all bytes, those of the checksum itself taken as spaces.
fn checksum(header: &[u8; SIZE as usize]) -> u64 {
    let bytes = header.iter().enumerate();
    bytes.map(|(at, byte)| u64::from(if CHECKSUM.contains(&at) { b' ' } else { *byte })).sum()
}

fn octal(field: &[u8]) -> Option<u64> {
    let text = std::str::from_utf8(field).ok()?;
    u64::from_str_radix(text.trim_matches(['\0', ' ']), 8).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_decoded_footer_is_what_was_encoded() {
        for size in [0, 1, 4096, (1 << 33) - 1, 1 << 33, 1 << 40] {
            let mut footer = encode("blob.meta", size);
            assert_eq!(decode(&footer), Some(("blob.meta", size)));
            footer[0] ^= 1;
            assert_eq!(decode(&footer), None);
        }
    }
}
