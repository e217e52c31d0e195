//! Integration tests of the runtime, in one binary.

mod disk;
mod fanotify;
mod frozen;
mod loop_devices;
mod pull;
mod sample;
