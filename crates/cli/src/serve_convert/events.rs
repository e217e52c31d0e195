//! What registries report: notifications of CNCF distribution, and webhooks of Harbor.
//!
//! ```text
//! {"events": [{"action": "push", "target": {"repository": "team/app", "tag": "1", "digest": ""}}]}
//! {"type": "PUSH_ARTIFACT", "event_data": {"repository": {"repo_full_name": "team/app"},
//!                                          "resources": [{"tag": "1", "digest": "sha256:…"}]}}
//! ```
//!
//! Only repository, tag and digest are read. Both have URLs and hosts, too, which count for
//! nothing.

use lazuli_image::Digest;
use lazuli_registry::{Reference, is_beside_image};
use serde::Deserialize;

/// Parsed events.
#[derive(Debug, Default)]
pub(crate) struct Events {
    /// What to look at: a tag that was pushed, with the digest that it names then, or a digest that
    /// was deleted.
    pub(crate) images: Vec<Reference>,
    /// Why others were left out, with their names.
    pub(crate) left_out: Vec<String>,
}

/// The body of either.
#[derive(Debug, Deserialize)]
struct Body {
    events: Option<Vec<Notification>>,
    #[serde(rename = "type")]
    kind: Option<String>,
    event_data: Option<EventData>,
}

/// An event of CNCF distribution.
#[derive(Debug, Deserialize)]
struct Notification {
    action: Option<String>,
    target: Option<Target>,
}

#[derive(Debug, Deserialize)]
struct Target {
    repository: Option<String>,
    tag: Option<String>,
    digest: Option<String>,
}

/// An event of Harbor.
#[derive(Debug, Deserialize)]
struct EventData {
    repository: Option<Repository>,
    #[serde(default)]
    resources: Vec<Resource>,
}

#[derive(Debug, Deserialize)]
struct Repository {
    repo_full_name: Option<String>,
}

#[derive(Debug, Deserialize)]
struct Resource {
    tag: Option<String>,
    digest: Option<String>,
}

/// Parses a body with events of `registry`. Those of other kinds are no error: a registry would
/// send a refused body again and again, and nothing after it.
///
/// # Errors
/// It is not the body of a known registry.
pub(crate) fn parse(body: &[u8], registry: &str) -> Result<Events, String> {
    let body = serde_json::from_slice::<Body>(body);
    let body = body.map_err(|error| format!("the body is not JSON of events: {error}"))?;
    let mut events = Events::default();
    match (body.events, body.kind) {
        (Some(notifications), _) => {
            for Notification { action, target } in notifications {
                let (Some(action), Some(target)) = (action, target) else { continue };
                let Some(repository) = target.repository else { continue };
                match action.as_str() {
                    "push" => events.pushed(registry, &repository, target.tag, target.digest),
                    "delete" => events.deleted(registry, &repository, target.digest),
                    _ => {}
                }
            }
        }
        (None, Some(kind)) => {
            let Some(data) = body.event_data else { return Ok(events) };
            let name = data.repository.and_then(|repository| repository.repo_full_name);
            let Some(repository) = name else { return Ok(events) };
            for Resource { tag, digest } in data.resources {
                match kind.as_str() {
                    "PUSH_ARTIFACT" => events.pushed(registry, &repository, tag, digest),
                    "DELETE_ARTIFACT" => events.deleted(registry, &repository, digest),
                    _ => {}
                }
            }
        }
        (None, None) => {
            return Err(
                "the body has neither `events`, as CNCF distribution sends them, nor `type`, \
                        as Harbor does"
                    .to_owned(),
            );
        }
    }
    Ok(events)
}

impl Events {
    /// Blobs, and manifests that are pushed by their digest, have no tag: entries of an index, and
    /// artifacts beside an image.
    fn pushed(
        &mut self,
        registry: &str,
        repository: &str,
        tag: Option<String>,
        digest: Option<String>,
    ) {
        // Harbor names a digest where there is no tag.
        let tag = tag.filter(|tag| !tag.is_empty() && !tag.starts_with("sha256:"));
        let Some(tag) = tag.filter(|tag| !is_beside_image(tag)) else { return };
        let digest = digest.filter(|digest| digest.parse::<Digest>().is_ok());
        let digest = digest.map(|digest| format!("@{digest}")).unwrap_or_default();
        let is_meant = |name: &Reference| name.tag() == Some(&tag);
        self.add(registry, repository, &format!(":{tag}{digest}"), is_meant);
    }

    fn deleted(&mut self, registry: &str, repository: &str, digest: Option<String>) {
        let Some(digest) = digest else { return };
        self.add(registry, repository, &format!("@{digest}"), |name| name.tag().is_none());
    }

