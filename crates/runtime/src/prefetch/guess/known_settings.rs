//! What is known of the settings of one image's programs.

use std::collections::{HashMap, HashSet};

use super::paths::Found;

/// What the settings of one image are known to say.
#[derive(Debug, Default)]
pub(super) struct Settings {
    /// Programs, files with settings, and directories with plug-ins that were looked at.
    pub(super) seen: HashSet<Vec<u8>>,
    /// Directories with plug-ins, to be listed as soon as there are settings.
    pub(super) unlisted: Vec<Vec<u8>>,
    /// Directories and patterns of settings that were listed.
    pub(super) listed: HashSet<Vec<u8>>,
    pub(super) words: HashSet<Vec<u8>>,
    /// Plug-ins by the words that mean them.
    pub(super) plugins: HashMap<Vec<u8>, Vec<Found>>,
    /// Plug-ins that are scripts, and words that may name modules, which were not followed.
    pub(super) scripts: Vec<Found>,
    pub(super) names: Vec<Vec<u8>>,
    /// Directories in which programs have directories of plug-ins.
    pub(super) places: Option<Vec<Vec<u8>>>,
    /// Data of programs, which may be read.
    pub(super) data: Vec<Found>,
    /// Bytes of settings that were read, and of data.
    pub(super) bytes: u64,
    pub(super) data_bytes: u64,
    /// Steps of the look-ups that settings have taken.
    pub(super) look_ups: u32,
}
