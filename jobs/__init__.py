"""What is a job, and what became of it: records, tables, the store, the HTTP API."""
