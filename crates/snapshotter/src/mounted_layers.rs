//! Finds mounted snapshots, in all mount namespaces.
//!
//! A removed snapshot is normally not mounted. It may be when containerd has lost its state and
//! removes snapshots that it doesn't know, while containers of its former state still run.

use std::{
    collections::HashSet,
    ffi::OsStr,
    fs,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
};

use lazuli_sys::mountinfo::unescape;

use crate::directories::Directories;

/// Numbers of snapshots whose files are a layer of a mounted overlay, or are bind mounted.
///
/// Mount namespaces are those of the processes that `/proc` shows.
///
/// # Errors
/// The mounts of this very process cannot be read. Other processes may end meanwhile.
pub(crate) fn numbers(directories: &Directories) -> std::io::Result<HashSet<u64>> {
    let own = fs::read("/proc/self/mountinfo")?;
    let place = StateDirectory::of(directories.root(), directories.lazy(), &own);
    let mut numbers: HashSet<u64> = lines(&own).flat_map(|line| place.numbers(line)).collect();
    let mut seen: HashSet<PathBuf> = fs::read_link("/proc/self/ns/mnt").into_iter().collect();
    for process in fs::read_dir("/proc")?.flatten().map(|entry| entry.path()) {
        let Ok(space) = fs::read_link(process.join("ns/mnt")) else { continue };
        if seen.contains(&space) {
            continue;
        }
        // An ending process has no mounts any more; another process of the namespace may.
        let Ok(mounts) = fs::read(process.join("mountinfo")) else { continue };
        if !mounts.is_empty() {
            seen.insert(space);
            numbers.extend(lines(&mounts).flat_map(|line| place.numbers(line)));
        }
    }
    Ok(numbers)
}

fn lines(mountinfo: &[u8]) -> impl Iterator<Item = &[u8]> {
    mountinfo.split(|byte| *byte == b'\n').filter(|line| !line.is_empty())
}

/// The directory of snapshots, as it is spelled in options of overlayfs and in the kernel's list of
/// mounts.
struct StateDirectory {
    root: Vec<u8>,
    /// The directory of mounted images.
    lazy: Vec<u8>,
    /// The file system, as `MAJOR:MINOR`.
    device: Vec<u8>,
    /// The path from the root of the file system.
    inside: Vec<u8>,
}

impl StateDirectory {
    fn of(root: &Path, lazy: &Path, mountinfo: &[u8]) -> Self {
        let above = lines(mountinfo).filter_map(|line| {
            let fields: Vec<_> = line.split(|byte| *byte == b' ').collect();
            let &[_, _, device, inside, target, ..] = &fields[..] else { return None };
            let [inside, target] = [inside, target].map(unescape);
            let rest = root.strip_prefix(OsStr::from_bytes(&target)).ok()?;
            let inside = Path::new(OsStr::from_bytes(&inside)).join(rest);
            Some((target.len(), (device.to_vec(), inside)))
        });
        // The last mount at a place covers the others.
        let nearest = above.max_by_key(|(length, _)| *length);
        let (device, inside) = nearest.map(|(_, found)| found).unwrap_or_default();
        let [root, lazy, inside] =
            [root, lazy, &inside].map(|path| path.as_os_str().as_bytes().to_vec());
        StateDirectory { root, lazy, device, inside }
    }

    /// Numbers of snapshots in one line of a `mountinfo`.
    fn numbers(&self, line: &[u8]) -> Vec<u64> {
        let fields: Vec<_> = line.split(|byte| *byte == b' ').collect();
        let end = fields.iter().position(|field| *field == b"-").unwrap_or(fields.len());
        let (Some(device), Some(inside)) = (fields.get(2), fields.get(3)) else {
            return Vec::new();
        };
        if *device == self.device {
            return below(&self.inside, &unescape(inside)).into_iter().collect();
        }
        match (fields.get(end + 1), fields.get(end + 3)) {
            (Some(&b"overlay"), Some(options)) => self.layers(options),
            _ => Vec::new(),
        }
    }

    fn layers(&self, options: &[u8]) -> Vec<u64> {
        let (mut uppers, mut lowers) = (Vec::new(), Vec::new());
        for option in options.split(|byte| *byte == b',') {
            let Some(equals) = option.iter().position(|byte| *byte == b'=') else { continue };
            let value = unescape(&option[equals + 1..]);
            match &option[..equals] {
                b"upperdir" => uppers.push(value),
                // With a plus: one layer of several.
                b"lowerdir" | b"lowerdir+" => {
                    lowers.extend(value.split(|byte| *byte == b':').map(<[u8]>::to_vec));
                }
                _ => {}
            }
        }
        let upper = uppers.first().map(|upper| below(&self.root, upper));
        let of_lower = |lower: &Vec<u8>| match upper {
            _ if lower.starts_with(&self.root) => below(&self.root, lower),
            _ if lower.starts_with(&self.lazy) => below(&self.lazy, lower),
            // Not ours.
            Some(None) => None,
            // containerd shortens long lists: it changes into a directory above. It also puts
            // layers elsewhere to map their ids: `/tmp/ovl-idmapped123/NUMBER/fs`.
            Some(Some(_)) => number_of(lower),
            None if !lower.starts_with(b"/") || contains(lower, b"ovl-idmapped") => {
                number_of(lower)
            }
            None => None,
        };
        upper.flatten().into_iter().chain(lowers.iter().filter_map(of_lower)).collect()
    }
}

