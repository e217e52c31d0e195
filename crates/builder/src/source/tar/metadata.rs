//! Owner, mode, times, devices and attributes of a member.

use lazuli_image::{Metadata, Mtime, tree::Device};

use super::{
    acl::{self, Owner},
    header::Header,
    number,
    pax::Attributes,
};
use crate::entry::EntryKind;

pub(super) fn not_a_number(field: &str, bytes: &[u8]) -> String {
    format!("the {field} field holds `{}`, expected a number", bytes.escape_ascii())
}

pub(super) fn device(header: &Header<'_>, attributes: &Attributes) -> Result<Device, String> {
    let number = |field: &str, raw: &[u8], limit: u64, other: Option<u64>| {
        let number = other
            .or_else(|| number::parse_unsigned(raw))
            .ok_or_else(|| not_a_number(field, raw))?;
        let fits = u32::try_from(number).ok().filter(|_| number < limit);
        fits.ok_or_else(|| format!("{field} is {number}, expected less than {limit}"))
    };
    Ok(Device {
        major: number("major device number", header.device_major(), 1 << 12, attributes.device.0)?,
        minor: number("minor device number", header.device_minor(), 1 << 20, attributes.device.1)?,
    })
}

pub(super) fn metadata(
    header: &Header<'_>,
    kind: &EntryKind,
    attributes: Attributes,
) -> Result<Metadata, String> {
    let id = |field: &str, raw: &[u8], other: Option<u64>| {
        let number = other
            .or_else(|| number::parse_unsigned(raw))
            .ok_or_else(|| not_a_number(field, raw))?;
        u32::try_from(number).map_err(|_| format!("{field} is {number}, expected less than 2^32"))
    };
    let mode =
        number::parse_unsigned(header.mode()).ok_or_else(|| not_a_number("mode", header.mode()))?;
    let mtime = match attributes.mtime {
        Some(mtime) => mtime,
        None => {
            let seconds = number::parse(header.mtime());
            Mtime {
                seconds: seconds.ok_or_else(|| not_a_number("mtime", header.mtime()))?,
                nanoseconds: 0,
            }
        }
    };
    let uid = id("uid", header.uid(), attributes.uid)?;
    let gid = id("gid", header.gid(), attributes.gid)?;
    let mut permissions = (mode & 0o7777) as u16;
    let mut xattrs = attributes.xattrs;
    let names = header.has_ustar_fields();
    let owner = Owner {
        user: (if names { header.user_name() } else { b"" }, uid),
        group: (if names { header.group_name() } else { b"" }, gid),
    };
    if let Some(text) = attributes.acl_access {
        let acl = acl::to_kernel(&text, owner)?;
        permissions = permissions & 0o7000 | acl::permissions(&acl);
        if !acl::is_minimal(&acl) {
            xattrs.insert((*b"system.posix_acl_access").into(), acl.into());
        }
    }
    if let (Some(text), EntryKind::Directory) = (attributes.acl_default, kind) {
        let acl = acl::to_kernel(&text, owner)?;
        xattrs.insert((*b"system.posix_acl_default").into(), acl.into());
    }
    Ok(Metadata { permissions, uid, gid, mtime, xattrs })
}
