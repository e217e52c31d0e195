//! The table of contents: JSON, `{"version":1,"entries":[…]}`. Fields that are zero are left out.

use std::{borrow::Cow, collections::BTreeMap, fmt};

use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use jiff::Timestamp;
use serde::{
    Deserialize, Deserializer as _,
    de::{DeserializeSeed, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor},
};

use crate::{Digest, FormatError, Mtime, rafs::layout::MAX_ROWS};

/// Maximum number of entries in a table: as many as an image may have chunks.
pub const MAX_ENTRIES: u64 = MAX_ROWS;

/// Nanoseconds in a second.
const NANOSECONDS: i128 = 1_000_000_000;

/// An entry of a table: a file, or a further piece of the previous file. Not validated.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct TocEntry<'a> {
    /// The path in the tar.
    #[serde(borrow)]
    pub name: Cow<'a, str>,
    /// The entry's type.
    #[serde(rename = "type")]
    pub kind: Option<TocKind>,
    /// Bytes of a file.
    pub size: u64,
    /// Permissions, with or without the type of the file.
    pub mode: u32,
    /// User ID of the owner.
    pub uid: u32,
    /// Group ID.
    pub gid: u32,
    #[serde(borrow)]
    modtime: Option<Cow<'a, str>>,
    /// Target of a symbolic or hard link.
    #[serde(borrow)]
    pub link_name: Cow<'a, str>,
    /// Major number of a device.
    pub dev_major: u32,
    /// Minor number of a device.
    pub dev_minor: u32,
    #[serde(borrow)]
    xattrs: Option<BTreeMap<Cow<'a, str>, Cow<'a, str>>>,
    #[serde(borrow)]
    digest: Cow<'a, str>,
    /// First stored byte of the gzip member or zstd frame that the piece is in; 0 without content.
    pub offset: u64,
    /// Offset of the piece in the decoded member or frame.
    pub inner_offset: u64,
    /// One past the last stored byte of the file, with containers/storage; or 0.
    pub end_offset: u64,
    /// Offset of the piece in the file.
    pub chunk_offset: u64,
    /// Bytes of the piece; 0 if it reaches to the end of the file.
    pub chunk_size: u64,
    #[serde(borrow)]
    chunk_digest: Cow<'a, str>,
}

/// Extended attributes: full name to value.
pub type Xattrs = BTreeMap<Box<[u8]>, Box<[u8]>>;

/// The type of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TocKind {
    /// A directory.
    Dir,
    /// A regular file, with its first piece.
    Reg,
    /// A symbolic link.
    Symlink,
    /// Another name of a file.
    Hardlink,
    /// A character device.
    Char,
    /// A block device.
    Block,
    /// A named pipe.
    Fifo,
    /// A further piece of the file before it.
    Chunk,
}

impl TocEntry<'_> {
    /// SHA-256 of the whole file.
    pub fn digest(&self) -> Option<Digest> {
        self.digest.parse().ok()
    }

    /// SHA-256 of the piece.
    pub fn chunk_digest(&self) -> Option<Digest> {
        self.chunk_digest.parse().ok()
    }

    /// Time of last modification, 1970 by default. `None` if the text is not RFC 3339.
    pub fn mtime(&self) -> Option<Mtime> {
        let Some(text) = self.modtime.as_deref() else { return Some(Mtime::default()) };
        let nanoseconds = text.parse::<Timestamp>().ok()?.as_nanosecond();
        Some(Mtime {
            seconds: nanoseconds.div_euclid(NANOSECONDS) as i64,
            nanoseconds: nanoseconds.rem_euclid(NANOSECONDS) as u32,
        })
    }

    /// Extended attributes. `None` if a value is not base64.
    pub fn xattrs(&self) -> Option<Xattrs> {
        let xattrs = self.xattrs.iter().flatten();
        let decode = |(name, value): (&Cow<'_, str>, &Cow<'_, str>)| {
            let value = BASE64.decode(value.as_bytes()).ok()?;
            Some((name.as_bytes().into(), value.into()))
        };
        xattrs.map(decode).collect()
    }
}

/// Hands the entries of the table of contents `toc` to `each`, in their order. Memory is that of
/// one entry.
///
/// # Errors
/// It is no such table, it has more than [`MAX_ENTRIES`], or `each` fails.
pub fn read_toc(
    toc: &[u8],
    layer: Digest,
    mut each: impl FnMut(&TocEntry<'_>) -> Result<(), String>,
) -> Result<(), FormatError> {
    let mut json = serde_json::Deserializer::from_slice(toc);
    let read = json.deserialize_map(Table { each: &mut each });
    read.and_then(|()| json.end()).map_err(|problem| {
        FormatError::new(("table of contents of", layer), 0, problem.to_string())
    })
}

type Each<'a> = dyn FnMut(&TocEntry<'_>) -> Result<(), String> + 'a;

struct Table<'a> {
    each: &'a mut Each<'a>,
}

