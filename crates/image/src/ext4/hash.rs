//! The hash of names in directories with an index: TEA over 16 bytes at a time.

/// The kernel's mark of the end of a directory in hash order; no name has it.
const END: u32 = 0x7fff_ffff << 1;
/// What the hash starts from when the superblock's seed is zero: that of MD5.
const START: (u32, u32) = (0x6745_2301, 0xefcd_ab89);
const DELTA: u32 = 0x9e37_79b9;
const ROUNDS: usize = 16;

/// The hash of `name`, whose bytes count as unsigned. Bit 0 is 0: in an index it says that names
/// with the same hash are also in the block before.
pub(super) fn hash(name: &[u8]) -> u32 {
    let mut state = START;
    let mut rest = name;
    while !rest.is_empty() {
        let words = words(rest);
        state = mix(state, words);
        rest = rest.get(16..).unwrap_or_default();
    }
    match state.0 & !1 {
        END => END - 2,
        hash => hash,
    }
}

/// The first 16 bytes as four numbers. What is missing is filled with the number of bytes left.
fn words(bytes: &[u8]) -> [u32; 4] {
    let len = bytes.len() as u32;
    let pad = (len | len << 8).wrapping_mul(0x1_0001);
    let mut words = [pad; 4];
    for (word, piece) in words.iter_mut().zip(bytes.chunks(4)) {
        *word = piece.iter().fold(pad, |word, byte| (word << 8).wrapping_add((*byte).into()));
    }
    words
}

/// One block of TEA with `key`; the result is added to what it was made from.
fn mix((left, right): (u32, u32), key: [u32; 4]) -> (u32, u32) {
    let (mut a, mut b, mut sum) = (left, right, 0_u32);
    for _ in 0..ROUNDS {
        sum = sum.wrapping_add(DELTA);
        a = a.wrapping_add(round(b, sum, key[0], key[1]));
        b = b.wrapping_add(round(a, sum, key[2], key[3]));
    }
    (left.wrapping_add(a), right.wrapping_add(b))
}

fn round(half: u32, sum: u32, first: u32, second: u32) -> u32 {
    (half << 4).wrapping_add(first) ^ half.wrapping_add(sum) ^ (half >> 5).wrapping_add(second)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As `debugfs -R "dx_hash -h tea NAME"` has them.
    #[test]
    fn hashes_are_those_of_e2fsprogs() {
        for (name, expected) in [
            (&b"a"[..], 0x6d0e_a4c0),
            (b"hello", 0x6f5b_b1a8),
            (b"lost+found", 0x2dbf_9e80),
            (b"abcdefghijklmnop", 0xf4ac_8cb4),
            (b"abcdefghijklmnopq", 0x972a_82e6),
            (b"an-entry-with-a-name-of-some-length-003", 0x391d_024e),
            (&[b'x'; 255], 0x6c4c_00ee),
        ] {
            assert_eq!(hash(name), expected, "{}", name.escape_ascii());
        }
    }
}
