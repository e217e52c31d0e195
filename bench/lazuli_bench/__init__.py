"""The benchmarks of `lazuli-bench`, a module for each verb."""