impl<'de> Visitor<'de> for Table<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a table of contents")
    }

    fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<(), M::Error> {
        let (mut has_entries, mut version) = (false, None);
        while let Some(key) = map.next_key::<Cow<'de, str>>()? {
            match &key[..] {
                "version" => version = Some(map.next_value::<u64>()?),
                "entries" if has_entries => return Err(M::Error::duplicate_field("entries")),
                "entries" => {
                    map.next_value_seed(Entries { each: &mut *self.each })?;
                    has_entries = true;
                }
                _ => drop(map.next_value::<IgnoredAny>()?),
            }
        }
        match (version, has_entries) {
            (Some(1), true) => Ok(()),
            (Some(1), false) => Err(M::Error::missing_field("entries")),
            (Some(other), _) => Err(M::Error::custom(format!("version {other}, expected 1"))),
            (None, _) => Err(M::Error::missing_field("version")),
        }
    }
}

struct Entries<'a, 'b> {
    each: &'a mut Each<'b>,
}

impl<'de> DeserializeSeed<'de> for Entries<'_, '_> {
    type Value = ();

    fn deserialize<D: serde::Deserializer<'de>>(self, from: D) -> Result<(), D::Error> {
        from.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for Entries<'_, '_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of entries")
    }

    fn visit_seq<S: SeqAccess<'de>>(self, mut list: S) -> Result<(), S::Error> {
        let mut count = 0;
        while let Some(entry) = list.next_element::<TocEntry<'de>>()? {
            count += 1;
            if count > MAX_ENTRIES {
                return Err(S::Error::custom(format!("more than {MAX_ENTRIES} entries")));
            }
            (self.each)(&entry).map_err(|problem| {
                S::Error::custom(format!("`{}`: {problem}", entry.name.escape_debug()))
            })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Algorithm;

    fn read(toc: &str) -> Result<Vec<String>, String> {
        let mut names = Vec::new();
        let layer = Algorithm::Sha256.digest(b"layer");
        let each = |entry: &TocEntry<'_>| match entry.kind {
            Some(kind) => {
                names.push(format!("{} {kind:?} {:?}", entry.name, entry.mtime()));
                Ok(())
            }
            None => Err("no type".to_owned()),
        };
        read_toc(toc.as_bytes(), layer, each).map_err(|error| error.to_string())?;
        Ok(names)
    }

    #[test]
    fn entries_are_read_one_by_one() {
        let toc = r#"{"entries":[{"name":"a\u0041/","type":"dir","NumLink":2,"modtime":null},
            {"name":"b","type":"reg","size":3,"xattrs":{"user.a":"YQ=="},"offset":9}],
            "tarSplitDigest":"sha256:x","version":1}"#;
        let time = "Some(Mtime { seconds: 0, nanoseconds: 0 })";
        assert_eq!(read(toc).unwrap(), [format!("aA/ Dir {time}"), format!("b Reg {time}")]);
        let entry: TocEntry<'_> = serde_json::from_str(r#"{"xattrs":{"user.a":"YQ=="}}"#).unwrap();
        assert_eq!(*entry.xattrs().unwrap()[&b"user.a"[..]], *b"a");
        let entry: TocEntry<'_> = serde_json::from_str(r#"{"xattrs":{"user.a":"a"}}"#).unwrap();
        assert_eq!(entry.xattrs(), None);
    }

    #[test]
    fn rfc_3339_times_become_seconds() {
        let mtime =
            |text: &str| TocEntry { modtime: Some(text.into()), ..TocEntry::default() }.mtime();
        for (text, seconds, nanoseconds) in [
            ("2024-02-29T23:59:59Z", 1_709_251_199, 0),
            ("2024-03-01T00:59:59.25+01:00", 1_709_251_199, 250_000_000),
            ("0001-01-01T00:00:00Z", -62_135_596_800, 0),
            ("1969-12-31T23:59:58.5Z", -2, 500_000_000),
        ] {
            assert_eq!(mtime(text), Some(Mtime { seconds, nanoseconds }), "{text}");
        }
        for text in ["", "2024-02-29", "2024-02-29T23:59:59", "2024-13-29T23:59:59Z"] {
            assert_eq!(mtime(text), None, "{text}");
        }
    }

    #[test]
    fn bytes_that_are_no_table_are_refused() {
        for (toc, problem) in [
            ("", "EOF"),
            ("[]", "table of contents"),
            ("{}", "missing field `version`"),
            (r#"{"version":1}"#, "entries"),
            (r#"{"version":2,"entries":[]}"#, "version 2"),
            (r#"{"version":1,"entries":{}}"#, "list of entries"),
            (r#"{"version":1,"entries":[],"entries":[]}"#, "duplicate"),
            (r#"{"version":1,"entries":[]}x"#, "trailing"),
            (r#"{"version":1,"entries":[{"name":"a","type":"door"}]}"#, "door"),
            (r#"{"version":1,"entries":[{"name":"a","size":-1}]}"#, "-1"),
            (r#"{"version":1,"entries":[{"name":"a\n"}]}"#, "`a\\n`: no type"),
        ] {
            let error = read(toc).unwrap_err();
            assert!(error.contains(problem), "{toc}: {error}");
        }
    }
}
