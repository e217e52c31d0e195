//! Image configurations, kept byte for byte where they are not understood.

use std::fmt;

use serde::{
    Deserialize, Deserializer, Serialize, Serializer,
    de::{Error as _, MapAccess, Visitor},
    ser::SerializeMap,
};
use serde_json::{Map, Value, json, value::RawValue};

use super::{OciError, Platform, parse};
use crate::Digest;

/// An image configuration. The fields keep their order, and their values the exact bytes that they
/// had.
#[derive(Clone, Debug)]
pub struct ImageConfig {
    fields: Vec<(String, Box<RawValue>)>,
}

const DOCUMENT: &str = "image configuration";

/// History entry of the step that made a lazy image.
const CONVERT: &str = "lazuli convert";

/// History entry of the step that added a container's changes.
const COMMIT: &str = "lazuli commit";

impl ImageConfig {
    /// Parses a configuration of at most [`super::MAX_DOCUMENT`] bytes.
    pub fn parse(json: &[u8]) -> Result<Self, OciError> {
        parse(DOCUMENT, json)
    }

    /// A configuration for a root file system that has none.
    pub fn new(platform: &Platform) -> Self {
        let mut config = ImageConfig { fields: Vec::new() };
        config.set("architecture", json!(platform.architecture));
        if let Some(variant) = &platform.variant {
            config.set("variant", json!(variant));
        }
        config.set("os", json!(platform.os));
        config.set("config", json!({}));
        config
    }

    /// The platform the image runs on.
    pub fn platform(&self) -> Result<Platform, OciError> {
        let text = |name: &str| self.field::<String>(name);
        match (text("os")?, text("architecture")?) {
            (Some(os), Some(architecture)) => {
                let variant = text("variant")?.filter(|variant| !variant.is_empty());
                Ok(Platform { os, architecture, variant, features: Vec::new() })
            }
            _ => Err(OciError::Invalid {
                document: DOCUMENT,
                problem: "does not say for which platform the image is".into(),
            }),
        }
    }

    /// Digests of the layers' uncompressed tars, lowest first.
    pub fn diff_ids(&self) -> Result<Vec<Digest>, OciError> {
        #[derive(Deserialize)]
        struct RootFs {
            diff_ids: Option<Vec<Digest>>,
        }
        let rootfs: Option<RootFs> = self.field("rootfs")?;
        Ok(rootfs.and_then(|rootfs| rootfs.diff_ids).unwrap_or_default())
    }

    /// The bytes to store.
    pub fn to_json(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("strings and JSON values make JSON")
    }

    /// The configuration of the lazy image made from this one: other layers, and one more step in
    /// the history unless that is the last one already.
    pub(super) fn lazy(&self, diff_ids: Vec<Digest>) -> Result<Self, OciError> {
        let mut config = self.clone();
        let mut history: Vec<Box<RawValue>> = self.field("history")?.unwrap_or_default();
        let step = bootstrap_step();
        if history.last().is_none_or(|last| last.get() != step.get()) {
            history.push(step);
        }
        config.set("rootfs", json!({ "type": "layers", "diff_ids": diff_ids }));
        config.set("history", history);
        Ok(config)
    }

    /// This configuration with one more history step, before the bootstrap's: the base of a lazy
    /// image with a container's changes on top.
    pub fn committed(&self) -> Result<Self, OciError> {
        let mut config = self.clone();
        let mut history: Vec<Box<RawValue>> = self.field("history")?.unwrap_or_default();
        history.pop_if(|last| last.get() == bootstrap_step().get());
        history.push(raw(&json!({ "created_by": COMMIT })));
        config.set("history", history);
        Ok(config)
    }

    /// The configuration of an ordinary image with one layer, made from this one. History entries
    /// of the former layers remain, as steps without a layer.
    pub(super) fn flat(&self, diff_id: Digest) -> Result<Self, OciError> {
        let mut config = self.clone();
        let mut history: Vec<Map<String, Value>> = self.field("history")?.unwrap_or_default();
        let is_ours = |step: &Map<String, Value>| step.get("created_by") == Some(&json!(CONVERT));
        history.retain(|step| !is_ours(step));
        for step in &mut history {
            step.insert("empty_layer".to_owned(), json!(true));
        }
        let history: Vec<_> = history.into_iter().map(Value::Object).collect();
        let step = json!({ "created_by": "lazuli unpack", "comment": "all layers in one" });
        config.set("rootfs", json!({ "type": "layers", "diff_ids": [diff_id] }));
        config.set("history", [history, vec![step]].concat());
        Ok(config)
    }

    fn field<'a, T: Deserialize<'a>>(&'a self, name: &str) -> Result<Option<T>, OciError> {
        let Some((_, value)) = self.fields.iter().find(|(key, _)| key == name) else {
            return Ok(None);
        };
        serde_json::from_str(value.get())
            .map_err(|source| OciError::Json { document: DOCUMENT, source })
    }

    fn set(&mut self, name: &str, value: impl Serialize) {
        let value = raw(&value);
        match self.fields.iter_mut().find(|(key, _)| key == name) {
            Some((_, old)) => *old = value,
            None => self.fields.push((name.to_owned(), value)),
        }
    }
}

fn bootstrap_step() -> Box<RawValue> {
    raw(&json!({ "created_by": CONVERT, "comment": "bootstrap layer" }))
}

fn raw(value: &impl Serialize) -> Box<RawValue> {
    serde_json::value::to_raw_value(value).expect("strings and lists make JSON")
}

impl Serialize for ImageConfig {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.fields.len()))?;
        for (name, value) in &self.fields {
            map.serialize_entry(name, value)?;
        }
        map.end()
    }
}

impl<'de> Deserialize<'de> for ImageConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(Fields)
    }
}

struct Fields;

impl<'de> Visitor<'de> for Fields {
    type Value = ImageConfig;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<ImageConfig, A::Error> {
        let mut fields: Vec<(String, Box<RawValue>)> = Vec::new();
        while let Some((name, value)) = map.next_entry::<String, Box<RawValue>>()? {
            // Readers disagree on which of two equal keys counts, so an image must not have them.
            if fields.iter().any(|(known, _)| *known == name) {
                return Err(A::Error::custom(format!("the field `{name}` appears twice")));
            }
            // Real ones have a dozen fields; the search above is quadratic.
            if fields.len() == 1000 {
                return Err(A::Error::custom("more than 1000 fields"));
            }
            fields.push((name, value));
        }
        Ok(ImageConfig { fields })
    }
}
