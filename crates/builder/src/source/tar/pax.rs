//! PAX extended headers: `LENGTH KEY=VALUE\n` records that override the header they precede.

use std::collections::BTreeMap;

use lazuli_image::Mtime;

use super::{
    number::decimal,
    sparse::{MAX_SEGMENTS, Segment, pair},
};

/// Attributes of the next member, from extended headers.
#[derive(Clone, Debug, Default)]
pub(super) struct Attributes {
    /// Name of the member.
    pub(super) path: Option<Vec<u8>>,
    /// Target of a link.
    pub(super) link_path: Option<Vec<u8>>,
    /// Stored bytes of content.
    pub(super) size: Option<u64>,
    /// Owner.
    pub(super) uid: Option<u64>,
    /// Group.
    pub(super) gid: Option<u64>,
    /// Time of last modification.
    pub(super) mtime: Option<Mtime>,
    /// Extended attributes by full name.
    pub(super) xattrs: BTreeMap<Box<[u8]>, Box<[u8]>>,
    /// Access ACL in text form.
    pub(super) acl_access: Option<Vec<u8>>,
    /// Default ACL in text form.
    pub(super) acl_default: Option<Vec<u8>>,
    /// star's device numbers, for those that the header cannot hold.
    pub(super) device: (Option<u64>, Option<u64>),
    /// star's way to archive a socket.
    pub(super) socket: bool,
    /// GNU sparse keys.
    pub(super) sparse: Sparse,
}

/// The GNU.sparse.* keys.
#[derive(Clone, Debug, Default)]
pub(super) struct Sparse {
    /// Real name of the member.
    pub(super) name: Option<Vec<u8>>,
    /// Bytes in the file, holes included.
    pub(super) size: Option<u64>,
    /// Map of formats 0.0 and 0.1, as start, length, start, length…
    numbers: Vec<u64>,
    /// Any key of formats 0.0 and 0.1.
    in_header: bool,
    /// `GNU.sparse.major`; 1 means that the map is in front of the data.
    major: Option<u64>,
}

/// The place of a sparse member's map.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum SparseMap {
    /// In the extended header itself.
    Here(Vec<Segment>),
    /// In front of the data.
    InData,
}

impl Sparse {
    /// The map, if the member is sparse. The error is the problem.
    pub(super) fn map(&mut self) -> Result<Option<SparseMap>, String> {
        match self.major {
            Some(1) => Ok(Some(SparseMap::InData)),
            Some(major @ 2..) => Err(format!("GNU sparse format {major}, expected 0 or 1")),
            _ if self.in_header => {
                let map = pair(&std::mem::take(&mut self.numbers));
                let map = map.ok_or("a GNU sparse map with half a segment at its end")?;
                Ok(Some(SparseMap::Here(map)))
            }
            _ => Ok(None),
        }
    }
}

impl Attributes {
    /// Bytes of the names, attributes and maps.
    pub(super) fn bytes(&self) -> u64 {
        let texts =
            [&self.path, &self.link_path, &self.acl_access, &self.acl_default, &self.sparse.name];
        let texts = texts.into_iter().flatten().map(Vec::len);
        let xattrs = self.xattrs.iter().map(|(name, value)| name.len() + value.len());
        let map = size_of_val(&self.sparse.numbers[..]);
        (texts.chain(xattrs).sum::<usize>() + map) as u64
    }

    /// Applies the records of one extended header. Later records win. The error is the problem.
    pub(super) fn apply(&mut self, mut records: &[u8]) -> Result<(), String> {
        while !records.is_empty() {
            if records.iter().all(|&byte| byte == 0) {
                break;
            }
            let (key, value, rest) = split(records).ok_or_else(|| {
                let start = &records[..records.len().min(40)];
                format!(
                    "`LENGTH KEY=VALUE` was expected in a PAX header, found `{}`",
                    start.escape_ascii()
                )
            })?;
            self.record(key, value)?;
            records = rest;
        }
        Ok(())
    }

