//! A tar of a tree: POSIX headers, extended ones where those are too small.

use std::io::{self, Write};

use lazuli_image::{Inode, Kind, Mtime, tree::Device};
use tar::{EntryType, Header};

use super::{ChunkSource, EntryOrder, UnpackError};

const BLOCK: usize = 512;

/// Biggest numbers that fit into the fields of a header: 7 and 11 octal digits.
const MAX_ID: u32 = 0o7_777_777;
const MAX_NUMBER: u64 = 0o77_777_777_777;

/// Writes all entries but sockets. The same image gives the same bytes.
///
/// # Errors
/// Those of `content`, and of `out`.
pub fn tar<C: ChunkSource>(
    order: &EntryOrder<'_>,
    out: &mut impl Write,
    content: &mut C,
) -> Result<(), C::Error> {
    for (at, place) in order.places.iter().enumerate().filter(|(at, _)| !order.is_left_out(*at)) {
        let inode = order.inode(at);
        let first = (place.first != at).then(|| order.path(place.first));
        member(out, &name(order, at), first.as_deref(), inode).map_err(UnpackError::from)?;
        if let (Kind::Regular { size, chunks }, None) = (&inode.kind, &first) {
            let mut left = *size;
            for _ in chunks {
                let chunk = content.next()?;
                left = left.checked_sub(chunk.len() as u64).ok_or_else(|| {
                    order.error(at, format!("its chunks are more than its {size} bytes"))
                })?;
                out.write_all(chunk).map_err(UnpackError::from)?;
            }
            if left > 0 {
                let problem = format!("its chunks are {left} less than its {size} bytes");
                return Err(order.error(at, problem).into());
            }
            pad(out, *size).map_err(UnpackError::from)?;
        }
    }
    out.write_all(&[0; 2 * BLOCK]).map_err(UnpackError::from)?;
    Ok(())
}

/// The path as a member has it: directories end with a slash.
fn name(order: &EntryOrder<'_>, at: usize) -> Vec<u8> {
    let path = order.path(at);
    match order.inode(at).kind {
        Kind::Directory(_) if path.is_empty() => b"./".to_vec(),
        Kind::Directory(_) => [&path[..], b"/"].concat(),
        _ => path,
    }
}

/// Writes the headers of one member; `first` is the name that it is another one for.
fn member(
    out: &mut impl Write,
    name: &[u8],
    first: Option<&[u8]>,
    inode: &Inode,
) -> io::Result<()> {
    let metadata = &inode.metadata;
    let mut header = Header::new_ustar();
    let mut records = Vec::new();
    let (kind, link, size, device) = match (&inode.kind, first) {
        (_, Some(first)) => (EntryType::Link, first, 0, None),
        (Kind::Directory(_), _) => (EntryType::Directory, &b""[..], 0, None),
        (Kind::Regular { size, .. }, _) => (EntryType::Regular, &b""[..], *size, None),
        (Kind::Symlink(target), _) => (EntryType::Symlink, &target[..], 0, None),
        (Kind::CharDevice(device), _) => (EntryType::Char, &b""[..], 0, Some(*device)),
        (Kind::BlockDevice(device), _) => (EntryType::Block, &b""[..], 0, Some(*device)),
        (Kind::Fifo | Kind::Socket, _) => (EntryType::Fifo, &b""[..], 0, None),
    };
    header.set_entry_type(kind);
    header.set_mode(metadata.permissions.into());
    let Device { major, minor } = device.unwrap_or(Device { major: 0, minor: 0 });
    header.set_device_major(major)?;
    header.set_device_minor(minor)?;
    {
        let fields = header.as_old_mut();
        text(&mut fields.name, name, "path", &mut records);
        text(&mut fields.linkname, link, "linkpath", &mut records);
    }
    let mut number = |key: &str, value: u64, limit: u64| {
        if value <= limit {
            return value;
        }
        record(&mut records, key.as_bytes(), value.to_string().as_bytes());
        0
    };
    header.set_size(number("size", size, MAX_NUMBER));
    header.set_uid(number("uid", metadata.uid.into(), MAX_ID.into()));
    header.set_gid(number("gid", metadata.gid.into(), MAX_ID.into()));
    let Mtime { seconds, nanoseconds } = metadata.mtime;
    let whole = u64::try_from(seconds).ok().filter(|seconds| *seconds <= MAX_NUMBER);
    header.set_mtime(whole.unwrap_or(0));
    if whole.is_none() || nanoseconds > 0 {
        record(&mut records, b"mtime", time(metadata.mtime).as_bytes());
    }
    // Only the first name of a file carries its attributes.
    for (name, value) in metadata.xattrs.iter().filter(|_| first.is_none()) {
        let escape = |byte: &u8| match byte {
            b'=' => b"%3D".to_vec(),
            b'%' => b"%25".to_vec(),
            other => vec![*other],
        };
        let name: Vec<u8> = name.iter().flat_map(escape).collect();
        record(&mut records, &[b"SCHILY.xattr.", &name[..]].concat(), value);
    }
    if !records.is_empty() {
        let mut extended = Header::new_ustar();
        extended.set_entry_type(EntryType::XHeader);
        extended.as_old_mut().name[..10].copy_from_slice(b"PaxHeaders");
        extended.set_mode(0o644);
        extended.set_uid(0);
        extended.set_gid(0);
        extended.set_mtime(0);
        extended.set_size(records.len() as u64);
        extended.set_cksum();
        out.write_all(extended.as_bytes())?;
        out.write_all(&records)?;
        pad(out, records.len() as u64)?;
    }
    header.set_cksum();
    out.write_all(header.as_bytes())
}

