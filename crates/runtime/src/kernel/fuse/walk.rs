//! Walks through the names of an image.

use std::ops::ControlFlow;

use lazuli_image::{
    erofs::{self, FileType, Nid, layout::Dirent},
    rafs::Bootstrap,
};

/// The name of `file` for a log line. Requests do not carry it.
pub(super) fn path_of<B: AsRef<[u8]>>(bootstrap: &Bootstrap<B>, file: Nid) -> String {
    let found = walk(bootstrap, String::new(), |parent, entry| {
        let path = format!("{parent}/{}", entry.name.escape_ascii());
        if entry.nid == file { ControlFlow::Break(path) } else { ControlFlow::Continue(path) }
    });
    found.unwrap_or_else(|| file.to_string())
}

/// Visits every name in the image until `visit` breaks. What `visit` continues with for a directory
/// it gets again with each name in that directory. Skips what is damaged.
pub(super) fn walk<B: AsRef<[u8]>, T, R>(
    bootstrap: &Bootstrap<B>,
    root: T,
    mut visit: impl FnMut(&T, &erofs::DirEntry<'_>) -> ControlFlow<R, T>,
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
