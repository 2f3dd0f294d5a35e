"""Task files: how the rows of a table become requests, and where the answers go."""
