use std::{
    ffi::{OsStr, OsString},
    io::Read as _,
    path::Path,
    process::ExitCode,
    sync::Arc,
};

use anyhow::{Context, Result, bail};
use clap::Args;
use lazuli_image::{Digest, oci::Descriptor};
use lazuli_policy::{DESCRIPTOR, Gate, Question};
use lazuli_registry::ImageName;

use crate::{Session, image_args};

/// Check whether an image may run by the policy of this node
///
/// The exit code is 0 if it may; the reason is printed. containerd asks in this way before it
/// pulls, with options that have one dash and a descriptor on standard input, if a link to this
/// program with the name `lazuli-verify-image` is in the `bin_dir` of its plugin
/// io.containerd.image-verifier.v1.bindir.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// The name that was asked for
    #[arg(long, value_name = "IMAGE")]
    name: String,
    /// The digest of the manifest or index to which it was resolved
    #[arg(long)]
    digest: Digest,
    /// Type of the descriptor on standard input, which must have that digest [default: standard
    /// input is not read]
    #[arg(long, value_name = "TYPE")]
    stdin_media_type: Option<String>,
    #[command(flatten)]
    access: image_args::Access,
}

/// Maximum size of a descriptor, in bytes. They have some hundred, with annotations a few thousand.
const DESCRIPTOR_LIMIT: u64 = 64 << 10;

/// Command lines of containerd: the verb is in the program's name, and options have one dash.
pub(crate) fn translated(arguments: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut arguments: Vec<OsString> = arguments.collect();
    let program = arguments.first().map(Path::new).and_then(Path::file_name);
    if program == Some(OsStr::new("lazuli-verify-image")) {
        arguments.insert(1, "verify-image".into());
    }
    if !arguments.iter().any(|argument| argument == "verify-image") {
        return arguments;
    }
    for argument in &mut arguments {
        if let Some(name @ ("-name" | "-digest" | "-stdin-media-type")) = argument.to_str() {
            *argument = format!("-{name}").into();
        }
    }
    arguments
}

pub(crate) fn run(session: &Session, arguments: &Arguments) -> Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    // containerd shows standard output to its users.
    match runtime.block_on(verify(session, arguments)) {
        Ok(reason) => {
            println!("{reason}");
            Ok(ExitCode::SUCCESS)
        }
        Err(error) => {
            println!("{error:#}");
            Ok(ExitCode::FAILURE)
        }
    }
}

async fn verify(session: &Session, arguments: &Arguments) -> Result<String> {
    let descriptor = match &arguments.stdin_media_type {
        Some(kind) => descriptor(kind, &arguments.digest)?,
        None => lazuli_policy::manifest_descriptor(arguments.digest),
    };
    let gate = Arc::new(Gate::new(session.config.policy.clone(), None));
    if gate.policy()?.is_none() {
        bail!("there is no policy: expected {}", lazuli_policy::DEFAULT_PATH);
    }
    let name: ImageName = arguments.name.parse()?;
    let options = arguments.access.options(&session.config)?;
    let verified = gate.admit(Question::resolved(&name, descriptor, &options)).await?;
    Ok(verified.to_string())
}

/// The descriptor on standard input.
fn descriptor(kind: &str, digest: &Digest) -> Result<Descriptor> {
    if kind != DESCRIPTOR {
        bail!("standard input has {kind}, expected {DESCRIPTOR}");
    }
    let mut json = Vec::new();
    std::io::stdin().take(DESCRIPTOR_LIMIT).read_to_end(&mut json)?;
    let descriptor: Descriptor =
        serde_json::from_slice(&json).context("standard input has no descriptor")?;
    if descriptor.digest != *digest {
        bail!("standard input has the descriptor of {}, expected {digest}", descriptor.digest);
    }
    Ok(descriptor)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn containerd_s_command_lines_are_understood() {
        let words = |line: &str| line.split(' ').map(OsString::from).collect::<Vec<_>>();
        for (given, expected) in [
            (
                "/opt/bin/lazuli-verify-image -name r/a:1 -digest d -stdin-media-type t",
                "/opt/bin/lazuli-verify-image verify-image --name r/a:1 --digest d --stdin-media-type t",
            ),
            ("lazuli verify-image -name a", "lazuli verify-image --name a"),
            ("lazuli mount -name a", "lazuli mount -name a"),
        ] {
            assert_eq!(translated(words(given).into_iter()), words(expected));
        }
    }
}