/// Fills a text field, or leaves its beginning there and makes a record of `key`.
fn text(field: &mut [u8], value: &[u8], key: &str, records: &mut Vec<u8>) {
    let fits = value.len().min(field.len());
    field[..fits].copy_from_slice(&value[..fits]);
    if fits < value.len() {
        record(records, key.as_bytes(), value);
    }
}

/// Adds `LENGTH KEY=VALUE\n`, whose length counts its own digits.
fn record(records: &mut Vec<u8>, key: &[u8], value: &[u8]) {
    let body = key.len() + value.len() + 3;
    let mut length = body;
    while length != body + length.to_string().len() {
        length = body + length.to_string().len();
    }
    records.extend(format!("{length} ").as_bytes());
    records.extend([key, b"=", value, b"\n"].concat());
}

/// Decimal seconds since 1970.
fn time(Mtime { seconds, nanoseconds }: Mtime) -> String {
    match (seconds, nanoseconds) {
        (_, 0) => seconds.to_string(),
        (0.., _) => format!("{seconds}.{nanoseconds:09}"),
        // Nanoseconds are added to a negative number.
        _ => format!("-{}.{:09}", (seconds + 1).unsigned_abs(), 1_000_000_000 - nanoseconds),
    }
}

fn pad(out: &mut impl Write, size: u64) -> io::Result<()> {
    out.write_all(&[0; BLOCK][..(size.next_multiple_of(BLOCK as u64) - size) as usize])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_count_their_own_digits() {
        // Around where one more digit is needed.
        for value in (0..12).chain(85..105).chain(980..1000) {
            let mut records = Vec::new();
            record(&mut records, b"k", &vec![b'v'; value]);
            let text = String::from_utf8(records).unwrap();
            let length: usize = text.split(' ').next().unwrap().parse().unwrap();
            assert_eq!(length, text.len(), "{value}");
        }
    }

    #[test]
    fn times_are_written_as_pax_decimals() {
        let time = |seconds, nanoseconds| super::time(Mtime { seconds, nanoseconds });
        assert_eq!(time(7, 0), "7");
        assert_eq!(time(7, 5), "7.000000005");
        assert_eq!(time(-2, 500_000_000), "-1.500000000");
        assert_eq!(time(-1, 1), "-0.999999999");
        assert_eq!(time(-3, 0), "-3");
    }
}
