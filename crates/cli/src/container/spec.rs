//! An image's config as an OCI runtime bundle config.
//!
//! The container is confined like one of `docker run`. Unlike there, it has the host's network or
//! none, since Lazuli starts containers but doesn't manage networks.

use std::{ffi::OsString, path::Path};

use anyhow::{Context, Result, bail};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{
    confine::{self, Isolation},
    user::User,
};

/// The process in an image config. Its other fields are not used here.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub(crate) struct ImageProcess {
    user: Option<String>,
    env: Option<Vec<String>>,
    entrypoint: Option<Vec<String>>,
    cmd: Option<Vec<String>>,
    working_dir: Option<String>,
}

const DEFAULT_PATH: &str = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

impl ImageProcess {
    /// Reads the `config` member of an image config.
    pub(crate) fn from_config(config: &Value) -> Result<Self> {
        match config.get("config").filter(|value| !value.is_null()) {
            Some(value) => {
                Self::deserialize(value).context("the image's config is not an OCI image config")
            }
            None => Ok(Self::default()),
        }
    }

    /// The user as the image spells it; empty for root.
    pub(crate) fn user(&self) -> &str {
        self.user.as_deref().unwrap_or_default()
    }

    /// Entry point and arguments; `command` replaces the image's arguments as in `docker run`.
    pub(crate) fn arguments(&self, command: &[OsString]) -> Result<Vec<String>> {
        let mut arguments = self.entrypoint.clone().unwrap_or_default();
        if command.is_empty() {
            arguments.extend(self.cmd.clone().unwrap_or_default());
        } else {
            for argument in command {
                let text = argument.to_str().with_context(|| {
                    format!("the argument {argument:?} is not UTF-8, which runc needs")
                })?;
                arguments.push(text.to_owned());
            }
        }
        if arguments.is_empty() {
            bail!("the image names no command: say one, as in `lazuli run IMAGE -- /bin/sh`");
        }
        Ok(arguments)
    }

    /// The process's working directory; docker resolves relative directories from the root.
    pub(crate) fn working_directory(&self) -> String {
        format!("/{}", self.working_dir.as_deref().unwrap_or_default().trim_start_matches('/'))
    }

    /// The directories that are searched for a command without a slash.
    pub(crate) fn search_path(&self) -> String {
        let own = self.env.iter().flatten().find(|entry| entry.starts_with("PATH="));
        own.map_or(DEFAULT_PATH, String::as_str)["PATH=".len()..].to_owned()
    }

    fn environment(&self, hostname: &str, home: &str, stdio: Stdio) -> Vec<String> {
        let mut environment = self.env.clone().unwrap_or_default();
        let mut default = |entry: String| {
            let (name, _) = entry.split_once('=').unwrap_or((&entry, ""));
            let set = |e: &String| e.split_once('=').is_some_and(|(key, _)| key == name);
            if !environment.iter().any(set) {
                environment.push(entry);
            }
        };
        default(DEFAULT_PATH.to_owned());
        default(format!("HOSTNAME={hostname}"));
        default(format!("HOME={home}"));
        if stdio == Stdio::Terminal {
            default("TERM=xterm".to_owned());
        }
        environment
    }
}

/// What the container's standard streams are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stdio {
    /// A terminal of its own.
    Terminal,
    /// Those of this process.
    Inherited,
}

/// The bundle's `config.json` for a container `id` on `rootfs`.
pub(crate) fn bundle_config(
    id: &str,
    rootfs: &Path,
    image: &ImageProcess,
    user: &User,
    arguments: &[String],
    stdio: Stdio,
    isolation: Isolation,
) -> Value {
    let mount = |destination: &str, kind: &str, options: &[&str]| -> Value {
        json!({ "destination": destination, "type": kind, "source": kind, "options": options })
    };
    let mut mounts = vec![
        mount("/proc", "proc", &["nosuid", "noexec", "nodev"]),
        mount("/dev", "tmpfs", &["nosuid", "strictatime", "mode=755", "size=65536k"]),
        mount(
            "/dev/pts",
            "devpts",
            &["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"],
        ),
        mount("/dev/shm", "tmpfs", &["nosuid", "noexec", "nodev", "mode=1777", "size=65536k"]),
        mount("/dev/mqueue", "mqueue", &["nosuid", "noexec", "nodev"]),
        mount("/sys", "sysfs", &["nosuid", "noexec", "nodev", "ro"]),
        // Shows the container's own control group, of either version: programs read their limits
        // there.
        mount("/sys/fs/cgroup", "cgroup", &["nosuid", "noexec", "nodev", "relatime", "ro"]),
    ];
    // The host's names. Without a network only `localhost` leads anywhere.
    for file in ["/etc/resolv.conf", "/etc/hosts"] {
        if Path::new(file).exists() {
            mounts.push(json!({
                "destination": file, "type": "bind", "source": file,
                "options": ["rbind", "ro"],
            }));
        }
    }
    let cgroup = format!("/lazuli/{id}");
    json!({
        "ociVersion": "1.0.2",
        "process": {
            "terminal": stdio == Stdio::Terminal,
            "user": { "uid": user.uid, "gid": user.gid, "additionalGids": user.groups },
            "args": arguments,
            "env": image.environment(id, &user.home, stdio),
            "cwd": image.working_directory(),
            "capabilities": confine::capabilities(),
            "noNewPrivileges": false,
        },
        "root": { "path": rootfs, "readonly": false },
        "hostname": id,
        "mounts": mounts,
        "linux": confine::linux(&cgroup, isolation),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(config: Value) -> ImageProcess {
        ImageProcess::from_config(&json!({ "config": config })).unwrap()
    }

    #[test]
    fn arguments_replace_the_command_but_not_the_entrypoint() {
        let image = process(json!({ "Entrypoint": ["/entry"], "Cmd": ["a", "b"] }));
        assert_eq!(image.arguments(&[]).unwrap(), ["/entry", "a", "b"]);
        assert_eq!(image.arguments(&["c".into()]).unwrap(), ["/entry", "c"]);
        let image = process(json!({ "Cmd": ["sh"], "Entrypoint": null }));
        assert_eq!(image.arguments(&["ls".into()]).unwrap(), ["ls"]);
        assert!(process(json!({})).arguments(&[]).is_err());
    }

    #[test]
    fn environment_has_what_programs_rely_on() {
        let image = process(json!({ "Env": ["PATH=/x", "LANG=C"] }));
        let expected = ["PATH=/x", "LANG=C", "HOSTNAME=me", "HOME=/root"];
        assert_eq!(image.environment("me", "/root", Stdio::Inherited), expected);
        assert_eq!(image.search_path(), "/x");
        let image = process(json!({ "WorkingDir": "app" }));
        let expected = [DEFAULT_PATH, "HOSTNAME=me", "HOME=/", "TERM=xterm"];
        assert_eq!(image.environment("me", "/", Stdio::Terminal), expected);
        assert_eq!(image.working_directory(), "/app");
    }

    #[test]
    fn a_missing_config_is_an_empty_one() {
        let image = ImageProcess::from_config(&json!({ "config": null })).unwrap();
        assert_eq!(image.user(), "");
        assert!(ImageProcess::from_config(&json!({ "config": { "Cmd": 1 } })).is_err());
    }
}
