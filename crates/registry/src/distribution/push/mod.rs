//! Uploads to a registry: blobs, then the manifests that name them.

mod manifests;
mod uploads;

pub(crate) use self::{
    manifests::{document, manifest, put},
    uploads::{blob, growing},
};
