//! The lazuli command.
fn main() {}
