"""What people and programs call: the command line, the client, the server of the HTTP API."""
