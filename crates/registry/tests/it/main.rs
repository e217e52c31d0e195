//! Names, layouts and registries, checked from outside.

mod archive;
mod bundled;
mod conformance;
mod distance;
mod dragonfly;
mod faults;
mod growing;
mod hosts;
mod login;
mod mirrors;
mod names;
mod prepare;
mod real;
mod referrers;
mod small;
mod support;
