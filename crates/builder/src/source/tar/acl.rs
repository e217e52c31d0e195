//! POSIX ACLs: from the text that archives hold to the bytes that Linux keeps in an xattr.

use super::number::decimal;

/// Version of the kernel's form (`POSIX_ACL_XATTR_VERSION`).
const VERSION: u32 = 2;
/// The id of entries that name no user or group.
const NO_ID: u32 = u32::MAX;

const USER_OBJ: u16 = 0x01;
const USER: u16 = 0x02;
const GROUP_OBJ: u16 = 0x04;
const GROUP: u16 = 0x08;
const MASK: u16 = 0x10;
const OTHER: u16 = 0x20;

/// The owner of the member: the only names besides root that an archive itself explains.
#[derive(Clone, Copy, Debug)]
pub(super) struct Owner<'a> {
    /// Name and number of the user.
    pub(super) user: (&'a [u8], u32),
    /// Name and number of the group.
    pub(super) group: (&'a [u8], u32),
}

/// Converts ACL text: `user::rwx,user:1000:r--,…` with commas or newlines between entries, star's
/// and libarchive's number after the permissions (`user:lisa:r--:1000`), and comments. Returns the
/// problem otherwise.
pub(super) fn to_kernel(text: &[u8], owner: Owner<'_>) -> Result<Vec<u8>, String> {
    let mut entries = Vec::new();
    for line in text.split(|byte| matches!(byte, b',' | b'\n')) {
        let line = line.split(|&byte| byte == b'#').next().unwrap_or_default().trim_ascii();
        if !line.is_empty() {
            entries.push(entry(line, owner)?);
        }
    }
    // The order that the kernel insists on.
    entries.sort_unstable_by_key(|&(tag, id, _)| (tag, id));
    let count = |wanted: u16| entries.iter().filter(|(tag, ..)| *tag == wanted).count();
    let named = count(USER) + count(GROUP) > 0;
    let whole = [USER_OBJ, GROUP_OBJ, OTHER].iter().all(|&tag| count(tag) == 1);
    let unique = entries.windows(2).all(|pair| (pair[0].0, pair[0].1) != (pair[1].0, pair[1].1));
    if !whole || !unique || (named && count(MASK) == 0) {
        return Err(format!(
            "the ACL `{}` is not complete: expected one entry each for user, group and other, a mask when others are named, and no duplicates",
            text.escape_ascii()
        ));
    }
    let mut bytes = VERSION.to_le_bytes().to_vec();
    for (tag, id, permissions) in entries {
        bytes.extend(tag.to_le_bytes());
        bytes.extend(permissions.to_le_bytes());
        bytes.extend(id.to_le_bytes());
    }
    Ok(bytes)
}

/// The permission bits of a file with this access ACL, which Linux sets together with it: those of
/// the group are the mask. libarchive stores the owning group's own instead.
pub(super) fn permissions(kernel: &[u8]) -> u16 {
    let mut bits = [0; 3];
    for entry in kernel[4..].chunks_exact(8) {
        let value = u16::from(entry[2]);
        match u16::from(entry[0]) {
            USER_OBJ => bits[0] = value,
            // The mask follows the group, if there is one.
            GROUP_OBJ | MASK => bits[1] = value,
            OTHER => bits[2] = value,
            _ => {}
        }
    }
    bits[0] << 6 | bits[1] << 3 | bits[2]
}

/// Returns whether an access ACL adds nothing to the permission bits. Linux stores no such ACL.
pub(super) fn is_minimal(kernel: &[u8]) -> bool {
    kernel.len() == 4 + 3 * 8
}

fn entry(line: &[u8], owner: Owner<'_>) -> Result<(u16, u32, u16), String> {
    let wrong = |what: &str| format!("the ACL entry `{}` {what}", line.escape_ascii());
    let mut fields = line.split(|&byte| byte == b':').map(<[u8]>::trim_ascii);
    let tag = fields.next().unwrap_or_default();
    let second = fields.next().ok_or_else(|| wrong("has no permissions"))?;
    // `mask:rwx` and `other:rwx` may leave out the empty name.
    let (name, permissions) = match fields.next() {
        Some(permissions) => (second, permissions),
        None => (&b""[..], second),
    };
    let number = fields.next();
    let permissions = permissions.iter().try_fold(0, |bits, letter| match letter {
        b'r' => Some(bits | 4),
        b'w' => Some(bits | 2),
        b'x' => Some(bits | 1),
        b'-' => Some(bits),
        _ => None,
    });
    let permissions = permissions.ok_or_else(|| wrong("has permissions other than r, w, x, -"))?;
    let resolve = |known: (&[u8], u32)| {
        let number = number.and_then(decimal).or_else(|| decimal(name));
        let known = [known, (b"root", 0)].into_iter().find(|(known, _)| *known == name);
        let number = number.or(known.map(|(_, id)| id.into()));
        number.and_then(|id| u32::try_from(id).ok()).filter(|&id| id != NO_ID).ok_or_else(|| {
            wrong("has a name without a number; make the archive with --numeric-owner")
        })
    };
    let (tag, id) = match (tag, name) {
        (b"user" | b"u", b"") => (USER_OBJ, NO_ID),
        (b"user" | b"u", _) => (USER, resolve(owner.user)?),
        (b"group" | b"g", b"") => (GROUP_OBJ, NO_ID),
        (b"group" | b"g", _) => (GROUP, resolve(owner.group)?),
        (b"mask" | b"m", _) => (MASK, NO_ID),
        (b"other" | b"o", _) => (OTHER, NO_ID),
        _ => return Err(wrong("does not begin with user, group, mask or other")),
    };
    Ok((tag, id, permissions))
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWNER: Owner<'_> = Owner { user: (b"lisa", 1000), group: (b"staff", 50) };

    #[test]
    fn text_of_all_writers_gives_the_same_bytes() {
        let texts = [
            "user::rwx\nuser:1000:r-x\ngroup::r--\nmask::r-x\nother::---\n",
            "user::rwx,user:lisa:r-x,group::r--,mask::r-x,other::---",
            "user::rwx,user:homer:r-x:1000,group::r--,mask::r-x,other::---",
            "other:---,mask:r-x,u::rwx,g::r-- # comment\nu:1000:r-x #effective:r-x",
        ];
        let expected = [
            &b"\x02\0\0\0"[..],
            b"\x01\0\x07\0\xff\xff\xff\xff",
            b"\x02\0\x05\0\xe8\x03\0\0",
            b"\x04\0\x04\0\xff\xff\xff\xff",
            b"\x10\0\x05\0\xff\xff\xff\xff",
            b"\x20\0\x00\0\xff\xff\xff\xff",
        ]
        .concat();
        for text in texts {
            assert_eq!(to_kernel(text.as_bytes(), OWNER).unwrap(), expected, "{text}");
        }
        assert_eq!(permissions(&expected), 0o750);
        assert!(is_minimal(&to_kernel(b"user::rwx,group::r--,other::r--", OWNER).unwrap()));
    }

    #[test]
    fn acls_that_the_kernel_would_refuse_are_refused() {
        for text in [
            "",
            "user::rwx,group::r--",
            "user::rwx,user:7:r--,group::r--,other::r--",
            "user::rwx,user::rwx,group::r--,other::r--",
            "user::rwx,user:7:r--,user:7:r--,group::r--,mask::r--,other::r--",
            "user::rwq,group::r--,other::r--",
            "user::rwx,user:nobody-knows:r--,group::r--,mask::r--,other::r--",
            "everyone@::rwx",
            "user",
        ] {
            assert!(to_kernel(text.as_bytes(), OWNER).is_err(), "{text}");
        }
    }
}
