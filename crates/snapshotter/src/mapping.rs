//! User namespaces: which ids of the node those of a container are.

use crate::{
    SnapshotError,
    directories::Owner,
    label::{Labels, TARGET},
};

const UIDS: &str = "containerd.io/snapshot/uidmapping";
const GIDS: &str = "containerd.io/snapshot/gidmapping";

/// As many ranges as the kernel takes.
const LIMIT: usize = 340;

/// Two lists of ranges, `CONTAINER:NODE:COUNT` with commas between them.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Mapping {
    uids: String,
    gids: String,
    /// Uid and gid on the node of the container's root.
    root: (u32, u32),
}

impl Mapping {
    /// Reads the labels of a snapshot. Those of a layer map nothing: they may be the image's own
    /// annotations, and the layer is shared by whatever has it below.
    ///
    /// # Errors
    /// One list without the other, lists that cannot be read, and those that leave out root.
    pub(crate) fn of(labels: &Labels) -> Result<Option<Self>, SnapshotError> {
        if labels.contains_key(TARGET) {
            return Ok(None);
        }
        match [UIDS, GIDS].map(|label| labels.get(label)) {
            [None, None] => Ok(None),
            [Some(uids), Some(gids)] => {
                let root = (root(UIDS, uids)?, root(GIDS, gids)?);
                Ok(Some(Mapping { uids: uids.clone(), gids: gids.clone(), root }))
            }
            _ => Err(SnapshotError::Invalid(format!(
                "there is only one of the labels {UIDS} and {GIDS}"
            ))),
        }
    }

    /// The owner of files that the container's root makes.
    pub(crate) fn owner(&self) -> Owner {
        Owner::Ids(self.root.0, self.root.1)
    }

    /// The mount options by which containerd 2.x maps the lower layers. overlayfs itself doesn't
    /// know them.
    pub(crate) fn options(&self) -> [String; 2] {
        [format!("uidmap={}", self.uids), format!("gidmap={}", self.gids)]
    }
}

/// The id to which 0 is mapped.
fn root(label: &str, ranges: &str) -> Result<u32, SnapshotError> {
    let invalid = |problem: String| SnapshotError::Invalid(format!("label {label}: {problem}"));
    let mut root = None;
    for (index, range) in ranges.split(',').enumerate() {
        if index == LIMIT {
            return Err(invalid(format!("the kernel takes no more than {LIMIT} ranges")));
        }
        let numbers: Vec<u32> = range.split(':').filter_map(|number| number.parse().ok()).collect();
        let &[inside, outside, count] = &numbers[..] else {
            return Err(invalid(format!("`{range:.100}` is not CONTAINER:NODE:COUNT")));
        };
        // The last number is no user's, see chown(2).
        if [inside, outside].iter().any(|first| first.checked_add(count).is_none()) || count == 0 {
            return Err(invalid(format!("`{range}` has no numbers or too large ones")));
        }
        if inside == 0 {
            root = root.or(Some(outside));
        }
    }
    root.ok_or_else(|| invalid(format!("`{ranges:.100}` does not map id 0")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(uids: &str, gids: &str) -> Labels {
        let pairs = [(UIDS, uids), (GIDS, gids)].into_iter().filter(|(_, value)| !value.is_empty());
        pairs.map(|(key, value)| (key.to_owned(), value.to_owned())).collect()
    }

    #[test]
    fn id_mappings_are_parsed_from_both_labels() {
        assert_eq!(Mapping::of(&Labels::new()).unwrap(), None);
        let mapping = Mapping::of(&labels("1:5:10,0:100000:1", "0:200000:65536")).unwrap().unwrap();
        assert_eq!(mapping.owner(), Owner::Ids(100_000, 200_000));
        assert_eq!(mapping.options(), ["uidmap=1:5:10,0:100000:1", "gidmap=0:200000:65536"]);
        let target = (TARGET.to_owned(), "sha256:1".to_owned());
        for (uids, gids) in [("0:1000:1", "0:1000:1"), ("0:1000:1", "")] {
            let of_layer = labels(uids, gids).into_iter().chain([target.clone()]).collect();
            assert_eq!(Mapping::of(&of_layer).unwrap(), None);
        }
        for (uids, gids, problem) in [
            ("0:1:1", "", "only one of the labels"),
            ("0:1:1", "0:1", "`0:1` is not"),
            ("0:1:-1", "0:1:1", "`0:1:-1` is not"),
            ("0:1:1:1", "0:1:1", "is not CONTAINER:NODE:COUNT"),
            ("0:4294967295:1", "0:1:1", "too large"),
            ("0:1:0", "0:1:1", "has no numbers"),
            ("1:1:1", "0:1:1", "does not map id 0"),
            (&["1:1:1"; 341].join(","), "0:1:1", "340"),
        ] {
            let error = Mapping::of(&labels(uids, gids)).unwrap_err().to_string();
            assert!(error.contains(problem), "{error}");
        }
    }
}
