//! Read errors as the kernel's error numbers: the one place that translates.

use rustix::io::Errno;

use crate::error::ReadError;

/// The error number that a reader in a container sees. (EROFS turns every one into EIO on its own.)
pub fn errno(error: &ReadError) -> Errno {
    match error {
        // The disk of the node is full, and programs can report that.
        ReadError::NoSpace { .. } => Errno::NOSPC,
        ReadError::OutOfRange { .. } => Errno::INVAL,
        // Final, since retries happen below. Never EAGAIN or ETIMEDOUT: programs don't expect those
        // from a regular file.
        ReadError::Corrupt { .. }
        | ReadError::NoChunk { .. }
        | ReadError::Source { .. }
        | ReadError::Cache { .. }
        | ReadError::CutOff { .. }
        | ReadError::Interrupted { .. } => Errno::IO,
    }
}

#[cfg(test)]
mod tests {
    use lazuli_image::Digest;

    use super::*;

    #[test]
    fn only_a_full_disk_is_not_an_input_output_error() {
        let blob = Digest::sha256([0; 32]);
        let full = ReadError::NoSpace { blob, path: "data".into() };
        assert_eq!(errno(&full), Errno::NOSPC);
        assert_eq!(errno(&ReadError::Interrupted { blob }), Errno::IO);
    }
}
