//! How the kernel gets to the bytes of an image.
//!
//! Every driver asks [`CachedBlob::ensure`](crate::CachedBlob::ensure), and has the same rooms:
//!
//! | room | what it has | fanotify | blobfs | fuse |
//! |---|---|---|---|---|
//! | `mod` | what the driver is, needs and promises | ✓ | ✓ | ✓ |
//! | `abi` | bytes of the kernel interface, pure | ✓ | ✓ | `fuse-backend-rs` |
//! | `probe` | whether it works here, found out by trying | ✓ | ✓ | ✓ |
//! | `session` | what lives as long as the process, and what a successor gets | ✓ | ✓ | ✓ |
//! | `journal` | questions without an answer, for the successor | ✓ | of fuse | ✓ |
//! | `mount` | one image, mounted | ✓ | ✓ | ✓ |
//! | `answer` | what the kernel is told | ✓ | ✓ | ✓ |
//! | the rest | what this interface has and others have not | `groups`, `listener`, `slots`, `watch` | `disk`, `helper` | `connection`, `filesystem`, `threads` |

pub mod blobfs;
pub mod errno;
pub mod fanotify;
pub mod fuse;
pub mod mount;
pub mod pages;
pub mod probe;
mod release;
pub(crate) mod threads;
mod tiny_image;

pub use probe::Probe;
