//! Trust in referrers.

use crate::name::{ImageName, InvalidName, Reference};

/// Repositories in which a lazy image that refers to an ordinary one takes its place.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TrustedReferrers(Vec<Reference>);

/// The indexes of ordinary images that are trusted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IndexTrust {
    /// None.
    Nothing,
    /// Indexes that this node made from layers that it has hashed whole.
    Proven,
    /// Proven indexes, and those signed by a key that the policy trusts.
    #[default]
    Signed,
    /// Any that the image's repository has.
    Repository,
}

/// Whether a lazy image may replace the ordinary image that it refers to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Replacement {
    /// The ordinary image is used.
    Refused,
    /// The first lazy image that refers to it is used.
    Allowed,
}

/// The treatment of layers that have their own table of contents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SeekableLayers {
    /// Like any other layers.
    Ordinary,
    /// The tables are believed: an image of such layers is lazy.
    Lazy,
}

impl IndexTrust {
    /// Returns how seekable layers of the image `name` are treated. The image's digest covers their
    /// tables of contents, so these need no statement; but nothing has hashed the layers whole.
    pub fn seekable_layers(self, name: &ImageName) -> SeekableLayers {
        match self {
            // Write access to a layout directory means that its operator wrote it.
            _ if matches!(name, ImageName::Layout(_)) => SeekableLayers::Lazy,
            IndexTrust::Nothing | IndexTrust::Proven => SeekableLayers::Ordinary,
            IndexTrust::Signed | IndexTrust::Repository => SeekableLayers::Lazy,
        }
    }

    /// Returns whether any index of the image `name` may be used without a statement.
    pub(crate) fn trusts(self, name: &ImageName) -> bool {
        // Write access to a layout directory means that its operator wrote it.
        self == IndexTrust::Repository || matches!(name, ImageName::Layout(_))
    }
}

impl TrustedReferrers {
    /// Parses repositories, `HOST/PATH` as in image names.
    ///
    /// # Errors
    /// The number of the first invalid repository, and the problem.
    pub fn parse(repositories: &[String]) -> Result<Self, (usize, InvalidName)> {
        let parse = |(number, text): (usize, &String)| {
            let reference: Reference = text.parse().map_err(|error| (number, error))?;
            // A tag or digest follows the last part of the repository.
            if text.rsplit('/').next() != reference.repository().rsplit('/').next() {
                let problem = "expected a repository, without tag and digest";
                return Err((number, InvalidName::new(text, problem)));
            }
            Ok(reference)
        };
        repositories.iter().enumerate().map(parse).collect::<Result<_, _>>().map(Self)
    }

    /// Returns whether a referrer may replace the image `name`.
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
