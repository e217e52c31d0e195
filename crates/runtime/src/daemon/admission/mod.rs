//! From the name in a request to an image that may run: resolve, fetch its metadata once, ask the
//! policy.

pub(super) mod checked;
pub(super) mod expected;
pub(super) mod fetch_locks;
pub(super) mod logins;
pub(super) mod pins;
pub(super) mod policy;
pub(super) mod recent;
pub(super) mod resolve;
pub(super) mod stated;

use std::{path::Path, sync::Arc};

use checked::Checked;
use expected::Expected;
use fetch_locks::FetchLocks;
use lazuli_policy::Gate;
use lazuli_registry::Options;
use lazuli_sys::path_error::At as _;
use logins::Logins;
use pins::Pins;
use recent::Recent;

use super::{DaemonError, Settings, api::MountRequest};

/// What admission goes by, and what is on its way through it.
#[derive(Debug)]
pub(super) struct Admission {
    pub(super) registry: Options,
    pub(super) gate: Arc<Gate>,
    pub(super) logins: Logins,
    pub(super) fetch_locks: FetchLocks,
    pub(super) recent: Recent,
    pub(super) checked: Checked,
    pub(super) expected: Expected,
    pub(super) pins: Arc<Pins>,
}

impl Admission {
    /// Opens what is kept in `root`: pull secrets, and verdicts of the policy.
    pub(super) fn open(root: &Path, settings: &Settings) -> Result<Self, DaemonError> {
        let logins = root.join("logins");
        let logins = Logins::open(&logins, &settings.registry.keyring).at(&logins)?;
        Ok(Admission {
            registry: settings.registry.clone(),
            gate: Arc::new(Gate::new(settings.policy.clone(), Some(root.join("verdicts")))),
            logins,
            fetch_locks: FetchLocks::default(),
            recent: Recent::default(),
            checked: Checked::default(),
            expected: Expected::default(),
            pins: Arc::default(),
        })
    }

    /// How the registry of an image is reached.
    pub(super) fn options(&self, request: &MountRequest) -> Options {
        Options { plain_http: request.plain_http, ..self.registry.clone() }
    }
}
