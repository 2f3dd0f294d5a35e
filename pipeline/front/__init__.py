"""The command line, the HTTP client, and the server of the HTTP API."""
