//! The `[convert]` table.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, Result, anyhow, bail};
use lazuli_registry::Reference;
use serde::Deserialize;

use super::check;
use crate::serve_convert::{Form, Repositories, RepositorySync, Settings, is_registry};

/// The `[convert]` table, of `lazuli serve-convert`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Convert {
    /// The address to receive events at: an IP address with a port, or the path of a Unix socket.
    listen: String,
    /// Has the secret that the registry shows.
    secret_file: PathBuf,
    /// The registry whose events are received, as images name it.
    registry: String,
    /// Patterns of the repositories whose images are made lazy.
    repositories: Vec<String>,
    /// Repositories that follow those of other registries.
    sync: Vec<SyncTable>,
    /// The form that they get.
    form: Form,
    /// The private key for statements and signatures.
    sign: Option<PathBuf>,
    /// The queue, and scratch files.
    directory: Option<PathBuf>,
    /// How many jobs are run at a time.
    jobs: u64,
    /// Time limit for a job.
    deadline_seconds: u64,
}

/// A table `[[convert.sync]]`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct SyncTable {
    /// The repository that is followed, with its registry.
    from: String,
    /// The repository that follows it, without the registry.
    to: String,
    /// Patterns of tags.
    tags: Vec<String>,
    /// Time between two looks.
    #[serde(default = "six_hours")]
    every_seconds: u64,
}

fn six_hours() -> u64 {
    21_600
}

impl SyncTable {
    fn settings(&self, place: &str) -> Result<RepositorySync> {
        let SyncTable { from, to, tags, every_seconds } = self;
        // A name with a tag of its own is no name with another one.
        let parsed = format!("{from}:tag").parse::<Reference>();
        if !parsed.is_ok_and(|name| format!("{}/{}", name.registry(), name.repository()) == *from) {
            bail!(
                "{place}.from is `{from}`, expected a repository with its registry and without a \
                 tag, as in docker.io/library/redis"
            );
        }
        let parsed = format!("r.example/{to}:tag").parse::<Reference>();
        if !parsed.is_ok_and(|name| name.repository() == to) {
            bail!(
                "{place}.to is `{to}`, expected a repository without its registry and tag, as in \
                 library/redis"
            );
        }
        let is_pattern = |tag: &String| {
            format!("r.example/x:{}", tag.replace('*', "x")).parse::<Reference>().is_ok()
        };
        if let Some(wrong) = tags.iter().find(|tag| !is_pattern(tag)) {
            bail!("{place}.tags has `{wrong}`, expected tags, in which `*` stands for any letters");
        }
        if tags.is_empty() {
            bail!("{place}.tags is empty, expected tags as in [\"7.*\", \"latest\"]");
        }
        check(&format!("{place}.every_seconds"), Some(*every_seconds), 60..=31_536_000)?;
        let every = Duration::from_secs(*every_seconds);
        Ok(RepositorySync { from: from.clone(), to: to.clone(), tags: tags.clone(), every })
    }
}

impl Default for Convert {
    fn default() -> Self {
        Convert {
            listen: "127.0.0.1:8085".to_owned(),
            secret_file: PathBuf::new(),
            registry: String::new(),
            repositories: Vec::new(),
            sync: Vec::new(),
            form: Form::Index,
            sign: None,
            directory: None,
            jobs: 1,
            deadline_seconds: 3600,
        }
    }
}

impl Convert {
    pub(super) fn check(&self) -> Result<()> {
        self.settings(Path::new("/")).map(drop)
    }

