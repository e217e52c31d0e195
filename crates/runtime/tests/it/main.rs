//! Integration tests of the runtime, in one binary.

mod disk;
mod fanotify;
mod frozen;
mod loops;
mod pull;
mod sample;