    fn add(
        &mut self,
        registry: &str,
        repository: &str,
        end: &str,
        is_meant: impl Fn(&Reference) -> bool,
    ) {
        match format!("{registry}/{repository}{end}").parse::<Reference>() {
            // Not if a part of one was taken for another.
            Ok(name)
                if name.registry() == registry
                    && name.repository() == repository
                    && is_meant(&name) =>
            {
                self.images.push(name);
            }
            Ok(name) => self.left_out.push(format!("`{name}` is not what the event names")),
            Err(error) => self.left_out.push(error.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::slice;

    use super::*;

    const DIGEST: &str = "sha256:44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a";

    fn names(body: &str) -> Vec<String> {
        let events = parse(body.as_bytes(), "r.example:5000").unwrap();
        events.images.iter().map(ToString::to_string).collect()
    }

    fn notification(action: &str, repository: &str, tag: &str) -> String {
        format!(
            r#"{{"events":[{{"id":"1","action":"{action}","target":{{"mediaType":"m","digest":"{DIGEST}",
            "repository":"{repository}","url":"http://evil.example/v2/","tag":{tag}}},
            "request":{{"host":"evil.example"}}}}]}}"#
        )
    }

    #[test]
    fn pushed_tags_and_deleted_digests_of_both_registries_are_read() {
        let pinned = format!("r.example:5000/team/app@{DIGEST}");
        let tagged = format!("r.example:5000/team/app:1@{DIGEST}");
        assert_eq!(names(&notification("push", "team/app", r#""1""#)), slice::from_ref(&tagged));
        let deleted = names(&notification("delete", "team/app", "null"));
        assert_eq!(deleted, slice::from_ref(&pinned));
        let harbor = |kind: &str, tag: &str| {
            format!(
                r#"{{"type":"{kind}","occur_at":1,"operator":"a","event_data":{{"resources":[
                {{"digest":"{DIGEST}","tag":"{tag}","resource_url":"evil.example/a:1"}}],
                "repository":{{"name":"app","namespace":"team","repo_full_name":"team/app"}}}}}}"#
            )
        };
        assert_eq!(names(&harbor("PUSH_ARTIFACT", "1")), [tagged]);
        assert_eq!(names(&harbor("DELETE_ARTIFACT", "1")), [pinned]);
        for other in ["PULL_ARTIFACT", "SCANNING_COMPLETED", ""] {
            assert!(names(&harbor(other, "1")).is_empty(), "{other}");
        }
        assert!(names(&harbor("PUSH_ARTIFACT", DIGEST)).is_empty());
    }

    #[test]
    fn blobs_pulls_and_lists_of_referrers_are_ignored() {
        let list = format!("\"{}\"", DIGEST.replace(':', "-"));
        let signature = format!("\"{}.sig\"", DIGEST.replace(':', "-"));
        for (action, tag) in [
            ("push", "null"),
            ("push", r#""""#),
            ("pull", r#""1""#),
            ("mount", r#""1""#),
            ("push", &list),
            ("push", &signature),
        ] {
            assert!(names(&notification(action, "team/app", tag)).is_empty(), "{action} {tag}");
        }
        assert!(names(r#"{"events":[]}"#).is_empty());
        assert!(names(r#"{"events":[{}, {"action":"push"}, {"target":{}}]}"#).is_empty());
    }

    #[test]
    fn names_that_are_none_are_left_out() {
        for (repository, tag) in [
            ("../app", "1"),
            ("team/../app", "1"),
            ("evil.example/../app", "1"),
            ("app:2", "1"),
            ("app@sha256", "1"),
            ("", "1"),
            ("/app", "1"),
            ("app", ".."),
            ("app", "a/b"),
            ("app", "1@sha256:00"),
            ("App", "1"),
        ] {
            let body = notification("push", repository, &format!("\"{tag}\""));
            let events = parse(body.as_bytes(), "r.example").unwrap();
            assert!(events.images.is_empty(), "{repository}:{tag}");
            assert_eq!(events.left_out.len(), 1, "{repository}:{tag}");
        }
        let colon = notification("delete", "app:1", "null");
        assert!(parse(colon.as_bytes(), "r.example").unwrap().images.is_empty());
        // A host in the name is a part of a path.
        let host = notification("push", "evil.example/app", r#""1""#);
        assert_eq!(names(&host), [format!("r.example:5000/evil.example/app:1@{DIGEST}")]);
    }

    #[test]
    fn other_bodies_are_refused() {
        for body in
            ["", "{}", "[]", "1", "{\"events\":1}", "{\"events\":[1]}", "\u{0}", "{\"a\":1}"]
        {
            assert!(parse(body.as_bytes(), "r.example").is_err(), "{body}");
        }
        let deep = "[".repeat(100_000);
        assert!(parse(deep.as_bytes(), "r.example").is_err());
        let ignored = format!("{{\"events\":[],\"a\":{deep}}}");
        assert!(parse(ignored.as_bytes(), "r.example").is_err());
    }
}
