//! All unsafe code and raw kernel interfaces: fanotify, loop devices and the device mapper, mapped
//! and inherited memory and descriptors.
//!
//! Every other crate of the workspace denies unsafe code. This crate stays as thin as the kernel's
//! interfaces allow: owned descriptors in and out, no policy, and no parsing of anything but the
//! kernel's own output. [`path_error`] adds paths to the errors of the operating system.
#![allow(unsafe_code)]

pub mod device_mapper;
pub mod fanotify;
pub mod heap;
pub mod inherit;
pub mod limit;
pub mod loop_device;
pub mod mmap;
pub mod mount;
pub mod mountinfo;
pub mod path_error;
pub mod resident;
pub mod shared;