    fn record(&mut self, key: &[u8], value: &[u8]) -> Result<(), String> {
        let wrong = || {
            let value = &value[..value.len().min(40)];
            format!("PAX key {} has the value `{}`", key.escape_ascii(), value.escape_ascii())
        };
        // An empty value resets the attribute of an earlier header.
        let text = || (!value.is_empty()).then(|| value.to_vec());
        let number = || match value {
            b"" => Ok(None),
            _ => decimal(value).map(Some).ok_or_else(|| wrong() + ", expected a decimal number"),
        };
        match key {
            b"path" => self.path = text(),
            b"linkpath" => self.link_path = text(),
            b"size" => self.size = number()?,
            b"uid" => self.uid = number()?,
            b"gid" => self.gid = number()?,
            b"mtime" if value.is_empty() => self.mtime = None,
            b"mtime" => {
                let time = parse_time(value);
                self.mtime = Some(time.ok_or_else(|| wrong() + ", expected seconds since 1970")?);
            }
            b"SCHILY.devmajor" => self.device.0 = number()?,
            b"SCHILY.devminor" => self.device.1 = number()?,
            b"SCHILY.filetype" => self.socket = value == b"socket",
            b"SCHILY.acl.access" => self.acl_access = text(),
            b"SCHILY.acl.default" => self.acl_default = text(),
            b"GNU.sparse.name" => self.sparse.name = text(),
            b"GNU.sparse.size" | b"GNU.sparse.realsize" => self.sparse.size = number()?,
            b"GNU.sparse.major" => self.sparse.major = number()?,
            b"GNU.sparse.numblocks" => self.sparse.in_header = true,
            b"GNU.sparse.map" => {
                let numbers = value.split(|&byte| byte == b',').filter(|text| !text.is_empty());
                let numbers: Option<Vec<u64>> = numbers.map(decimal).collect();
                self.sparse.numbers = numbers.ok_or_else(wrong)?;
                self.sparse.in_header = true;
            }
            b"GNU.sparse.offset" | b"GNU.sparse.numbytes" => {
                self.sparse.numbers.push(decimal(value).ok_or_else(wrong)?);
                self.sparse.in_header = true;
            }
            _ => return self.xattr(key, value),
        }
        if self.sparse.numbers.len() > 2 * MAX_SEGMENTS {
            return Err(format!("a sparse map of more than {MAX_SEGMENTS} segments"));
        }
        Ok(())
    }

    /// Extended attributes as star and GNU tar write them, and as libarchive does.
    fn xattr(&mut self, key: &[u8], value: &[u8]) -> Result<(), String> {
        let (name, value) = if let Some(name) = key.strip_prefix(b"SCHILY.xattr.") {
            (unescape(name, |code| matches!(code, b'=' | b'%')), value.to_vec())
        } else if let Some(name) = key.strip_prefix(b"LIBARCHIVE.xattr.") {
            let decoded = base64(value);
            let name = unescape(name, |_| true);
            let wrong = || format!("PAX key {} is not base64", key.escape_ascii());
            (name, decoded.ok_or_else(wrong)?)
        } else {
            return Ok(());
        };
        check_xattr(&name, &value)?;
        self.xattrs.insert(name.into(), value.into());
        Ok(())
    }
}

/// Linux's own limits on extended attributes: a name of 255 bytes, a value of 64 KiB; the format
/// counts the bytes of a value in 16 bits, so 64 KiB itself is out.
pub(crate) fn check_xattr(name: &[u8], value: &[u8]) -> Result<(), String> {
    let shown = || name[..name.len().min(255)].escape_ascii();
    if name.is_empty() || name.len() > 255 || name.contains(&0) {
        return Err(format!(
            "an extended attribute name of {} bytes (`{}`), expected 1 to 255 without NUL",
            name.len(),
            shown()
        ));
    }
    if value.len() > 65535 {
        return Err(format!(
            "extended attribute {} has {} bytes, expected at most 65535",
            shown(),
            value.len()
        ));
    }
    Ok(())
}

/// Splits off the first record.
fn split(records: &[u8]) -> Option<(&[u8], &[u8], &[u8])> {
    let space = records.iter().take(20).position(|&byte| byte == b' ')?;
    let length = usize::try_from(decimal(&records[..space])?).ok()?;
    if length <= space || length > records.len() {
        return None;
    }
    let (record, rest) = records.split_at(length);
    let record = record[space + 1..].strip_suffix(b"\n")?;
    let equals = record.iter().position(|&byte| byte == b'=')?;
    Some((&record[..equals], &record[equals + 1..], rest))
}

/// Seconds with an optional sign and fraction. Digits below the nanosecond are dropped.
fn parse_time(text: &[u8]) -> Option<Mtime> {
    let (negative, digits) = match text.strip_prefix(b"-") {
        Some(rest) => (true, rest),
        None => (false, text),
    };
    let mut parts = digits.splitn(2, |&byte| byte == b'.');
    let seconds = i64::try_from(decimal(parts.next()?)?).ok()?;
    let fraction = parts.next().unwrap_or_default();
    if !fraction.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let padded = fraction.iter().copied().chain(std::iter::repeat(b'0')).take(9);
    let nanoseconds = padded.fold(0, |value, digit| value * 10 + u32::from(digit - b'0'));
    Some(match (negative, nanoseconds) {
        (false, _) => Mtime { seconds, nanoseconds },
        (true, 0) => Mtime { seconds: -seconds, nanoseconds: 0 },
        (true, _) => Mtime { seconds: -seconds - 1, nanoseconds: 1_000_000_000 - nanoseconds },
    })
}

