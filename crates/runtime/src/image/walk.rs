//! Every name in an image.

use std::ops::ControlFlow;

use lazuli_image::{
    erofs::{DirEntry, FileType, layout::Dirent},
    rafs::Bootstrap,
};

/// Visits every name but the root's, with the value that the visit of its directory returned, until
/// a visit ends the walk. Skips damaged directories, and cuts endless trees.
pub(crate) fn walk<B: AsRef<[u8]>, T, R>(
    bootstrap: &Bootstrap<B>,
    root: T,
    mut visit: impl FnMut(&T, &DirEntry<'_>) -> ControlFlow<R, T>,
) -> Option<R> {
    // Entries of sound directories do not overlap, so no more of them than this fit in the image.
    let mut budget = bootstrap.bytes().len() / size_of::<Dirent>();
    let mut pending = vec![(bootstrap.root(), root)];
    while let Some((dir, above)) = pending.pop() {
        for entry in bootstrap.read_dir(dir, 0).into_iter().flatten().flatten() {
            if entry.is_dot() || budget == 0 {
                continue;
            }
            budget -= 1;
            match visit(&above, &entry) {
                ControlFlow::Break(result) => return Some(result),
                ControlFlow::Continue(below) if entry.file_type == FileType::Directory => {
                    pending.push((entry.nid, below));
                }
                ControlFlow::Continue(_) => {}
            }
        }
    }
    None
}
