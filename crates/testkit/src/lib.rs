//! Odd trees, tree comparison, a faulty registry and private daemons for tests. Never shipped.