fn contains(text: &[u8], part: &[u8]) -> bool {
    text.windows(part.len()).any(|window| window == part)
}

/// The number in `ROOT/NUMBER/fs` and in `ROOT/trash/NUMBER-ANYTHING/fs`.
fn below(root: &[u8], path: &[u8]) -> Option<u64> {
    let rest = path.strip_prefix(root)?.strip_prefix(b"/")?;
    number_of(rest.strip_prefix(b"trash/").unwrap_or(rest))
}

/// The number in a path that ends with `NUMBER/fs`.
fn number_of(path: &[u8]) -> Option<u64> {
    let directory = path.strip_suffix(b"/fs")?;
    let name = directory.rsplit(|byte| *byte == b'/').next()?;
    let number = name.split(|byte| *byte == b'-').next()?;
    std::str::from_utf8(number).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_are_found_however_containerd_names_them() {
        let place = StateDirectory {
            root: b"/s t/snapshots".to_vec(),
            lazy: b"/s t/lazy".to_vec(),
            device: b"254:0".to_vec(),
            inside: b"/var/s t/snapshots".to_vec(),
        };
        let upper = r"rw,upperdir=/s\040t/snapshots/5/fs,workdir=/s\040t/snapshots/5/work";
        for (line, expected) in [
            (format!("overlay overlay {upper},lowerdir=/s\\040t/snapshots/2/fs"), &[5, 2][..]),
            (format!("overlay overlay {upper},lowerdir=4/fs:3/fs"), &[5, 4, 3]),
            (format!("overlay overlay {upper},lowerdir=/tmp/ovl-idmapped1/4/fs:/tmp/ovl-idmapped1/3/fs"), &[5, 4, 3]),
            (format!("overlay overlay {upper},lowerdir=/tmp/ovl-idmapped1/fs"), &[5]),
            ("overlay overlay ro,lowerdir=/s\\040t/snapshots/2/fs:/s\\040t/snapshots/1/fs".into(), &[2, 1]),
            ("overlay overlay ro,lowerdir+=/s\\040t/snapshots/2/fs,lowerdir+=/s\\040t/snapshots/1/fs".into(), &[2, 1]),
            ("overlay overlay ro,lowerdir=/s\\040t/snapshots/2/fs:/s\\040t/lazy/1/fs".into(), &[2, 1]),
            ("overlay overlay ro,lowerdir=snapshots/2/fs:lazy/1/fs".into(), &[2, 1]),
            ("overlay overlay ro,lowerdir=2/fs:1/fs".into(), &[2, 1]),
            // Of another snapshotter.
            ("overlay overlay rw,upperdir=/c/snapshots/5/fs,lowerdir=4/fs:3/fs".into(), &[]),
            ("overlay overlay ro,lowerdir=/c/snapshots/5/fs:/c/snapshots/4/fs".into(), &[]),
            ("erofs none ro,device=/s\\040t/cache/1".into(), &[]),
        ] {
            let line = format!("9 1 0:50 / /run/rootfs rw,relatime shared:1 - {line}");
            assert_eq!(place.numbers(line.as_bytes()), expected, "{line}");
        }
        for (inside, expected) in [
            (r"/var/s\040t/snapshots/7/fs", &[7][..]),
            (r"/var/s\040t/snapshots/trash/7-1/fs", &[7]),
            ("/c/snapshots/7/fs", &[]),
            ("/", &[]),
        ] {
            let line = format!("9 1 254:0 {inside} /mnt rw - ext4 /dev/vda rw");
            assert_eq!(place.numbers(line.as_bytes()), expected, "{line}");
        }
    }

    #[test]
    fn a_directory_is_found_in_its_file_system() {
        let directory = tempfile::tempdir().unwrap();
        let directories = Directories::open(directory.path()).unwrap();
        let mountinfo = fs::read("/proc/self/mountinfo").unwrap();
        let place = StateDirectory::of(directories.root(), directories.lazy(), &mountinfo);
        assert!(place.inside.ends_with(b"/snapshots"));
        assert_eq!(numbers(&directories).unwrap(), HashSet::new());
    }
}
