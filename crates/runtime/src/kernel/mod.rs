//! The kernel drivers.
//!
//! Every driver asks [`CachedBlob::ensure`](crate::CachedBlob::ensure), and has the same files:
//!
//! | file | content | fanotify | loop_devices | fuse |
//! |---|---|---|---|---|
//! | `mod` | the driver, its needs and promises | ✓ | ✓ | ✓ |
//! | `abi` | bytes of the kernel interface, pure | ✓ | ✓ | `fuse-backend-rs` |
//! | `probe` | a trial with a real mount | ✓ | ✓ | ✓ |
//! | `session` | state of the process, and its handover to a successor | ✓ | ✓ | ✓ |
//! | `journal` | unanswered questions, for the successor | ✓ | of fuse | ✓ |
//! | `mount` | one image, mounted | ✓ | ✓ | ✓ |
//! | `answer` | answers to the kernel | ✓ | ✓ | ✓ |
//!
//! `ext4` has `mod`, `probe` and `mount`; the rest is that of `loop_devices`.
//!
//! Other files serve one interface alone, such as `groups` and `slots` for fanotify, `disk` and
//! `helper` for loop devices, `connection` and `threads` for FUSE. `disks` is another file system
//! for FUSE, whose reader is the kernel of a virtual machine. `layer_store` is one by which clients
//! find layers, and shows no content itself.

pub mod disks;
pub mod errno;
pub mod ext4;
pub mod fanotify;
pub mod fuse;
pub mod layer_store;
pub mod loop_devices;
pub mod mount;
pub mod pages;
pub mod probe;
mod release;
pub(crate) mod threads;
mod tiny_image;

pub use probe::Probe;
