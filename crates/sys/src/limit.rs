//! Limits of this process.

use std::io;

use rustix::process::{Resource, getrlimit, setrlimit};

/// Raises the number of descriptors that this process may open to its hard limit, which needs no
/// privilege, and returns it; `None` means unlimited.
///
/// Every event that waits for an answer holds a descriptor, every blob in use one more.
pub fn raise_descriptors() -> io::Result<Option<u64>> {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    setrlimit(Resource::Nofile, limit)?;
    Ok(limit.maximum)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn soft_limit_becomes_hard_limit() {
        let hard = raise_descriptors().unwrap();
        assert_eq!(getrlimit(Resource::Nofile).current, hard);
    }
}
