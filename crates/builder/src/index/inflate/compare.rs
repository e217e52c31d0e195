//! Compares the decoder with zlib's, for tests and for fuzzing.

use flate2::{Decompress, FlushDecompress, Status};

use super::{Inflate, Output, SLACK, Stop};

/// Decoded bytes that are compared.
const MOST: usize = 256 << 10;

/// How decoding ends, with what was decoded if it is not an error.
#[derive(Debug, PartialEq)]
enum End {
    Whole(Vec<u8>),
    CutOff(Vec<u8>),
    TooMuch,
    Damaged,
}

/// Asserts that both decode `stored` alike, the decoder here in pieces of `taken` bytes, of which
/// it decodes `given` at a time. Returns whether the stream is whole.
pub(crate) fn assert_like_zlib(stored: &[u8], taken: usize, given: usize) -> bool {
    match (ours(stored, taken.max(1), given.max(1)), zlib(stored)) {
        // One of them may need more bits before it sees the damage.
        (End::Damaged, End::CutOff(_)) | (End::CutOff(_), End::Damaged) => false,
        (ours, zlib) => {
            assert_eq!(ours, zlib, "{stored:?}");
            matches!(ours, End::Whole(_))
        }
    }
}

fn ours(stored: &[u8], taken: usize, given: usize) -> End {
    let (mut inflate, mut buffer) = (Inflate::default(), vec![0; MOST + SLACK]);
    let (mut from, mut at) = (0, 0);
    loop {
        let input = &stored[from..stored.len().min(from + taken)];
        let end = MOST.min(at + given);
        let mut output = Output { buffer: &mut buffer, floor: 0, at, end };
        let (stop, count) = inflate.decode(input, &mut output);
        (from, at) = (from + count, output.at);
        match stop {
            Err(_) => return End::Damaged,
            Ok(Stop::Full) if at == MOST => return End::TooMuch,
            Ok(Stop::NoInput) if input.is_empty() => return End::CutOff(buffer[..at].to_vec()),
            Ok(Stop::End) => {
                assert!(inflate.bytes_ahead().len() < 8);
                return End::Whole(buffer[..at].to_vec());
            }
            Ok(_) => {}
        }
    }
}

fn zlib(stored: &[u8]) -> End {
    let (mut inflate, mut buffer) = (Decompress::new(false), vec![0; MOST]);
    let status = inflate.decompress(stored, &mut buffer, FlushDecompress::None);
    let count = inflate.total_out() as usize;
    match status {
        Err(_) => End::Damaged,
        Ok(Status::StreamEnd) if count < MOST => {
            buffer.truncate(count);
            End::Whole(buffer)
        }
        _ if count == MOST => End::TooMuch,
        Ok(_) => {
            buffer.truncate(count);
            End::CutOff(buffer)
        }
    }
}
