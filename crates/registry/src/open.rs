//! Opening images by their names.

use std::sync::Arc;

use crate::{
    error::{HostsError, RegistryError},
    name::ImageName,
    place::{bundled::Bundled, layout::Layout, mirrored::Mirrored, remote::Registry},
    repository::Repository,
    route::{
        options::Options,
        server::{Capabilities, Server},
    },
};

/// How an image is reached. Two routes are equal until containerd's registry configuration changes,
/// which can be at any time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Route(Result<Vec<Server>, HostsError>);

impl Route {
    /// The current route to the image `name`.
    pub fn to(name: &ImageName, options: &Options) -> Self {
        Route(match name {
            ImageName::Registry(reference) => options.servers(reference),
            ImageName::Layout(_) => Ok(Vec::new()),
        })
    }

    /// Opens the image. Nothing is asked yet.
    ///
    /// # Errors
    /// [`RegistryError::Hosts`] if containerd's configuration of the registry is invalid: a file
    /// may be half written at this moment, so images in use keep the route that they have. Others
    /// if no HTTP client can be made.
    pub fn open(
        self,
        name: &ImageName,
        options: &Options,
    ) -> Result<Arc<dyn Repository>, RegistryError> {
        let reference = match name {
            ImageName::Registry(reference) => reference,
            ImageName::Layout(layout) => return Ok(Arc::new(Layout::open(layout.clone()))),
        };
        let mut servers = self.0?;
        let registry: Arc<dyn Repository> =
            if servers.len() == 1 && servers[0].may == Capabilities::ALL {
                Arc::new(Registry::at(reference.clone(), servers.remove(0), options)?)
            } else {
                Arc::new(Mirrored::open(reference, servers, options)?)
            };
        let bundled = options.bundle.as_ref();
        let bundled = bundled.and_then(|bundle| Layout::in_bundle(bundle, reference));
        Ok(match bundled {
            Some(layout) => Arc::new(Bundled::new(registry, layout, reference)),
            None => registry,
        })
    }
}

/// Opens the place that `name` names. Nothing is asked yet, and no directory made.
///
/// # Errors
/// Those of [`Route::open`].
pub fn open(name: &ImageName, options: &Options) -> Result<Arc<dyn Repository>, RegistryError> {
    Route::to(name, options).open(name, options)
}

/// Opens the image `name` through the peer-to-peer daemon alone, if there is one.
///
/// # Errors
/// If no HTTP client can be made, or containerd's configuration of the registry is invalid.
pub fn open_shared(
    name: &ImageName,
    options: &Options,
) -> Result<Option<Arc<dyn Repository>>, RegistryError> {
    let ImageName::Registry(reference) = name else { return Ok(None) };
    let shared = options.servers(reference)?.into_iter().find(|server| server.peer.is_some());
    let open = |server| Registry::at(reference.clone(), server, options);
    Ok(shared.map(open).transpose()?.map(|shared| Arc::new(shared) as Arc<dyn Repository>))
}
