//! Descriptors by name.

use std::{
    io,
    os::fd::{AsFd as _, BorrowedFd, OwnedFd},
};

use super::wire::{Channel, Kind};

/// Open descriptors, each under a name, in the order in which they came.
#[derive(Debug, Default)]
pub struct Descriptors(Vec<(String, OwnedFd)>);

impl Descriptors {
    /// Adds a descriptor, replacing one of the same name.
    pub fn insert(&mut self, name: String, descriptor: OwnedFd) {
        match self.0.iter_mut().find(|(known, _)| *known == name) {
            Some((_, known)) => *known = descriptor,
            None => self.0.push((name, descriptor)),
        }
    }

    /// Takes a descriptor out.
    pub fn remove(&mut self, name: &str) -> Option<OwnedFd> {
        let at = self.0.iter().position(|(known, _)| known == name)?;
        Some(self.0.remove(at).1)
    }

    /// Removes and returns all descriptors whose names begin with `prefix`.
    pub fn remove_all(&mut self, prefix: &str) -> Vec<(String, OwnedFd)> {
        let all = std::mem::take(&mut self.0);
        let (found, rest) = all.into_iter().partition(|(name, _)| name.starts_with(prefix));
        self.0 = rest;
        found
    }

    /// The descriptor of this name.
    pub fn get(&self, name: &str) -> Option<BorrowedFd<'_>> {
        self.iter().find(|(known, _)| *known == name).map(|(_, descriptor)| descriptor)
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = (&str, BorrowedFd<'_>)> {
        self.0.iter().map(|(name, descriptor)| (name.as_str(), descriptor.as_fd()))
    }

    /// Sends copies of all of them.
    pub(super) fn send(&self, to: &Channel) -> io::Result<()> {
        self.iter().try_for_each(|(name, fd)| to.send(Kind::Descriptor, name, Some(fd)))
    }
}
