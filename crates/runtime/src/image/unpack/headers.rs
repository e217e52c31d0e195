//! Tar headers that describe the member behind them: long names and PAX records.

use std::io::Read;

use super::error::{EXTENSION_LIMIT, UnpackError};

/// The headers that describe the next member.
#[derive(Default)]
pub(super) struct Described {
    /// GNU's long name.
    name: Option<Vec<u8>>,
    /// PAX records.
    records: Option<Vec<u8>>,
}

impl Described {
    /// Returns whether `entry` describes the next member, after reading it.
    pub(super) fn take<R: Read>(
        &mut self,
        entry: &mut tar::Entry<'_, R>,
    ) -> Result<bool, UnpackError> {
        let kind = entry.header().entry_type();
        let into = match kind {
            tar::EntryType::GNULongName => &mut self.name,
            tar::EntryType::XHeader => &mut self.records,
            // Unrelated to names; skip the content.
            kind => return Ok(kind.is_gnu_longlink() || kind.is_pax_global_extensions()),
        };
        if entry.size() > EXTENSION_LIMIT {
            return Err(UnpackError::Extension(entry.size()));
        }
        if into.is_some() {
            return Err(UnpackError::Ambiguous("two headers of a kind that describe one member"));
        }
        let mut content = Vec::new();
        entry.read_to_end(&mut content)?;
        *into = Some(content);
        Ok(true)
    }

    /// The name of the member.
    pub(super) fn name_of<R: Read>(
        self,
        entry: &tar::Entry<'_, R>,
    ) -> Result<Vec<u8>, UnpackError> {
        let Described { name, records } = self;
        if entry.header().entry_type().is_gnu_sparse() {
            return Err(UnpackError::Ambiguous("a sparse member"));
        }
        let mut path = None;
        for record in tar::PaxExtensions::new(&records.unwrap_or_default()) {
            let record = record?;
            match record.key_bytes() {
                b"path" => path = Some(record.value_bytes().to_vec()),
                b"size" if record.value() != Ok(&entry.size().to_string()) => {
                    return Err(UnpackError::Ambiguous("a member with two sizes"));
                }
                _ => {}
            }
        }
        let name = name.map(|mut name| {
            name.truncate(name.iter().position(|byte| *byte == 0).unwrap_or(name.len()));
            name
        });
        Ok(name.or(path).unwrap_or_else(|| entry.path_bytes().into_owned()))
    }
}
