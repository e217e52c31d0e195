//! Command-line arguments that name images and sources.

use anyhow::Result;
use clap::Args;
use lazuli_registry::{ImageName, Options, Platform};

use crate::config::Config;

/// How a registry is reached and which image of a list is meant.
#[derive(Debug, Args)]
pub(crate) struct Access {
    /// Which image of a manifest list: os/arch[/variant] [default: this machine's]
    #[arg(long, value_name = "PLATFORM")]
    pub(crate) platform: Option<String>,
    /// Talk HTTP to the registry; loopback addresses always do
    #[arg(long)]
    pub(crate) plain_http: bool,
}

impl Access {
    /// `--platform`, parsed. Lazy images are the most common request.
    pub(crate) fn platform(&self) -> Result<Option<Platform>> {
        let platform: Option<Platform> = self.platform.as_deref().map(str::parse).transpose()?;
        Ok(platform.map(Platform::lazy))
    }

    /// The options of the registry crate.
    pub(crate) fn options(&self, config: &Config) -> Result<Options> {
        Ok(Options { plain_http: self.plain_http, ..config.registries()? })
    }
}

/// An image name with the same meaning in the daemon, whose working directory differs.
pub(crate) fn absolute_image(text: &str) -> Result<String> {
    let mut name = text.parse::<ImageName>()?;
    if let ImageName::Layout(layout) = &mut name {
        layout.directory = std::path::absolute(&layout.directory)?;
    }
    Ok(name.to_string())
}
