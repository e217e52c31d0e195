//! One rule of the policy, and the files that it names.

use std::{
    fmt,
    io::{self, Read as _},
    path::{Path, PathBuf},
    time::Duration,
};

use lazuli_image::{Algorithm, Digest};
use serde::Deserialize;

use crate::{
    external_verifier::ExternalVerifier,
    key::{KEY_LIMIT, PublicKey},
    keyless::{self, Keyless},
    name::Scope,
};

/// Maximum number of keys of one rule.
const KEYS: usize = 64;

/// Time limit for a verifier program, as containerd's default.
const PROGRAM_TIMEOUT: Duration = Duration::from_secs(10);

/// Reads a whole file of at most the given number of bytes.
pub type ReadFile<'a> = dyn Fn(&Path, usize) -> io::Result<Vec<u8>> + 'a;

/// The evidence that one rule requires.
#[derive(Debug)]
pub(crate) enum Rule {
    Accept,
    Reject,
    Require(Box<Requirement>),
}

/// The evidence that a rule accepts: signatures, or statements by converters.
#[derive(Debug)]
pub(crate) struct Requirement {
    pub(crate) ground: Option<Ground>,
    pub(crate) converters: Converters,
    /// Other names that a signature may have.
    pub(crate) signed_as: Vec<Scope>,
}

/// Converters, whose statements let the signature of an image's source count.
#[derive(Debug)]
pub(crate) struct Converters {
    pub(crate) keys: Vec<PublicKey>,
    /// The number of keys that must state the same conversion.
    pub(crate) threshold: usize,
}

/// The kind of signature required.
#[derive(Debug)]
pub(crate) enum Ground {
    /// None: the rule exists for the keys of its statements.
    Anything,
    Keys {
        keys: Vec<PublicKey>,
        threshold: usize,
    },
    Keyless(Box<Keyless>),
    ExternalVerifier(ExternalVerifier),
}

impl Requirement {
    /// Returns whether images run without a signature.
    pub(crate) fn accepts_anything(&self) -> bool {
        matches!(self.ground, Some(Ground::Anything))
    }
}

impl fmt::Display for Requirement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.ground {
            Some(Ground::Keys { keys, .. }) if keys.len() == 1 => {
                write!(f, "a signature by key {}", keys[0].fingerprint())?;
            }
            Some(Ground::Keys { keys, threshold }) => {
                write!(f, "signatures by {threshold} of {} keys", keys.len())?;
            }
            Some(Ground::Keyless(keyless)) => write!(f, "a signature by {keyless}")?,
            Some(Ground::ExternalVerifier(program)) => write!(f, "the consent of {program}")?,
            Some(Ground::Anything) => f.write_str("nothing")?,
            None => {}
        }
        let Converters { keys, threshold } = &self.converters;
        if keys.is_empty() {
            return Ok(());
        }
        if self.ground.is_some() {
            f.write_str(", or ")?;
        }
        match threshold {
            1 => f.write_str("a conversion statement"),
            _ => write!(f, "conversion statements by {threshold} of {} keys", keys.len()),
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    #[serde(default)]
    accept: bool,
    #[serde(default)]
    keys: Vec<PathBuf>,
    threshold: Option<usize>,
    keyless: Option<keyless::Table>,
    exec: Option<PathBuf>,
    timeout_seconds: Option<u64>,
    #[serde(default)]
    statements: Vec<PathBuf>,
    statements_threshold: Option<usize>,
    #[serde(default)]
    signed_as: Vec<String>,
}

/// Reads files and caches their content.
pub(super) struct Reader<'a> {
    pub(super) read: &'a ReadFile<'a>,
    pub(super) seen: Vec<(PathBuf, Vec<u8>)>,
}