/// Decodes `%XX` for bytes that `wanted` accepts.
fn unescape(text: &[u8], wanted: fn(u8) -> bool) -> Vec<u8> {
    let mut plain = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((&first, tail)) = rest.split_first() {
        let code = tail.get(..2).filter(|_| first == b'%');
        let code = code.and_then(|digits| Some(hex(digits[0])? << 4 | hex(digits[1])?));
        match code.filter(|&code| wanted(code)) {
            Some(code) => {
                plain.push(code);
                rest = &tail[2..];
            }
            None => {
                plain.push(first);
                rest = tail;
            }
        }
    }
    plain
}

fn hex(digit: u8) -> Option<u8> {
    char::from(digit).to_digit(16).and_then(|value| u8::try_from(value).ok())
}

/// Decodes Base64 with or without padding; `None` for other text.
fn base64(text: &[u8]) -> Option<Vec<u8>> {
    let digits = text.iter().filter(|byte| !matches!(byte, b'=' | b'\n'));
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3);
    let (mut bits, mut count) = (0u32, 0);
    for &digit in digits {
        let value = match digit {
            b'A'..=b'Z' => digit - b'A',
            b'a'..=b'z' => digit - b'a' + 26,
            b'0'..=b'9' => digit - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => return None,
        };
        bits = bits << 6 | u32::from(value);
        count += 6;
        if count >= 8 {
            count -= 8;
            bytes.push((bits >> count) as u8);
            bits &= (1 << count) - 1;
        }
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Formats one record.
    fn record(key: &str, value: &[u8]) -> Vec<u8> {
        let body = key.len() + value.len() + 3;
        let length = (1..).map(|digits| body + digits).find(|n| n.to_string().len() + body == *n);
        [format!("{} {key}=", length.unwrap()).as_bytes(), value, b"\n"].concat()
    }

    #[test]
    fn values_may_hold_newlines_and_equal_signs() {
        let mut attributes = Attributes::default();
        let records =
            [record("SCHILY.xattr.user.a%3Db%25c%20", b"1\n2=3\n\0"), record("path", b"x\ny")];
        attributes.apply(&records.concat()).unwrap();
        assert_eq!(attributes.path.as_deref(), Some(&b"x\ny"[..]));
        let value = attributes.xattrs.get(&b"user.a=b%c%20"[..]).unwrap();
        assert_eq!(&value[..], b"1\n2=3\n\0");
    }

    #[test]
    fn libarchive_attributes_are_base64() {
        let mut attributes = Attributes::default();
        let records = record("LIBARCHIVE.xattr.user.%C3%A4", b"aGVsbG8");
        attributes.apply(&records).unwrap();
        assert_eq!(&attributes.xattrs[&"user.ä".as_bytes().into() as &Box<[u8]>][..], b"hello");
        assert!(attributes.apply(&record("LIBARCHIVE.xattr.user.x", b"a!")).is_err());
    }

    #[test]
    fn decimal_times_become_seconds_and_nanoseconds() {
        let time = |text: &str| parse_time(text.as_bytes()).map(|t| (t.seconds, t.nanoseconds));
        assert_eq!(time("12"), Some((12, 0)));
        assert_eq!(time("12.5"), Some((12, 500_000_000)));
        assert_eq!(time("12.0000000019"), Some((12, 1)));
        assert_eq!(time("-1.25"), Some((-2, 750_000_000)));
        assert_eq!(time("-315619200"), Some((-315_619_200, 0)));
        for text in ["", "-", ".5", "1e3", "1.x", "99999999999999999999"] {
            assert_eq!(time(text), None, "{text}");
        }
    }

    #[test]
    fn malformed_pax_records_are_refused() {
        for records in [
            "hello",
            "5 a=b\n",
            "99 a=b\n",
            "0 a=b\n",
            "6 a=bc",
            "7 abcd\n",
            "9999999999999999999999 a=b\n",
        ] {
            assert!(Attributes::default().apply(records.as_bytes()).is_err(), "{records}");
        }
        for (key, value) in
            [("size", "-1"), ("mtime", "soon"), ("uid", "x"), ("GNU.sparse.map", "1,b")]
        {
            assert!(Attributes::default().apply(&record(key, value.as_bytes())).is_err(), "{key}");
        }
    }
}
