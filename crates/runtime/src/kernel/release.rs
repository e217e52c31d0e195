//! The release of the running kernel, and its faults that Lazuli has to work around.
//!
//! Distributions name their kernels after the upstream release that they are built from:
//! `6.12.74+deb13-amd64`, `6.17.0-8-generic`. A distribution that backports a fix keeps the number,
//! so a kernel can be better than its release says; the configuration can overrule what is decided
//! here.

use std::fs;

/// The file with the kernel's release.
const PATH: &str = "/proc/sys/kernel/osrelease";

/// An upstream release, without what distributions append. `6.19` and `6.19-rc1` count as 6.19.0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Version(u32, u32, u32);

/// The running kernel's release.
#[derive(Clone, Debug)]
pub(super) struct Release(String);

impl Release {
    pub(super) fn of_this_machine() -> Self {
        // Without it nothing is known, see `Release::is_within`.
        Release(fs::read_to_string(PATH).unwrap_or_default().trim().to_owned())
    }

    /// Returns whether direct reads of a file-backed EROFS are safe. CVE-2026-23224: the kernel
    /// frees a request that it is still submitting when the read ends early.
    pub(super) fn direct_reads(&self) -> Result<(), String> {
        let faulty = [
            (Version(0, 0, 0), Version(6, 12, 72)),
            (Version(6, 13, 0), Version(6, 18, 11)),
            (Version(6, 19, 0), Version(6, 19, 1)),
        ];
        if !self.is_within(&faulty) {
            return Ok(());
        }
        Err(format!(
            "direct reads of EROFS can crash Linux {} (CVE-2026-23224, fixed in 6.12.72, 6.18.11 and 6.19.1)",
            self.name()
        ))
    }

    /// Returns whether EROFS reads files correctly at all. CVE-2025-37999: buffered reads miscount
    /// the parts of a folio.
    pub(super) fn buffered_reads(&self) -> Result<(), String> {
        let faulty =
            [(Version(6, 12, 0), Version(6, 12, 29)), (Version(6, 13, 0), Version(6, 14, 7))];
        if !self.is_within(&faulty) {
            return Ok(());
        }
        Err(format!(
            "EROFS on files is faulty in Linux {} (CVE-2025-37999, fixed in 6.12.29 and 6.14.7)",
            self.name()
        ))
    }

    /// Returns whether the release is in one of these ranges, ends excluded. An unparsable release
    /// has every fault.
    fn is_within(&self, ranges: &[(Version, Version)]) -> bool {
        let version = Version::parse(&self.0);
        version.is_none_or(|version| ranges.iter().any(|(from, to)| (from..to).contains(&&version)))
    }

    fn name(&self) -> &str {
        if self.0.is_empty() { "of an unknown release" } else { &self.0 }
    }
}

impl Version {
    fn parse(release: &str) -> Option<Self> {
        let end = release.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(release.len());
        let mut numbers = release[..end].split('.');
        let major = numbers.next()?.parse().ok()?;
        let minor = numbers.next()?.parse().ok()?;
        // 6.19-rc1 has no third number, and that of `6.1.` is empty.
        let patch = numbers.next().filter(|patch| !patch.is_empty());
        Some(Version(major, minor, patch.map_or(Ok(0), str::parse).ok()?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_of_distributions_are_read() {
        for (release, expected) in [
            ("6.18.44-amd64", Some(Version(6, 18, 44))),
            ("6.12.74+deb13-amd64", Some(Version(6, 12, 74))),
            ("6.17.0-8-generic", Some(Version(6, 17, 0))),
            ("5.14.0-503.11.1.el9_5.x86_64", Some(Version(5, 14, 0))),
            ("6.1.141-155.222.amzn2023.x86_64", Some(Version(6, 1, 141))),
            ("6.6.87.2-microsoft-standard-WSL2", Some(Version(6, 6, 87))),
            ("6.19-rc3", Some(Version(6, 19, 0))),
            ("6.19.0-rc3-next-20260101", Some(Version(6, 19, 0))),
            ("7.0", Some(Version(7, 0, 0))),
            ("6.18.", Some(Version(6, 18, 0))),
            ("", None),
            ("linux", None),
            ("6", None),
            ("6-lts", None),
            ("6.99999999999.1", None),
        ] {
            assert_eq!(Version::parse(release), expected, "{release}");
        }
    }

    #[test]
    fn direct_reads_are_refused_where_they_crash_the_kernel() {
        for (release, safe) in [
            ("5.10.0-46-amd64", false),
            ("6.12.71", false),
            ("6.12.72", true),
            ("6.12.117+deb13-amd64", true),
            ("6.13.0", false),
            ("6.16.12", false),
            ("6.17.0-8-generic", false),
            ("6.18.10-amd64", false),
            ("6.18.11-amd64", true),
            ("6.18.44-amd64", true),
            ("6.19-rc3", false),
            ("6.19.0", false),
            ("6.19.1", true),
            ("7.3.4", true),
            ("unreadable", false),
        ] {
            let said = Release(release.to_owned()).direct_reads();
            assert_eq!(said.is_ok(), safe, "{release}: {said:?}");
            assert!(said.err().is_none_or(|why| why.contains("CVE-2026-23224")));
        }
    }

    #[test]
    fn files_are_not_mounted_where_erofs_reads_them_wrongly() {
        for (release, safe) in [
            ("6.11.11", true),
            ("6.12.0", false),
            ("6.12.28+deb13-amd64", false),
            ("6.12.29", true),
            ("6.13.12", false),
            ("6.14.0-22-generic", false),
            ("6.14.6", false),
            ("6.14.7", true),
            ("6.15.0", true),
            ("6.18.44-amd64", true),
            ("unreadable", false),
        ] {
            let said = Release(release.to_owned()).buffered_reads();
            assert_eq!(said.is_ok(), safe, "{release}: {said:?}");
            assert!(said.err().is_none_or(|why| why.contains("CVE-2025-37999")));
        }
    }
}
