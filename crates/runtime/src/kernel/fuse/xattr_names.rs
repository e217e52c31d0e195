//! Names of the extended attributes in an image.

use std::{collections::BTreeSet, ops::ControlFlow};

use lazuli_image::{erofs::Xattr, rafs::Bootstrap};

use crate::image::walk;

/// The attributes that hold ACLs.
pub(super) const ACLS: [&[u8]; 2] = [b"system.posix_acl_access", b"system.posix_acl_default"];

/// The names of an image's extended attributes that matter to the system: ACLs, labels,
/// capabilities. `None` when they are unknown. Other attributes are only noted.
#[derive(Debug, Default)]
pub(super) struct XattrNames {
    system: Option<BTreeSet<Vec<u8>>>,
    others: bool,
}

impl XattrNames {
    /// Maximum number of names, more than any system knows.
    const MOST: usize = 64;

    /// Collects the names of every inode.
    pub(super) fn of<B: AsRef<[u8]>>(bootstrap: &Bootstrap<B>) -> Self {
        let mut names = XattrNames { system: Some(BTreeSet::new()), others: false };
        let mut add = |nid| match bootstrap.inode(nid) {
            Ok(inode) if inode.xattr_size() == 0 => ControlFlow::Continue(()),
            _ => match bootstrap.xattrs(nid) {
                Ok(attributes) => names.add(attributes),
                // A damaged inode may have had some.
                Err(_) => ControlFlow::Break(()),
            },
        };
        let ended = match add(bootstrap.root()) {
            ControlFlow::Continue(()) => walk(bootstrap, (), |(), entry| add(entry.nid)),
            ControlFlow::Break(()) => Some(()),
        };
        if ended.is_some() { XattrNames::default() } else { names }
    }

    fn add(&mut self, attributes: Vec<Xattr<'_>>) -> ControlFlow<()> {
        let Some(system) = &mut self.system else { return ControlFlow::Break(()) };
        for (name, _) in attributes {
            if !is_system(&name) {
                self.others = true;
            } else if system.insert(name) && system.len() > Self::MOST {
                return ControlFlow::Break(());
            }
        }
        ControlFlow::Continue(())
    }

    /// Returns whether no inode has any attribute.
    pub(super) fn is_empty(&self) -> bool {
        !self.others && self.system.as_ref().is_some_and(BTreeSet::is_empty)
    }

    /// Returns whether no inode has this attribute, which must be one of the system's.
    pub(super) fn lack(&self, name: &[u8]) -> bool {
        self.system.as_ref().is_some_and(|system| is_system(name) && !system.contains(name))
    }
}

fn is_system(name: &[u8]) -> bool {
    name.starts_with(b"system.") || name.starts_with(b"security.")
}
