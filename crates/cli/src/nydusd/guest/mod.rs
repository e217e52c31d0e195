//! Files for one virtual machine, over virtio-fs: images of this node and directories of the host,
//! each at a place of its own.
//!
//! ```text
//! guest ─ virtqueue ─▶ device ─▶ share ┬ /containers            a directory of the host, writable
//!           vhost-user                 └ /rafs/NAME/lowerdir    an image, mounted on the host
//! ```

mod device;
mod scratch;
mod share;

pub(super) use self::{
    device::Socket,
    scratch::{Scratch, sweep},
    share::{Changes, Share},
};