    /// The settings; `root` is the state directory.
    pub(crate) fn settings(&self, root: &Path) -> Result<Settings> {
        let absolute = |key: &str, path: &Path| match path.is_absolute() {
            true => Ok(path.to_owned()),
            false => bail!("{key} is `{}`, expected an absolute path", path.display()),
        };
        if !is_registry(&self.registry) {
            bail!(
                "convert.registry is `{}`, expected the host of the registry as images name it, as in \
                 registry.example:5000",
                self.registry
            );
        }
        if self.repositories.is_empty() && self.sync.is_empty() {
            bail!("convert.repositories is empty, expected patterns as in [\"team/*\"]");
        }
        let repositories = Repositories::parse(&self.repositories);
        let repositories = repositories
            .map_err(|(number, error)| anyhow!("convert.repositories[{number}] is {error}"))?;
        let syncs = self.sync.iter().enumerate();
        let syncs = syncs.map(|(number, sync)| {
            let place = format!("convert.sync[{number}]");
            match self.sync[..number].iter().any(|earlier| earlier.to == sync.to) {
                true => bail!("{place}.to is `{}`, as in an earlier table", sync.to),
                false => sync.settings(&place),
            }
        });
        check("convert.jobs", Some(self.jobs), 1..=64)?;
        check("convert.deadline_seconds", Some(self.deadline_seconds), 1..=86_400)?;
        let sign = self.sign.as_deref().map(|key| absolute("convert.sign", key)).transpose()?;
        let directory = self.directory.as_deref();
        let directory = directory.map(|path| absolute("convert.directory", path)).transpose()?;
        Ok(Settings {
            listen: self.listen.parse().context("convert.listen")?,
            secret_file: absolute("convert.secret_file", &self.secret_file)?,
            registry: self.registry.clone(),
            repositories,
            syncs: syncs.collect::<Result<_>>()?,
            form: self.form,
            sign,
            directory: directory.unwrap_or_else(|| root.join("convert")),
            jobs: usize::try_from(self.jobs)?,
            deadline: Duration::from_secs(self.deadline_seconds),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    #[test]
    fn keys_are_named_with_what_is_expected() {
        let convert = |more: &str| {
            let text = format!(
                "[convert]\nsecret_file = '/s'\nregistry = 'r.example:5000'\nrepositories = ['a/*']\n{more}\n"
            );
            toml::from_str::<Config>(&text).map(|config| config.convert.unwrap())
        };
        let settings = convert("").unwrap().settings(Path::new("/state")).unwrap();
        assert_eq!(settings.directory, Path::new("/state/convert"));
        assert_eq!((settings.form, settings.jobs), (Form::Index, 1));
        assert_eq!(settings.deadline, Duration::from_secs(3600));
        assert_eq!(settings.listen.to_string(), "127.0.0.1:8085");
        assert_eq!(
            convert("form = 'both'").unwrap().settings(Path::new("/")).unwrap().form,
            Form::Both
        );
        for (text, expected) in [
            ("listen = 'nowhere'", "convert.listen"),
            ("sign = 'key'", "convert.sign is `key`, expected an absolute path"),
            ("directory = 'x'", "convert.directory"),
            ("jobs = 0", "convert.jobs is 0, expected 1 to 64"),
            ("deadline_seconds = 0", "convert.deadline_seconds"),
        ] {
            let error = format!("{:#}", convert(text).unwrap().check().unwrap_err());
            assert!(error.contains(expected), "{error}");
        }
        let sync = |keys: &str| convert(&format!("[[convert.sync]]\n{keys}")).unwrap();
        let tables = sync("from = 'docker.io/library/a'\nto = 'b/c'\ntags = ['7.*']");
        let settings = tables.settings(Path::new("/")).unwrap();
        assert_eq!(settings.syncs[0].every, Duration::from_secs(21_600));
        for (from, to, tags, more, expected) in [
            ("a", "b", "'*'", "", "convert.sync[0].from is `a`"),
            ("r.example/a:1", "b", "'*'", "", "convert.sync[0].from"),
            ("r.example/a@1", "b", "'*'", "", "convert.sync[0].from"),
            ("r.example/a", "b:1", "'*'", "", "convert.sync[0].to"),
            ("r.example/a", "/b", "'*'", "", "convert.sync[0].to"),
            ("r.example/a", "b", "'a', 'x/y'", "", "convert.sync[0].tags has `x/y`"),
            ("r.example/a", "b", "", "", "convert.sync[0].tags is empty"),
            ("r.example/a", "b", "'*'", "every_seconds = 1", "convert.sync[0].every_seconds is 1"),
        ] {
            let keys = format!("from = '{from}'\nto = '{to}'\ntags = [{tags}]\n{more}");
            let error = format!("{:#}", sync(&keys).check().unwrap_err());
            assert!(error.contains(expected), "{error}");
        }
        let table = "from = 'r.example/a'\nto = 'b'\ntags = ['1']";
        let twice = sync(&format!("{table}\n[[convert.sync]]\n{table}")).check().unwrap_err();
        assert!(format!("{twice:#}").contains("convert.sync[1].to is `b`"), "{twice:#}");
        let error = convert("form = 'lazy'").unwrap_err().to_string();
        assert!(error.contains("`index` or `both`"), "{error}");
        assert!(convert("retries = 3").is_err());
        for (text, expected) in [
            ("", "convert.registry"),
            ("registry = 'https://r.example'", "convert.registry"),
            ("registry = 'r.example'", "convert.repositories"),
            ("registry = 'r.example'\nrepositories = ['a', 'b:1']", "convert.repositories[1]"),
            ("registry = 'r.example'\nrepositories = ['a']", "convert.secret_file"),
        ] {
            let config: Config = toml::from_str(&format!("[convert]\n{text}\n")).unwrap();
            let error = format!("{:#}", config.convert.unwrap().check().unwrap_err());
            assert!(error.contains(expected), "{error}");
        }
    }
}
