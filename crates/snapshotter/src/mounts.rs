//! What containerd has to mount to see a snapshot.

use std::path::Path;

use crate::{
    api::types::Mount,
    directories::Directories,
    store::{Kind, Snapshot},
};

/// The mount of the first of `chain`, on top of the others.
pub(crate) fn of(chain: &[Snapshot], directories: &Directories) -> Vec<Mount> {
    let [snapshot, parents @ ..] = chain else { return Vec::new() };
    // An image's mount shows all of the layers below it.
    let below = parents.iter().position(|parent| parent.image.is_some());
    let parents = &parents[..below.map_or(parents.len(), |image| image + 1)];
    let fs = |snapshot: &Snapshot| text(&directories.fs(snapshot.number));
    let writable = snapshot.kind == Kind::Active;
    let mount = match (writable, parents) {
        (_, []) => bind(fs(snapshot), writable),
        (false, [parent]) => bind(fs(parent), false),
        _ => {
            // Without `index`, a directory can be an upper one again after a crash that left its work behind.
            let mut options = Vec::new();
            if Path::new("/sys/module/overlay/parameters/index").exists() {
                options.push("index=off".to_owned());
            }
            if writable {
                options.push(format!("workdir={}", text(&directories.work(snapshot.number))));
                options.push(format!("upperdir={}", fs(snapshot)));
            }
            let lowers: Vec<_> = parents.iter().map(fs).collect();
            options.push(format!("lowerdir={}", lowers.join(":")));
            mount("overlay", "overlay".to_owned(), options)
        }
    };
    vec![mount]
}

fn bind(source: String, writable: bool) -> Mount {
    let access = if writable { "rw" } else { "ro" };
    mount("bind", source, vec![access.to_owned(), "rbind".to_owned()])
}

fn mount(kind: &str, source: String, options: Vec<String>) -> Mount {
    Mount { r#type: kind.to_owned(), source, target: String::new(), options }
}

fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}
