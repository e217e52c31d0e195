//! Trust in referrers.

use crate::name::{ImageName, InvalidName, Reference};

/// Repositories in which a lazy image that refers to an ordinary one takes its place.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TrustedReferrers(Vec<Reference>);

/// Which index of an ordinary image is used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IndexTrust {
    /// None.
    Nothing,
    /// None but those that this node makes of layers that it has hashed whole.
    Proven,
    /// These, and those that a key vouches for which the policy trusts.
    #[default]
    Signed,
    /// Any that the image's repository has.
    Repository,
}

/// Whether a lazy image that refers to an ordinary one may take its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Replacement {
    /// The ordinary image is used.
    Refused,
    /// The first lazy image that refers to it is used.
    Allowed,
}

impl IndexTrust {
    /// Whether any index that belongs to the image `name` may be used without a statement.
    pub(crate) fn trusts(self, name: &ImageName) -> bool {
        // Write access to a layout directory means that its operator wrote it.
        self == IndexTrust::Repository || matches!(name, ImageName::Layout(_))
    }
}

impl TrustedReferrers {
    /// Parses repositories, `HOST/PATH` as images name them.
    ///
    /// # Errors
    /// The number of the first that is none, and why.
    pub fn parse(repositories: &[String]) -> Result<Self, (usize, InvalidName)> {
        let parse = |(number, text): (usize, &String)| {
            let reference: Reference = text.parse().map_err(|error| (number, error))?;
            // What names an image has its tag or digest behind the repository's last part.
            if text.rsplit('/').next() != reference.repository().rsplit('/').next() {
                let problem = "expected a repository, without tag and digest";
                return Err((number, InvalidName::new(text, problem)));
            }
            Ok(reference)
        };
        repositories.iter().enumerate().map(parse).collect::<Result<_, _>>().map(Self)
    }

    /// Whether a referrer may take the place of the image `name`.
    pub fn replacement(&self, name: &ImageName) -> Replacement {
        let is_trusted = match name {
            // Write access to a layout directory means that its operator wrote it.
            ImageName::Layout(_) => true,
            ImageName::Registry(reference) => {
                self.0.iter().any(|trusted| trusted.is_same_repository(reference))
            }
        };
        if is_trusted { Replacement::Allowed } else { Replacement::Refused }
    }
}
