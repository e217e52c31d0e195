//! The driver `ext4`: ext4 whose metadata are made on the node, on the disks of the driver `loop`.
//!
//! For kernels that mount no EROFS from several devices: those before Linux 5.16, and those built
//! without EROFS. Needs ext4, the device mapper, and what the driver `loop` needs.
//!
//! ```text
//! ext4 ── joined disk ─┬─ loop device ── names, attributes and extents, made from the bootstrap
//!                      └─ loop device of each blob, as in the driver `loop`
//! ```
//!
//! The promises are those of the driver `loop`, and so is everything behind the disks: files of the
//! daemon while data arrives, files of the cache when a blob is complete. The joined disk goes with
//! the last mount, and releases the loop devices.

mod mount;
pub mod probe;

pub use self::mount::mount;