impl Reader<'_> {
    pub(super) fn rule(&mut self, value: toml::Value) -> Result<Rule, String> {
        let table = match value {
            toml::Value::String(word) => {
                return match word.as_str() {
                    "accept" => Ok(Rule::Accept),
                    "reject" => Ok(Rule::Reject),
                    _ => Err(format!("{word:?}, expected \"accept\", \"reject\" or a table")),
                };
            }
            toml::Value::Table(table) => table,
            other => {
                let kind = other.type_str();
                return Err(format!("a {kind}, expected \"accept\", \"reject\" or a table"));
            }
        };
        let table: Table = table.try_into().map_err(|error: toml::de::Error| error.to_string())?;
        let signed_as = table.signed_as.iter().map(|scope| {
            Scope::parse(scope).map_err(|problem| format!("signed_as has {scope:?}: {problem}"))
        });
        let signed_as = signed_as.collect::<Result<_, _>>()?;
        let converters = self.converters(&table)?;
        let accepts = table.accept;
        let ground = self.ground(table)?;
        let ground = match (accepts, ground) {
            (true, None) if !converters.keys.is_empty() => Some(Ground::Anything),
            (true, _) => {
                return Err("accept goes with statements, and with nothing else".to_owned());
            }
            (false, ground) => ground,
        };
        if ground.is_none() && converters.keys.is_empty() {
            return Err("expected keys, keyless, exec or statements".to_owned());
        }
        Ok(Rule::Require(Box::new(Requirement { ground, converters, signed_as })))
    }

    fn converters(&mut self, table: &Table) -> Result<Converters, String> {
        let keys = self.keys("statements", &table.statements)?;
        let threshold = match table.statements_threshold {
            Some(_) if keys.is_empty() => {
                return Err("statements_threshold is for statements".to_owned());
            }
            Some(threshold) => checked_threshold("statements_threshold", threshold, keys.len())?,
            None => 1,
        };
        Ok(Converters { keys, threshold })
    }

    fn ground(&mut self, table: Table) -> Result<Option<Ground>, String> {
        let Table { keys, threshold, keyless, exec, timeout_seconds, .. } = table;
        if threshold.is_some() && keys.is_empty() {
            return Err("threshold is for keys".to_owned());
        }
        if timeout_seconds.is_some() && exec.is_none() {
            return Err("timeout_seconds is for exec".to_owned());
        }
        match (keys.is_empty(), keyless, exec) {
            (true, None, None) => Ok(None),
            (false, None, None) => {
                let keys = self.keys("keys", &keys)?;
                let threshold = checked_threshold("threshold", threshold.unwrap_or(1), keys.len())?;
                Ok(Some(Ground::Keys { keys, threshold }))
            }
            (true, Some(table), None) => {
                let root =
                    self.file("keyless.trusted_root", &table.trusted_root, keyless::LIMIT)?;
                Ok(Some(Ground::Keyless(Box::new(Keyless::new(table, &root)?))))
            }
            (true, None, Some(path)) => {
                let timeout = timeout_seconds.map_or(PROGRAM_TIMEOUT, Duration::from_secs);
                if !path.is_absolute() || timeout.is_zero() {
                    return Err(format!(
                        "exec is {} for {} s, expected an absolute path and 1 s or more",
                        path.display(),
                        timeout.as_secs()
                    ));
                }
                Ok(Some(Ground::ExternalVerifier(ExternalVerifier { path, timeout })))
            }
            _ => Err("expected one of keys, keyless and exec".to_owned()),
        }
    }

    /// Reads different keys: a key listed twice must not count twice.
    fn keys(&mut self, what: &str, paths: &[PathBuf]) -> Result<Vec<PublicKey>, String> {
        if paths.len() > KEYS {
            return Err(format!("{what} has {} files, expected at most {KEYS}", paths.len()));
        }
        let mut keys: Vec<PublicKey> = Vec::new();
        for path in paths {
            let pem = self.file(what, path, KEY_LIMIT)?;
            let key = PublicKey::from_pem(&pem)
                .map_err(|error| format!("{what} has {}: {error}", path.display()))?;
            if keys.contains(&key) {
                return Err(format!("{what} has {}: a key that is listed twice", path.display()));
            }
            keys.push(key);
        }
        Ok(keys)
    }

    fn file(&mut self, what: &str, path: &Path, limit: usize) -> Result<Vec<u8>, String> {
        if !path.is_absolute() {
            return Err(format!("{what} has {}, expected an absolute path", path.display()));
        }
        let content = (self.read)(path, limit)
            .map_err(|error| format!("{what} has {}: {error}", path.display()))?;
        self.seen.push((path.to_owned(), content.clone()));
        Ok(content)
    }

    pub(super) fn hash(&self) -> Digest {
        let mut hasher = Algorithm::Blake3.hasher();
        for (path, content) in &self.seen {
            for part in [path.as_os_str().as_encoded_bytes(), content] {
                hasher.update(&(part.len() as u64).to_le_bytes());
                hasher.update(part);
            }
        }
        hasher.finish()
    }
}

/// Checks that `keys` keys can reach the threshold.
fn checked_threshold(what: &str, threshold: usize, keys: usize) -> Result<usize, String> {
    if (1..=keys).contains(&threshold) {
        Ok(threshold)
    } else {
        Err(format!("{what} is {threshold}, expected 1 to {keys}: its keys"))
    }
}

/// A whole file of at most `limit` bytes.
pub(crate) fn read_file(path: &Path, limit: usize) -> io::Result<Vec<u8>> {
    let mut content = Vec::new();
    std::fs::File::open(path)?.take(limit as u64 + 1).read_to_end(&mut content)?;
    if content.len() > limit {
        return Err(io::Error::other(format!("it has more than {limit} bytes")));
    }
    Ok(content)
}
