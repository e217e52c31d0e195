//! How to move an image: names, credentials, registries and OCI layout directories.
