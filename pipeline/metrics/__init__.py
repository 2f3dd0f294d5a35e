"""Numbers of a running deployment, in Prometheus's format."""
