//! Integration tests of the runtime, in one binary.

mod disk;
mod fanotify;
mod pull;
mod sample;
