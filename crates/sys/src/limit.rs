//! Limits of this process.

use std::io;

use rustix::process::{Resource, getrlimit, setrlimit};

/// Upper bound for [`raise_descriptors`]. It bounds the readers that can wait at a time, and every
/// table that has an entry for each descriptor number.
pub const DESCRIPTORS: u32 = 1 << 16;

/// Raises the limit on open descriptors to the hard limit, which needs no privilege, but not above
/// [`DESCRIPTORS`]. Returns the new limit.
///
/// Every event that waits for an answer holds a descriptor, every blob in use two more.
pub fn raise_descriptors() -> io::Result<u32> {
    let most = u64::from(DESCRIPTORS);
    let mut limit = getrlimit(Resource::Nofile);
    let current = limit.maximum.map_or(most, |hard| hard.min(most));
    limit.current = Some(current);
    setrlimit(Resource::Nofile, limit)?;
    Ok(u32::try_from(current).unwrap_or(DESCRIPTORS))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn soft_limit_becomes_hard_limit() {
        let raised = raise_descriptors().unwrap();
        let limit = getrlimit(Resource::Nofile);
        assert_eq!(limit.current, Some(raised.into()));
        assert!(limit.maximum.is_none_or(|hard| hard.min(DESCRIPTORS.into()) == raised.into()));
    }
}
