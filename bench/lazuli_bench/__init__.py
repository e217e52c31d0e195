"""HelloBench: how long until containers are ready, and what that takes, for several ways to bring their images."""
