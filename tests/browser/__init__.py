"""The page in a real Chromium: `make test-browser`."""
